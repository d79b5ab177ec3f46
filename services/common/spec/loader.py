"""From YAML or JSON to a RunSpec: overrides, canonical JSON, digest, readable errors."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from services.common.spec.run import RunSpec
from services.common.spec.topology import SPELLINGS

_SCALARS = (str, int, float, bool, type(None))


class SpecError(ValueError):
    """A run specification that cannot be used; the message names every key and its fix."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


def load_spec(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Read a specification file.

    Paths inside it (model, data, Python files) are relative to the file, and absolute in the result.

    Args:
        path: A YAML or JSON file.
        overrides: Assignments such as ``algorithm.max_staleness=2``, applied in order.

    Raises:
        SpecError: If the file is missing, is not a mapping, or breaks a rule.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(
            [f"{path}: cannot be read ({error.strerror}); name a file such as examples/sort4.yaml"]
        ) from error
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SpecError([f"{path}: is not valid YAML: {error}"]) from error
    if not isinstance(document, dict):
        raise SpecError([f"{path}: expected a mapping of keys, got {type(document).__name__}"])
    for assignment in overrides:
        _apply_override(document, assignment)
    return resolve_paths(parse_spec(document), path.resolve().parent)


def parse_spec(document: Mapping[str, Any] | str) -> RunSpec:
    """Validate a mapping or its JSON.

    Raises:
        SpecError: With one line per problem: the key, what was expected, what came.
    """
    try:
        if isinstance(document, str):
            spec = RunSpec.model_validate_json(document)
        else:
            spec = RunSpec.model_validate(_with_aliases(document))
    except ValidationError as error:
        raise SpecError([_problem(item) for item in error.errors()]) from error
    if too_large := list(_too_large(spec.model_dump(mode="json"))):
        raise SpecError(
            [f"{key}: must be a number below 2**63, but is larger" for key in too_large]
        )
    return spec


def canonical_json(spec: RunSpec) -> str:
    """The specification with every default written out; equal specifications give equal text."""
    return json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def spec_digest(spec: RunSpec) -> str:
    """SHA-256 of :func:`canonical_json`, in hex."""
    return hashlib.sha256(canonical_json(spec).encode()).hexdigest()


def resolve_paths(spec: RunSpec, folder: Path) -> RunSpec:
    """Make the file paths of a specification absolute, taking them as relative to ``folder``.

    Hugging Face ids, presets and import paths are left as they are.
    """
    document = spec.model_dump(mode="json")
    model = document["model"]
    if not spec.model.is_tiny and (folder / spec.model.path).is_dir():
        model["path"] = str((folder / spec.model.path).resolve())
    if spec.model.warm_start is not None:
        model["warm_start"]["examples"] = _absolute_callable(
            model["warm_start"]["examples"], folder
        )
    for key in ("train", "heldout"):
        source = document["data"][key]
        if source is None:
            continue
        if source["source"] in ("jsonl", "parquet"):
            source["path"] = str((folder / source["path"]).resolve())
        elif source["source"] == "python":
            source["path"] = _absolute_callable(source["path"], folder)
    for reward in document["rollout"]["rewards"]:
        reward["name"] = _absolute_callable(reward["name"], folder)
    rollout = document["rollout"]
    rollout["workflow"] = _absolute_callable(rollout["workflow"], folder)
    arguments = rollout["workflow_arguments"]
    if isinstance(agent := arguments.get("agent"), str):
        arguments["agent"] = _absolute_callable(agent, folder)
    if isinstance(tools := arguments.get("tools"), list):
        arguments["tools"] = [_absolute_callable(str(tool), folder) for tool in tools]
    return RunSpec.model_validate(document)


def _absolute_callable(reference: str, folder: Path) -> str:
    file, separator, name = reference.rpartition(":")
    if separator and file.endswith(".py"):
        return f"{(folder / file).resolve()}:{name}"
    return reference


def _apply_override(document: dict[str, Any], assignment: str) -> None:
    key, separator, text = assignment.partition("=")
    if not separator or not key:
        raise SpecError(
            [f"--set {assignment}: expected KEY=VALUE, for example algorithm.max_staleness=2"]
        )
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SpecError([f"--set {assignment}: the value is not valid YAML: {error}"]) from error
    *parents, leaf = key.split(".")
    target: Any = document
    for depth, part in enumerate([*parents, leaf]):
        is_leaf = depth == len(parents)
        if isinstance(target, list):
            if not part.isdigit() or int(part) >= len(target):
                raise SpecError(
                    [f"--set {key}: {part!r} is no index of a list of {len(target)} items"]
                )
            if is_leaf:
                target[int(part)] = value
            else:
                target = target[int(part)]
        elif isinstance(target, dict):
            if is_leaf:
                target[part] = value
            else:
                target = target.setdefault(part, {})
                if target is None or isinstance(target, _SCALARS):
                    raise SpecError([f"--set {key}: {part!r} holds a value, not a group of keys"])


def _with_aliases(document: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(document)
    algorithm = result.get("algorithm")
    if isinstance(algorithm, dict) and "generate_ahead_steps" in algorithm:
        algorithm = dict(algorithm)
        ahead = algorithm.pop("generate_ahead_steps")
        if algorithm.setdefault("max_staleness", ahead) != ahead:
            raise SpecError(
                [
                    "algorithm.generate_ahead_steps is another name of algorithm.max_staleness, but they "
                    f"differ ({ahead} and {algorithm['max_staleness']}); keep one"
                ]
            )
        result["algorithm"] = algorithm
    trainer = result.get("trainer")
    topology = result.get("topology", {})
    if (
        isinstance(trainer, dict)
        and isinstance(topology, dict)
        and SPELLINGS.keys() & trainer.keys()
    ):
        result["trainer"], result["topology"] = _moved(trainer, topology)
    return result


def _too_large(value: Any, key: str = "") -> Iterator[str]:
    """Keys of whole numbers that neither a database nor another language holds."""
    if isinstance(value, int) and abs(value) >= 1 << 63:
        yield key
    if isinstance(value, list):
        value = dict(enumerate(value))
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield from _too_large(inner, f"{key}.{name}" if key else str(name))


def _moved(
    trainer: dict[str, Any], topology: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Task groups as dots.rl has them, among the options of the trainer."""
    trainer, moved = dict(trainer), dict(topology)
    for name in SPELLINGS.keys() & trainer.keys():
        moved[name] = trainer.pop(name)
    nodes, per_node = trainer.pop("nnodes", 1), trainer.pop("n_gpus_per_node", None)
    if per_node is not None:
        if not (isinstance(nodes, int) and isinstance(per_node, int)):
            raise SpecError(
                [
                    "trainer.nnodes and trainer.n_gpus_per_node must be whole numbers, but are "
                    f"{nodes!r} and {per_node!r}"
                ]
            )
        moved = {"gpus": nodes * per_node, "gpus_per_node": per_node, **moved}
    return trainer, moved


def _problem(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"{key}: is required, but missing"
    if error["type"] == "extra_forbidden":
        return f"{key}: is not a known key; see docs/runspec.md for the keys there are"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    shown = repr(error["input"])
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return f"{key}: {error['msg'][0].lower()}{error['msg'][1:]}, got {shown}"
