"""How large and how deep a document may be that somebody else wrote, before anything looks into it."""

from typing import Any

MAX_DOCUMENT_BYTES = 256 << 10
"""Of a request to the run API, over REST and over gRPC."""
MAX_DEPTH = 20
MAX_ITEMS = 10_000


def shape_problem(document: Any) -> str:
    """What makes a document too deep or too long to be looked into; empty if nothing does.

    Works level by level, so that depth cannot exhaust the stack.
    """
    level, depth = [document], 0
    while level:
        if depth > MAX_DEPTH:
            return f"is nested more than {MAX_DEPTH} levels deep"
        below: list[Any] = []
        for value in level:
            if isinstance(value, (dict, list)):
                if len(value) > MAX_ITEMS:
                    return f"has a list or an object of more than {MAX_ITEMS} items"
                below += value.values() if isinstance(value, dict) else value
        level, depth = below, depth + 1
    return ""
