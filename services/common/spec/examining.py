"""All that is wrong with a specification, at once.

Wrong keys are told, then stand-ins take their places, so that rules across keys and what the other keys name
can be checked too.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from services.common.spec.data import FORMS
from services.common.spec.keys import did_you_mean_key
from services.common.spec.rules import problems as broken_rules
from services.common.spec.run import RunSpec
from services.common.spec.similar import did_you_mean

# For required keys; others go back to their defaults.
_STAND_INS: Mapping[str, Any] = {
    "name": "run",
    "model": {"path": "tiny:qwen2-0.4m"},
    "model.path": "tiny:qwen2-0.4m",
    "data": {"train": {"source": "jsonl", "path": ""}},
    "data.train": {"source": "jsonl", "path": ""},
    "data.train.source": "jsonl",
    "data.train.path": "",
    "rollout": {"rewards": [{"name": "exact_match"}]},
    "rollout.rewards": [{"name": "exact_match"}],
    "rollout.rewards.N.name": "exact_match",
    "trainer": {"steps": 2**30, "prompts_per_step": 2**20},
    "trainer.steps": 2**30,
    "trainer.prompts_per_step": 2**20,
    "algorithm.rejection.N.level": "token",
    "model.warm_start.examples": "examples.py:examples",
    "trackers.N.kind": "tensorboard",
}
# A key that takes values of several types has an error of each of them, placed below it.
_TYPE = re.compile(r"bool|int|float|str|literal\[.*\]|constrained-\w+")
_OF_TYPES = ("bool", "int", "float", "string", "literal", "greater", "less")
# Each round mends what the one before uncovered.
_MAX_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Examined:
    """A specification and what is wrong with it."""

    spec: RunSpec | None
    """With stand-ins for wrong keys; None if nothing of it can be read."""
    problems: tuple[str, ...]
    """One line each: the key, what was expected, what came."""
    wrong_keys: frozenset[str] = frozenset()
    """Keys that have stand-ins."""

    def is_about_stand_ins(self, problem: str) -> bool:
        """Whether a problem follows from one that was told already."""
        return any(_names(problem, key) for key in self.wrong_keys)


def examine(document: Mapping[str, Any]) -> Examined:
    """Validate a mapping, whose keys have no other names."""
    mended, problems, wrong = deepcopy(dict(document)), list[str](), set[str]()
    for _ in range(_MAX_ROUNDS):
        try:
            spec = RunSpec.model_validate(mended)
        except ValidationError as error:
            new = [item for item in error.errors() if _key(_place(item)) not in wrong]
            by_place: dict[tuple[int | str, ...], list[Any]] = {}
            for item in new:
                by_place.setdefault(_place(item), []).append(item)
            problems += map(_problem, by_place.values())
            wrong |= {*map(_key, by_place)}
            num_mended = sum(_mend(mended, place) for place in by_place)
            if num_mended < max(len(by_place), 1):
                break
        else:
            found = Examined(spec, (), frozenset(wrong))
            across = [*_too_large(spec.model_dump(mode="json")), *broken_rules(spec)]
            problems += [each for each in across if not found.is_about_stand_ins(each)]
            return Examined(spec, tuple(problems), frozenset(wrong))
    return Examined(None, tuple(problems), frozenset(wrong))


def _place(error: Any) -> tuple[int | str, ...]:
    """Where an error is, without the names of forms."""
    place = tuple(step for step in error["loc"] if step not in FORMS and step != "[key]")
    is_of_type = error["type"].startswith(_OF_TYPES) and _TYPE.fullmatch(str(place[-1])) is not None
    return place[:-1] if is_of_type else place


def _key(place: tuple[int | str, ...]) -> str:
    return ".".join(map(str, place))


def _names(problem: str, key: str) -> bool:
    """Whether a message is about a key or one below it; single words are also words of English."""
    ending = r"(?=\.\w|: )" if "." not in key else r"\b"
    return re.search(rf"(?<![\w.]){re.escape(key)}{ending}", problem) is not None


def _mend(document: dict[str, Any], place: tuple[int | str, ...]) -> bool:
    """Take a wrong key out, or put a stand-in in; returns whether that was possible."""
    while place and isinstance(place[-1], int):
        place = place[:-1]  # all of a list, if one of its items is wrong
    if not place:
        return False
    target: Any = document
    for step in place[:-1]:
        try:
            target = target[step]
        except (KeyError, IndexError, TypeError):
            return False
    if not isinstance(target, dict):
        return False
    name = ".".join("N" if isinstance(step, int) else step for step in place)
    if place[0] == "data" and place[-1] in ("source", "path"):
        name = f"data.train.{place[-1]}"  # of whichever set
    if name in _STAND_INS:
        target[place[-1]] = deepcopy(_STAND_INS[name])
    else:
        target.pop(place[-1], None)
    return True


def _too_large(value: Any, key: str = "") -> Iterator[str]:
    """Keys of whole numbers that neither a database nor another language holds."""
    if isinstance(value, int) and abs(value) >= 1 << 63:
        yield f"{key}: must be a number below 2**63, but is larger"
    if isinstance(value, list):
        value = dict(enumerate(value))
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield from _too_large(inner, f"{key}.{name}" if key else str(name))


def _problem(errors: Sequence[Any]) -> str:
    """A line about the errors of one place."""
    error, key = errors[0], _key(_place(errors[0]))
    if error["type"] == "missing":
        return f"{key}: is required, but missing; see docs/runspec.md for what it means"
    if error["type"] == "extra_forbidden":
        meant = did_you_mean_key(key) or " docs/runspec.md has those there are"
        return f"{key}: is not a known key.{meant}"
    if error["type"] == "value_error":
        text = str(error["ctx"]["error"])
        return text if key in text else f"{key}: {text}"
    shown = repr(error["input"])
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    expected = [f"{each['msg'][0].lower()}{each['msg'][1:]}" for each in errors]
    if len(errors) > 1:
        others = [each.partition(",")[0].removeprefix("input should be ") for each in expected]
        expected = [f"input should be {' or '.join(others)}"]
    text = f"{key}: {expected[0]}, got {shown}"
    literals = [each for each in errors if each["type"] == "literal_error"]
    if literals and isinstance(error["input"], str):
        known = re.findall(r"'([^']+)'", literals[0]["ctx"]["expected"])
        text += (did_you_mean(error["input"], known)).replace(" Did", "; did")
    return text
