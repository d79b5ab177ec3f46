"""Parser of tool calls in the policy's text: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

TOOL_CALL_BEGIN: Final = "<tool_call>"
"""Text before a call."""
_TOOL_CALL_END: Final = "</tool_call>"


class CallText(NamedTuple):
    """A call as the policy wrote it."""

    place: int
    """Start of the call in the text."""
    json: str
    """Text between the tags: in braces, but not necessarily JSON."""


def call_texts(text: str) -> Iterator[CallText]:
    """Finds all calls in linear time, since a model may repeat a tag thousands of times."""
    begin = text.find(TOOL_CALL_BEGIN)
    while begin >= 0:
        end = text.find(_TOOL_CALL_END, begin)
        if end < 0:
            return
        call = _call_text(text, begin, end)
        if call is None:  # the tag may be prose, and the call may start at a later tag
            call = _call_text(text, text.rfind(TOOL_CALL_BEGIN, begin, end), end)
        if call is not None:
            yield call
        begin = text.find(TOOL_CALL_BEGIN, end)


def _call_text(text: str, begin: int, end: int) -> CallText | None:
    inner = text[begin + len(TOOL_CALL_BEGIN) : end].strip()
    is_call = inner.startswith("{") and inner.endswith("}")
    return CallText(begin, inner) if is_call else None


def tool_calls(text: str) -> list[dict[str, Any]]:
    """Returns ``name`` and ``arguments`` of each call in a text; skips invalid JSON."""
    calls = []
    for found in call_texts(text):
        try:
            call = json.loads(found.json)
            calls.append({"name": str(call["name"]), "arguments": call.get("arguments", {})})
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return calls
