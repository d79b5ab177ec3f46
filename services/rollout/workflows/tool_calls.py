"""Calls of tools in what the policy says: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

import json
import re
from typing import Any

TOOL_CALL_BEGIN = "<tool_call>"
"""What the policy says before a call."""
TOOL_CALL = re.compile(rf"{TOOL_CALL_BEGIN}\s*(\{{.*?\}})\s*</tool_call>", re.DOTALL)
"""A call; its group is the JSON."""


def tool_calls(text: str) -> list[dict[str, Any]]:
    """``name`` and ``arguments`` of each call in a text; what is no JSON is left out."""
    calls = []
    for found in TOOL_CALL.findall(text):
        try:
            call = json.loads(found)
            calls.append({"name": str(call["name"]), "arguments": call.get("arguments", {})})
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return calls
