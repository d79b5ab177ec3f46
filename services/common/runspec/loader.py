"""Loads a RunSpec from YAML or JSON: overrides, canonical JSON, digest, readable errors."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from services.common.callables import is_reference, parse_reference, real_path
from services.common.runspec.aliases import (
    canonical_key,
    prepare_override,
    remove_contradictions,
    without_aliases,
)
from services.common.runspec.data import set_documents
from services.common.runspec.examining import ValidationResult, validate_spec
from services.common.runspec.run import TINY_PREFIX, RunSpec
from services.common.stores import is_url, plain_path

MAX_DOCUMENT_BYTES = 256 << 10
"""Max bytes of a request to the run API, over REST and over gRPC."""
MAX_DEPTH = 20
MAX_ITEMS = 10_000
"""Max items of one list or mapping; of all of a document, :data:`_MAX_NODES`."""
_MAX_NODES = 100_000


def shape_problem(document: Any) -> str:
    """Returns why a document cannot be examined: another format, too deep or too long; empty if it can.

    Works level by level, so that depth cannot exhaust the stack.
    """
    if isinstance(document, dict) and {"apiVersion", "kind"} <= document.keys():
        return "is an object of Kubernetes: use kubectl, or the keys of its spec (docs/rlrun.md)"
    level, depth, count = [document], 0, 0
    while level:
        count += len(level)
        if depth > MAX_DEPTH:
            return f"is nested more than {MAX_DEPTH} levels deep"
        if count > _MAX_NODES:
            return f"has more than {_MAX_NODES} values"
        below: list[Any] = []
        for value in level:
            if isinstance(value, (dict, list)):
                if len(value) > MAX_ITEMS:
                    return f"has a list or an object of more than {MAX_ITEMS} items"
                below += value.values() if isinstance(value, dict) else value
        level, depth = below, depth + 1
    return ""


_MERGE = "tag:yaml.org,2002:merge"
_BOOLEAN_TAG, _FLOAT_TAG = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"
_BOOLEAN = re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")
_EXPONENT = re.compile(r"(?:[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+|[-+]?\.[0-9]+[eE][-+]?[0-9]+)$")
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
MACHINE_KEYS = ("rollout.replicas", "trainer.dtype")
"""Keys whose defaults depend on the machine that runs the specification."""
_SCALARS = (str, int, float, bool, type(None))


class SpecError(ValueError):
    """Reports a run specification that cannot be used; the message names every key and its fix."""

    def __init__(self, problems: Sequence[str]) -> None:
        # A message may show a lone surrogate, which UTF-8 does not encode.
        self.problems = tuple(line.encode(errors="backslashreplace").decode() for line in problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, slots=True)
class Draft:
    """A specification file that was read, valid or not."""

    examined: ValidationResult
    notes: tuple[str, ...] = ()
    """Notes on the aliases that the file uses."""
    left_out: frozenset[str] = frozenset()
    """Keys of :data:`MACHINE_KEYS` that neither the file nor the topology sets."""


def read_draft(path: Path, overrides: Sequence[str] = ()) -> Draft:
    """Reads a specification file and collects all problems with its keys.

    Paths in the file (model, data, Python files) are relative to the file, and absolute in the
    result.

    Args:
        overrides: Assignments such as ``algorithm.max_staleness=2``, applied in order. They win
            over the file, even if the file uses an alias of the key.

    Raises:
        SpecError: If the file is missing or is not a mapping, or an assignment is malformed.
    """
    return draft_of(_read(path), overrides, folder=path.resolve().parent)


def draft_of(document: dict[str, Any], overrides: Sequence[str], *, folder: Path) -> Draft:
    """Changes a specification like :func:`read_draft`; relative paths are relative to ``folder``.

    Raises:
        SpecError: If an assignment is malformed.
    """
    refused: list[str] = []
    override_keys: list[str] = []
    for assignment in overrides:
        try:
            override_keys.append(apply_override(document, assignment))
        except SpecError as error:
            refused += [f"--set {problem}" for problem in error.problems]
    if refused:
        raise SpecError(refused)
    renamed = without_aliases(document)
    remove_contradictions(renamed.document, override_keys)
    result = validate_spec(renamed.document)
    spec = None if result.spec is None else resolve_paths(result.spec, folder)
    problems = (*renamed.problems, *result.problems)
    return Draft(
        replace(result, spec=spec, problems=problems),
        tuple(renamed.notes),
        left_out=frozenset() if result.spec is None else _left_out(result.spec),
    )


def _left_out(spec: RunSpec) -> frozenset[str]:
    keys = (key.split(".") for key in MACHINE_KEYS)
    return frozenset(
        f"{section}.{name}"
        for section, name in keys
        if name not in getattr(spec, section).model_fields_set
    )


def load_spec(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Reads a specification file like :func:`read_draft`, but accepts only a valid one.

    Raises:
        SpecError: If the file is missing, is not a mapping, or breaks a rule.
    """
    return _right(read_draft(path, overrides).examined)


def parse_spec(document: Mapping[str, Any] | str) -> RunSpec:
    """Validates a mapping or its JSON text.

    Raises:
        SpecError: With one line per problem: the key, the expected value, the actual value.
    """
    if isinstance(document, str):
        document = _parse_json(document)
    if problem := shape_problem(document):
        raise SpecError([f"the specification {problem}"])
    renamed = without_aliases(document)
    result = validate_spec(renamed.document)
    return _right(replace(result, problems=(*renamed.problems, *result.problems)))


def _right(result: ValidationResult) -> RunSpec:
    if result.problems:
        raise SpecError(result.problems)
    assert result.spec is not None
    return result.spec


def _parse_json(text: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise SpecError([f"the specification is not valid JSON: {error}"]) from error
    if not isinstance(document, dict):
        raise SpecError([f"the specification must be an object, got {type(document).__name__}"])
    return document


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_DOCUMENT_BYTES + 1)
        text = content.decode() if len(content) <= MAX_DOCUMENT_BYTES else None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SpecError(
            [f"{path}: cannot be read ({reason}); expected a file such as examples/sort4.yaml"]
        ) from error
    if text is None:
        raise SpecError(
            [
                f"{path}: is larger than the limit of {MAX_DOCUMENT_BYTES} bytes; expected a specification, "
                "which names data by its path"
            ]
        )
    try:
        document = load_yaml(text)
    except yaml.YAMLError as error:
        raise SpecError([f"{path}: is not valid YAML: {error}"]) from error
    if document is None:
        raise SpecError(
            [f"{path}: is empty; 'slipstream init' writes a specification to start from"]
        )
    if not isinstance(document, dict):
        raise SpecError([f"{path}: expected a mapping of keys, got {type(document).__name__}"])
    if problem := shape_problem(document):
        raise SpecError([f"{path}: {problem}"])
    return document


def load_yaml(text: str) -> Any:
    """Parses one YAML document.

    Raises:
        yaml.YAMLError: If it is not valid, too deep, or too large with all aliases expanded.
    """
    _check_nodes(text)
    return yaml.load(text, Loader=_Loader)  # noqa: S506 -- it is a SafeLoader


def _check_nodes(text: str) -> None:
    """Checks the depth and size of a YAML document before its nodes are built.

    A few lines of aliases or merge keys (``<<``) can expand to any number of values.

    Raises:
        yaml.YAMLError: If a limit is exceeded, or a node contains itself.
    """
    sizes = dict[str | None, int]()  # nodes below each anchor, aliases expanded
    opened = list[tuple[str | None, int]]()  # anchor of a node, and nodes before it
    count = 0
    for event in yaml.parse(text, Loader=_Loader):
        problem = ""
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in opened):
                problem = f"{event.anchor!r} contains itself"
            count += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.NodeEvent):
            opened.append((event.anchor, count))
            count += 1
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = count - before
        if len(opened) > MAX_DEPTH:
            problem = f"is nested more than {MAX_DEPTH} levels deep"
        elif count > _MAX_NODES:
            problem = f"has more than {_MAX_NODES} values"
        if problem:
            mark: Any = event.start_mark
            raise yaml.constructor.ConstructorError(None, None, problem, mark)


class _Loader(yaml.SafeLoader):
    """Reads YAML without the surprises of YAML 1.1.

    Duplicate keys are rejected; YAML would silently keep the last one. Dates and ``1:30`` (which
    would be 90) are texts, and integers that begin with 0 are rejected, because they would be octal.
    As in YAML 1.2, ``yes``, ``no``, ``on`` and ``off`` are texts, which keys for booleans accept, and
    ``1e-3`` is a number.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 -- the library's class variable
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOLEAN_TAG]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        earlier_keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE and key.value in earlier_keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key.value!r}; keep one", key.start_mark
                )
            earlier_keys.add(str(key.value))
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> Any:
        if ":" in node.value:
            return node.value
        if _OCTAL.fullmatch(node.value):
            problem = f"{node.value!r} would be octal; remove the leading 0, or quote it as text"
        else:
            try:
                return super().construct_yaml_int(node)
            except ValueError:  # more digits than Python converts
                problem = f"the number has {len(node.value)} digits"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    def construct_yaml_float(self, node: Any) -> Any:
        return node.value if ":" in node.value else super().construct_yaml_float(node)


_Loader.add_implicit_resolver(_BOOLEAN_TAG, _BOOLEAN, list("tTfF"))
_Loader.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, list("-+.0123456789"))
for _tag, _construct in {
    "int": _Loader.construct_yaml_int,
    "float": _Loader.construct_yaml_float,
    **dict.fromkeys(("timestamp", "value"), _Loader.construct_yaml_str),
    # No key takes the values of these.
    **dict.fromkeys(("binary", "set", "omap", "pairs"), _Loader.construct_undefined),
}.items():
    yaml.add_constructor(f"tag:yaml.org,2002:{_tag}", _construct, Loader=_Loader)


def canonical_json(spec: RunSpec) -> str:
    """Returns the JSON of a specification with all defaults; equal specifications have equal text."""
    return json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def spec_digest(spec: RunSpec) -> str:
    """Returns the SHA-256 of :func:`canonical_json` in hex."""
    return hashlib.sha256(canonical_json(spec).encode()).hexdigest()


def resolve_paths(spec: RunSpec, folder: Path) -> RunSpec:
    """Returns the specification with absolute file paths.

    Relative paths are relative to ``folder``, and ``~`` is the user's home. Hugging Face ids, presets and
    import paths are not changed.
    """
    document = spec.model_dump(mode="json")
    _resolve_model(document["model"], folder)
    if spec.teacher is not None and not spec.teacher.is_policy:
        _resolve_model(document["teacher"], folder)
    checkpoint = document["trainer"]["checkpoint"]
    for key in {"directory", "start_from"} & {key for key, value in checkpoint.items() if value}:
        checkpoint[key] = _absolute(checkpoint[key], folder)
    if storage := document["weight_sync"]["storage"]:
        storage["directory"] = _absolute(storage["directory"], folder)
    _resolve_sources(document["data"], folder)
    if curriculum := document["data"]["curriculum"]:
        _resolve_functions(curriculum, ("function",), folder)
    _resolve_functions(document["algorithm"], ("advantage", "loss"), folder)
    _resolve_rewards(document["rollout"]["rewards"], folder)
    rollout = document["rollout"]
    rollout["workflow"] = _absolute_callable(rollout["workflow"], folder)
    _resolve_arguments(rollout["workflow_arguments"], folder)
    sandbox = rollout["sandbox"]
    if sandbox is not None and sandbox["kind"] == "bubblewrap" and sandbox["image"]:
        sandbox["image"] = _absolute(sandbox["image"], folder)
    return RunSpec.model_validate(document)


def _absolute(path: str, folder: Path) -> str:
    if is_url(path):
        return path
    path = plain_path(path)
    # Path.expanduser raises for an unknown user. A path that does not exist is reported where it is opened.
    return real_path(folder / os.path.expanduser(path))  # noqa: PTH111


def _absolute_folder(path: str, folder: Path) -> str:
    """Returns the absolute path of a folder; an id of Hugging Face is not changed."""
    resolved = _absolute(path, folder)
    return resolved if os.path.isdir(resolved) else path  # noqa: PTH112 -- Path's raises


def _resolve_model(model: dict[str, Any], folder: Path) -> None:
    for key in ("path", "tokenizer"):
        path = model[key]
        if path not in (None, "bytes") and not path.startswith((TINY_PREFIX, "chars:")):
            model[key] = _absolute_folder(path, folder)
    if (warm_start := model["warm_start"]) is not None:
        warm_start["examples"] = _absolute_callable(warm_start["examples"], folder)


def _resolve_arguments(arguments: dict[str, Any], folder: Path) -> None:
    """Makes the paths of functions in a workflow's arguments absolute."""
    for key in ("agent", "environment", "train"):
        if isinstance(arguments.get(key), str):
            arguments[key] = _absolute_callable(arguments[key], folder)
    if isinstance(tools := arguments.get("tools"), list):
        arguments["tools"] = [_absolute_callable(str(tool), folder) for tool in tools]


def _resolve_rewards(rewards: Sequence[dict[str, Any]], folder: Path) -> None:
    for reward in rewards:
        reward["name"] = _absolute_callable(reward["name"], folder)


def _resolve_sources(data: dict[str, Any], folder: Path) -> None:
    for _, source in set_documents(data):
        _resolve_rewards(source["rewards"] or (), folder)
        for filter_spec in source["filters"]:
            _resolve_functions(filter_spec, ("function",), folder)
        if source["source"] in ("jsonl", "csv", "parquet"):
            source["path"] = _absolute(source["path"], folder)
        elif source["source"] == "huggingface":
            source["path"] = _absolute_folder(source["path"], folder)
        elif source["source"] == "python":
            source["path"] = _absolute_callable(source["path"], folder)


def _resolve_functions(section: dict[str, Any], keys: Sequence[str], folder: Path) -> None:
    for key in keys:
        section[key] = section[key] and _absolute_callable(section[key], folder)


def _absolute_callable(reference: str, folder: Path) -> str:
    if is_reference(reference) and (parsed := parse_reference(reference)).is_file:
        return f"{_absolute(parsed.location, folder)}:{parsed.name}"
    return reference


def apply_override(document: dict[str, Any], assignment: str) -> str:
    """Sets the key of ``KEY=VALUE`` and removes its aliases from a document, which may lack other keys.

    Returns:
        The canonical name of the key.

    Raises:
        SpecError: If the assignment is malformed or does not fit the document.
    """
    key, separator, text = assignment.partition("=")
    *parents, leaf = key.split(".")
    if not separator or not all((*parents, leaf)):
        raise SpecError([f"{assignment}: expected KEY=VALUE, such as algorithm.max_staleness=2"])
    if len(parents) > MAX_DEPTH:
        raise SpecError([f"{assignment}: the key is nested more than {MAX_DEPTH} levels deep"])
    try:
        value = load_yaml(text)
    except yaml.YAMLError as error:
        raise SpecError([f"{assignment}: the value is not valid YAML: {error}"]) from error
    prepare_override(document, key)
    target: Any = document
    for parent in parents:
        if isinstance(target, list):
            target = target[_index(key, parent, target)]
        elif isinstance(target, dict):
            target = target.setdefault(parent, {})
            if target is None or isinstance(target, _SCALARS):
                raise SpecError(
                    [f"{key}: expected {parent!r} to be a mapping of keys, got a value"]
                )
    if isinstance(target, list):
        target[_index(key, leaf, target)] = value
    elif isinstance(target, dict):
        target[leaf] = value
    return canonical_key(key)


def _index(key: str, step: str, items: list[Any]) -> int:
    is_index = step.isdecimal() and len(step) <= len(str(MAX_ITEMS))
    if not is_index or int(step) >= len(items):
        raise SpecError([f"{key}: {step!r} is not an index of a list of {len(items)} items"])
    return int(step)
