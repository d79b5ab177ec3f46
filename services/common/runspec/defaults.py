"""Defaults of the keys of one specification, of which some depend on its other keys."""

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from services.common.runspec.keys import flat
from services.common.runspec.loader import SpecError, canonical_json, parse_spec
from services.common.runspec.run import RunSpec


def defaults_of(spec: RunSpec) -> dict[str, Any]:
    """Returns the value that each dotted key would have if the specification did not set it.

    Keys without which the specification is invalid are absent.
    """
    document = json.loads(canonical_json(spec))
    values = dict(flat(document))
    # The other keys have the default of their field, which depends on no other key.
    changed = {key for key in _changed_fields(spec) if key in values}
    defaults = {key: value for key, value in values.items() if key not in changed}
    for key in changed:
        try:
            without = dict(flat(json.loads(canonical_json(parse_spec(_without(document, key))))))
        except SpecError:
            continue
        defaults[key] = without.get(key)
    return defaults


def _changed_fields(part: BaseModel, prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys whose values differ from the defaults of their fields."""
    for name, info in type(part).model_fields.items():
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            yield from _changed_fields(value, f"{prefix}{name}.")
        elif info.is_required() or value != info.get_default(call_default_factory=True):
            yield from _keys(value, f"{prefix}{name}")


def _keys(value: object, key: str) -> Iterator[str]:
    """Yields the dotted keys of a value; those of a list are one."""
    if isinstance(value, BaseModel):
        yield from (f"{key}.{name}" for name, _ in flat(value.model_dump(mode="json")))
    elif isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _keys(inner, f"{key}.{name}")
    else:
        yield key


def _without(document: dict[str, Any], key: str) -> dict[str, Any]:
    """Returns a copy of a document without one dotted key."""
    name, _, rest = key.partition(".")
    others = {other: value for other, value in document.items() if other != name}
    return {**others, name: _without(document[name], rest)} if rest else others
