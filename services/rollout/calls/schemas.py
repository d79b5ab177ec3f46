"""Tool schemas of Python functions, for chat templates."""

import inspect
from typing import Any

from pydantic import TypeAdapter

from services.common.callables import load_callable


def tool_schema(reference: str) -> dict[str, Any]:
    """Describes a function in the format of OpenAI's API: name, docstring, and parameters from their types.

    Args:
        reference: ``module:function`` or ``file.py:function``.

    Raises:
        ValueError: If its parameters have no JSON schema.
    """
    function: Any = load_callable(reference)
    try:
        parameters = TypeAdapter(function).json_schema()
    except Exception as error:
        raise ValueError(
            f"no JSON schema can be generated for {reference!r}: {error}; annotate its parameters with JSON "
            "types"
        ) from error
    return {
        "type": "function",
        "function": {
            "name": reference.rpartition(":")[2],
            "description": inspect.getdoc(function) or "",
            "parameters": parameters,
        },
    }
