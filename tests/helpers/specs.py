"""Smallest valid specification, and variants of it."""

from collections.abc import Mapping
from typing import Any

from services.common.runspec.loader import parse_spec
from services.common.runspec.run import RunSpec

SMALLEST: Mapping[str, Any] = {
    "name": "smallest",
    "model": {"path": "tiny:qwen2-0.4m"},
    "data": {"train": {"source": "jsonl", "path": "prompts.jsonl"}},
    "rollout": {"rewards": [{"name": "exact_match"}]},
    "trainer": {"steps": 1, "prompts_per_step": 4},
}


def changed(**parts: Any) -> dict[str, Any]:
    """Returns the smallest document with some keys changed: ``changed(trainer={"steps": 3})``."""
    document = {**SMALLEST}
    for name, keys in parts.items():
        is_part = isinstance(keys, Mapping)
        document[name] = {**document.get(name, {}), **keys} if is_part else keys
    return document


def spec_with(**parts: Any) -> RunSpec:
    """Returns the smallest specification with some keys changed."""
    return parse_spec(changed(**parts))
