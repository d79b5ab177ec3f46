"""Converts dataclasses to protobuf messages with the same fields; ``num_keys`` maps to ``key_count``."""

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

_Message = TypeVar("_Message", bound=Message)
_Value = TypeVar("_Value")


def to_message(value: Any, kind: type[_Message], **replacements: Any) -> _Message:
    """Builds a message from a dataclass; ``replacements`` overrides or adds fields."""
    pairs = _pairs(kind.DESCRIPTOR, value.__class__)
    return kind(**{name: getattr(value, field) for name, field, *_ in pairs} | replacements)


def from_message(message: Message, kind: Callable[..., _Value], **replacements: Any) -> _Value:
    """Builds a dataclass from a message; ``replacements`` overrides or adds fields.

    Repeated values become tuples; an absent nested message becomes None.
    """
    values: dict[str, Any] = {}
    for name, field, is_repeated, is_message in _pairs(message.DESCRIPTOR, kind):
        if is_message and not message.HasField(name):
            values[field] = None
        else:
            value = getattr(message, name)
            values[field] = tuple(value) if is_repeated else value
    return kind(**values | replacements)


@cache
def _pairs(message: Descriptor, kind: Any) -> list[tuple[str, str, bool, bool]]:
    """Returns each message field with its dataclass field, whether it is repeated, and whether a message.

    Raises:
        KeyError: If the dataclass lacks a field of the message.
    """
    names = {_counted(field.name): field.name for field in fields(kind)}
    return [
        (f.name, names[f.name], f.is_repeated, f.has_presence and bool(f.message_type))
        for f in message.fields
    ]


def _counted(name: str) -> str:
    if not name.startswith("num_"):
        return name
    return f"{name.removeprefix('num_').removesuffix('s')}_count"
