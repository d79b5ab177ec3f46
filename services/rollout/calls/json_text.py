"""Rows and episodes as JSON: for processes and services of users, and for sample records."""

import json
from collections.abc import Mapping, Set
from typing import Any


def json_text(value: Any) -> str:
    """Returns a value as JSON text; converts every value of a row that JSON cannot represent.

    NumPy and torch values become numbers and lists, tuples and sets become lists, keys of mappings and
    all other values become text.

    Raises:
        RecursionError: If the value contains itself.
    """
    try:
        return json.dumps(value, default=_plain)
    except TypeError:  # a key whose type JSON lacks
        return json.dumps(_with_text_keys(value), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return list(value)
    as_list = getattr(value, "tolist", None)  # of NumPy and torch, scalars included
    return as_list() if callable(as_list) else str(value)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else str(key): _with_text_keys(each)
            for key, each in value.items()
        }
    return [_with_text_keys(each) for each in value] if isinstance(value, list | tuple) else value
