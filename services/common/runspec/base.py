"""Base class of all parts of a RunSpec, and lookup of the names that its values may have."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Final, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticKnownError, core_schema

from services.common.doors import Door, References

MAX_SECONDS: Final = 365 * 86_400.0
"""Max of every time in seconds. A much larger one overflows in timers and in deadlines of gRPC."""


_SURROGATE = re.compile("[\ud800-\udfff]")
AtLeastOne = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]


class SpecPart(BaseModel):
    """A frozen part of a :class:`~services.common.runspec.run.RunSpec`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Rejects YAML's ``yes`` and ``no`` for numbers, which would count as 1 and 0, and NUL in texts."""
        if isinstance(value, bool):
            annotation = cls.model_fields[info.field_name or ""].annotation
            types = {annotation, *get_args(annotation)}
            if types & {int, float} and bool not in types:
                raise ValueError(f"must be a finite number, got {str(value).lower()}")
        elif isinstance(value, str) and "\0" in value:
            raise ValueError(f"must be text without NUL characters, got {value[:80]!r}")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _check_json(cls, value: Any) -> Any:
        """Rejects what JSON in UTF-8 cannot express, at any depth: lone surrogates, infinity and NaN."""
        if problem := next(_not_json(value), ""):
            raise ValueError(problem)
        return value


def _not_json(value: Any) -> Iterator[str]:
    """Yields a problem for each part of a value that JSON in UTF-8 cannot express."""
    if isinstance(value, str) and _SURROGATE.search(value):
        yield f"must be text of Unicode characters, got {value[:80]!r}"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"must have finite numbers only, got {value}"
    elif value is not None and not isinstance(value, (str, float, int, BaseModel)):
        items = (*value, *value.values()) if isinstance(value, Mapping) else value
        for item in items if isinstance(items, list | tuple) else ():
            yield from _not_json(item)


_Entry = TypeVar("_Entry")


def look_up(table: Mapping[str, _Entry], name: str, *, key: str) -> _Entry:
    """Returns the entry of a table that the value of a key names.

    Raises:
        ValueError: If there is no such entry; the message has the key, the known names and the value.
    """
    if name not in table:
        raise ValueError(
            f"{key} must be one of {', '.join(map(repr, table))}, got {name!r}."
            + did_you_mean(name, tuple(table))
        )
    return table[name]


@dataclass(frozen=True, slots=True)
class NameIn:
    """Annotation of a key whose value is a name of a door, as in ``Annotated[str, NameIn(ENGINES)]``."""

    door: Door[Any] | References
    also: tuple[str, ...] = ()
    """Further values."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "examples": [*self.also, *self.door.own_names()]}

    def _check(self, name: str) -> str:
        """Raises the error of a ``Literal`` for an unknown name, and ``DoorError`` for an unusable one."""
        if name in self.also:
            return name
        if name not in self.door:
            *names, last = map(repr, (*self.also, *self.door))
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(names)} or {last}"})
        self.door[name]
        return name


def in_yaml(value: Any) -> str:
    """Returns a value as a specification has it; of a part, the keys that differ from their defaults."""
    if isinstance(value, SpecPart):
        return json.dumps(value.model_dump(mode="json", exclude_defaults=True))
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """Returns a question with the most similar known name, after a space; empty if none is similar."""
    matches = get_close_matches(name, names, n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""
