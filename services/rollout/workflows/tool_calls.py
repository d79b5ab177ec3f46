"""Calls of tools in what the policy says: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

TOOL_CALL_BEGIN: Final = "<tool_call>"
"""What the policy says before a call."""
_TOOL_CALL_END: Final = "</tool_call>"


class CallText(NamedTuple):
    """A call as the policy wrote it."""

    place: int
    """Where it begins in the text."""
    json: str
    """What is between the marks: in braces, but not necessarily JSON."""


def call_texts(text: str) -> Iterator[CallText]:
    """All calls in a text, in linear time: a model may repeat a mark thousands of times."""
    begin = text.find(TOOL_CALL_BEGIN)
    while begin >= 0:
        end = text.find(_TOOL_CALL_END, begin)
        if end < 0:
            return
        call = _call_text(text, begin, end)
        if call is None:  # the mark may have been prose, and the call begin after another one
            call = _call_text(text, text.rfind(TOOL_CALL_BEGIN, begin, end), end)
        if call is not None:
            yield call
        begin = text.find(TOOL_CALL_BEGIN, end)


def _call_text(text: str, begin: int, end: int) -> CallText | None:
    inner = text[begin + len(TOOL_CALL_BEGIN) : end].strip()
    is_call = inner.startswith("{") and inner.endswith("}")
    return CallText(begin, inner) if is_call else None


def tool_calls(text: str) -> list[dict[str, Any]]:
    """``name`` and ``arguments`` of each call in a text; what is no JSON is left out."""
    calls = []
    for found in call_texts(text):
        try:
            call = json.loads(found.json)
            calls.append({"name": str(call["name"]), "arguments": call.get("arguments", {})})
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return calls
