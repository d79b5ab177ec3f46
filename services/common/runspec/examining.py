"""Validates a specification and reports all problems at once.

Wrong keys are reported and then replaced by stand-ins, so that rules across keys, and the resources
that other keys name, can be checked too.
"""

import inspect
import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

from services.common.runspec.base import did_you_mean, in_yaml
from services.common.runspec.data import FORMS
from services.common.runspec.keys import did_you_mean_key, is_required
from services.common.runspec.rules import problems as broken_rules
from services.common.runspec.run import RunSpec

# Values for required keys; other keys are reset to their defaults.
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
# pydantic reports one error per type for a key that accepts several types, with the type appended
# to the location.
_TYPE = re.compile(r"bool|int|float|str|literal\[.*\]|constrained-\w+")
_OF_TYPES = ("bool", "int", "float", "string", "literal", "greater", "less")
_TYPES = {
    "tuple_type": "a list",
    "list_type": "a list",
    "is_instance_of": "a list",
    "sequence_str": "a list",
    "dict_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "string_type": "text",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
}
"""Readable names of the types that pydantic's errors expect."""
_SPELLINGS = {
    "name": "1 to 63 lower-case letters, digits and hyphens, with no hyphen at an end",
    "project": "letters, digits, '.', '_' and '-', with at most one '/'",
    "metric": "greedy, sampled, best, maj, pass@K or reward/TERM",
    "url": "an address that begins with http:// or https://",
    "teacher_url": "an address that begins with http:// or https://",
}
_SET_NAME = (
    "a name of 1 to 40 lower-case letters, digits, '-' and '_' that starts with a letter or digit"
)
"""Readable forms of the keys' patterns; a key that is not listed is the name of a set."""
_SHORT_FORMS = {
    "model": "path",
    "teacher": "path",
    "rollout.rewards.N": "name",
    "trackers.N": "kind",
}
"""Key of a group that a text in place of the group most likely means."""
# Each round replaces keys whose errors the previous round uncovered.
_MAX_ROUNDS = 8
# No person reads more, and the time to explain them grows with their square.
_MAX_PROBLEMS = 100


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """A validated specification and its problems."""

    spec: RunSpec | None
    """The specification with stand-ins for wrong keys; None if it cannot be read at all."""
    problems: tuple[str, ...]
    """One line per problem: the key, the expected value, the actual value; of very many, the first ones."""
    wrong_keys: frozenset[str] = frozenset()
    """Keys that have stand-ins."""

    def is_about_stand_ins(self, problem: str) -> bool:
        """Returns True if a problem results from a wrong key that is already reported."""
        return any(_names(problem, key) for key in self.wrong_keys)


def validate_spec(document: Mapping[str, Any]) -> ValidationResult:
    """Validates a mapping without aliases."""
    repaired, problems, wrong = deepcopy(dict(document)), list[str](), set[str]()
    # Problem of each key that is null although it may be left out.
    null_problems = dict[str, str]()
    for _ in range(_MAX_ROUNDS):
        try:
            spec = RunSpec.model_validate(repaired)
        except ValidationError as error:
            new = [item for item in error.errors() if _key(_place(item)) not in wrong]
            by_place: dict[tuple[int | str, ...], list[Any]] = {}
            for item in new:
                by_place.setdefault(_place(item), []).append(item)
            if len(by_place) > _MAX_PROBLEMS:
                problems += [_problem(items) for items in [*by_place.values()][:_MAX_PROBLEMS]]
                problems.append(f"{len(by_place) - _MAX_PROBLEMS} more keys are wrong")
                return ValidationResult(None, tuple(problems))
            for loc, items in by_place.items():
                problems.append(_problem(items))
                is_null_key = items[0]["input"] is None and not isinstance(loc[-1], int)
                if is_null_key and not is_required(_name_of(loc)):
                    null_problems[_key(loc)] = problems[-1]
            wrong |= {*map(_key, by_place)}
            num_repaired = sum(
                _repair(repaired, loc, has_stand_in=_key(loc) not in null_problems)
                for loc in by_place
            )
            if num_repaired < max(len(by_place), 1):
                break
        else:
            result = ValidationResult(spec, (), frozenset(wrong - null_problems.keys()))
            all_across = chain(_too_large(spec.model_dump(mode="json")), broken_rules(spec))
            across = [*islice(all_across, _MAX_PROBLEMS)]
            across = [line for line in across if not result.is_about_stand_ins(line)]
            # If a rule reports that a removed key is missing, its message replaces the one about null.
            required_keys = [
                key for key in null_problems if any(_begins_with(line, key) for line in across)
            ]
            problems = [
                line for line in problems if line not in map(null_problems.get, required_keys)
            ]
            problems += across
            return ValidationResult(spec, tuple(problems), frozenset(wrong))
    return ValidationResult(None, tuple(problems), frozenset(wrong))


def argument_problems(
    function: Callable[..., Any], arguments: Mapping[str, Any], *, key: str
) -> Iterator[str]:
    """Yields problems of the keyword arguments of a built-in function or class, by its annotations.

    A value that names a secret is not known here, and passes.

    Args:
        function: All its keyword-only parameters have annotations.
        key: Key of the specification that holds the arguments.
    """
    signature_owner: Any = function.__init__ if inspect.isclass(function) else function
    hints = get_type_hints(signature_owner, include_extras=True)
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    fields: dict[str, Any] = {
        name: (
            hints[name],
            ... if parameter.default is inspect.Parameter.empty else parameter.default,
        )
        for name, parameter in parameters.items()
    }
    model = create_model(
        "Arguments",
        __config__=ConfigDict(
            extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
        ),
        **fields,
    )
    plain_arguments = {
        name: value
        for name, value in arguments.items()
        if not (isinstance(value, Mapping) and set(value) == {"secret"})
    }
    try:
        model.model_validate(plain_arguments)
    except ValidationError as error:
        by_place: dict[tuple[int | str, ...], list[Any]] = {}
        for item in error.errors():
            by_place.setdefault(_place(item), []).append(item)
        for loc, items in by_place.items():
            name = f"{key}.{_key(loc)}"
            if items[0]["type"] == "extra_forbidden":
                meant = did_you_mean(str(loc[0]), tuple(parameters))
                remedy = f"use one of {', '.join(parameters)}" if parameters else "remove it"
                yield f"{name}: is not a known key; {remedy}.{meant}"
            elif items[0]["type"] == "missing":
                yield f"{name}: is required, but missing; see docs/rollouts.md for its meaning"
            else:
                yield f"{name}: must be {_expected(items, name)}, got {_shown(items[0]['input'])}"


def _place(error: Any) -> tuple[int | str, ...]:
    """Returns the location of an error without the names of forms and types."""
    loc = tuple(step for step in error["loc"] if step not in FORMS and step != "[key]")
    is_of_type = error["type"].startswith(_OF_TYPES) and loc != ()
    return loc[:-1] if is_of_type and _TYPE.fullmatch(str(loc[-1])) else loc


def _key(loc: tuple[int | str, ...]) -> str:
    return ".".join(map(str, loc))


def _names(problem: str, key: str) -> bool:
    """Returns True if a message names a key or one below it; single words are also English words."""
    ending = r"(?=\.\w|: )" if "." not in key else r"\b"
    return re.search(rf"(?<![\w.]){re.escape(key)}{ending}", problem) is not None


def _begins_with(problem: str, key: str) -> bool:
    return re.match(rf"{re.escape(key)}(?!\w)", problem) is not None


def _name_of(loc: tuple[int | str, ...]) -> str:
    """Returns the name of a key, with ``N`` for an index, and without the name of a set of prompts."""
    if loc[:1] == ("data",) and loc[-1] in ("source", "path"):
        return f"data.train.{loc[-1]}"
    return ".".join("N" if isinstance(step, int) else step for step in loc)


def _repair(document: dict[str, Any], loc: tuple[int | str, ...], *, has_stand_in: bool) -> bool:
    """Removes a wrong key or replaces it by a stand-in; returns True on success."""
    while loc and isinstance(loc[-1], int):
        loc = loc[:-1]  # all of a list, if one of its items is wrong
    if not loc:
        return False
    target: Any = document
    for step in loc[:-1]:
        try:
            target = target[step]
        except (KeyError, IndexError, TypeError):
            return False
    if not isinstance(target, dict):
        return False
    name = _name_of(loc)
    if name in _STAND_INS and has_stand_in:
        target[loc[-1]] = deepcopy(_STAND_INS[name])
    else:
        target.pop(loc[-1], None)
    return True


def _too_large(value: Any, key: str = "") -> Iterator[str]:
    """Yields a problem for integers beyond 64 bits, the limit of databases and other languages."""
    if isinstance(value, int) and abs(value) >= 1 << 63:
        yield f"{key}: must be an integer below 2**63 in magnitude, got a larger one"
    if isinstance(value, list):
        value = dict(enumerate(value))
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield from _too_large(inner, f"{key}.{name}" if key else str(name))


def _problem(errors: Sequence[Any]) -> str:
    """Returns one line about the errors at one location."""
    error, key = errors[0], _key(_place(errors[0])) or "the specification"
    if error["type"] == "missing":
        return f"{key}: is required, but missing; see docs/runspec.md for its meaning"
    if error["type"] == "extra_forbidden":
        meant = did_you_mean_key(key) or " docs/runspec.md lists all keys"
        return f"{key}: is not a known key{_foreign(key)}.{meant}"
    if error["type"] == "invalid_key":
        return f"{key}: is not a known key; a key is text, got {_shown(error['input'])}"
    if error["type"] == "value_error":
        text = str(error["ctx"]["error"])
        return text if key in text else f"{key}: {text}"
    return (
        f"{key}: must be {_expected(errors, key)}, got {_shown(error['input'])}{_hint(errors, key)}"
    )


def _foreign(key: str) -> str:
    """Returns the names of characters that look like others or are invisible; empty if there are none."""
    descriptions = {
        f"U+{ord(character):04X} {unicodedata.name(character, '')}".strip()
        for character in key
        if not character.isascii()
    }
    return f", and contains {', '.join(sorted(descriptions)[:3])}" if descriptions else ""


def _expected(errors: Sequence[Any], key: str) -> str:
    """Returns the expected value in words; alternatives are joined by "or"."""
    ways = []
    for error in errors:
        phrase = _TYPES.get(error["type"])
        if error["type"] == "string_pattern_mismatch":
            phrase = _SPELLINGS.get(key.rpartition(".")[2], _SET_NAME)
        text = re.sub(r"^String should have ", "text with ", error["msg"])
        text = re.sub(r"^(Input|Value) should be ", "", text)
        # Each of several alternatives is shortened.
        ways.append(phrase or (text.partition(",")[0] if len(errors) > 1 else text))
    return " or ".join(dict.fromkeys(ways))


def _shown(value: Any) -> str:
    """Returns a value in YAML syntax, shortened to 80 characters."""
    text = in_yaml(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _hint(errors: Sequence[Any], key: str) -> str:
    """Returns a hint on the value that was most likely meant; empty if there is none."""
    value, types = errors[0]["input"], {error["type"] for error in errors}
    name = re.sub(r"\.\d+", ".N", key)
    hint = ""
    if value is None:
        hint = _hint_on_null(_place(errors[0]), types)
    elif "string_type" in types and isinstance(value, bool):
        hint = "YAML reads yes, no, on and off as true or false: put it in quotes"
    elif "string_type" in types and isinstance(value, Mapping) and None in value.values():
        hint = "YAML reads a colon at the end as a key: put the text in quotes"
    elif "string_type" in types and isinstance(value, int | float):
        hint = f'put it in quotes: "{value}"'
    elif name in _SHORT_FORMS and isinstance(value, str):
        hint = f"did you mean {{{_SHORT_FORMS[name]}: {value}}}?"
    elif types & {"tuple_type", "list_type"} and isinstance(value, str | Mapping):
        hint = "put it in a list: [...]"
    elif "string_pattern_mismatch" in types and key == "name" and (label := _label(value)):
        hint = f"did you mean {label!r}?"
    elif types & {"int_parsing", "int_from_float"} and (integer := _whole(value)):
        hint = f"write {integer}"
    elif isinstance(value, str):
        expected_values = [
            error["ctx"]["expected"] for error in errors if error["type"] == "literal_error"
        ]
        choices = re.findall(r"'([^']+)'", " ".join(expected_values))
        hint = did_you_mean(value, choices).strip().replace("Did", "did")
    return f"; {hint}" if hint else ""


def _hint_on_null(loc: tuple[int | str, ...], types: Collection[str]) -> str:
    if is_required(_name_of(loc)):
        return "the key is required"
    if isinstance(loc[-1], int):
        return "remove the item"
    # ``--set`` can empty a list of the file, but remove no key.
    return "use [] for none, or remove the key" if "tuple_type" in types else "remove the key"


def _whole(value: object) -> str:
    """Returns the integer that a text such as ``1e3`` means; empty if it means none."""
    try:
        number = float(str(value))
    except ValueError:
        return ""
    return f"{number:.0f}" if number.is_integer() and abs(number) < 1e15 else ""


def _label(text: str) -> str:
    """Returns the DNS label that is most similar to a text; empty if no character remains."""
    plain = (
        unicodedata.normalize("NFKD", text.replace("ß", "ss")).encode("ascii", "ignore").decode()
    )
    return re.sub(r"[^a-z0-9]+", "-", plain.lower())[:63].strip("-")
