"""Changes of existing runs: patches (labels, priority, limits, intervals, rollouts) and forks."""

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import PurePath
from typing import Any, Final

import sqlalchemy as sa

from services.common.fields import new_run_id
from services.common.runspec.aliases import remove_contradictions, without_aliases
from services.common.runspec.keys import fixed_key_problems, flat, nested
from services.common.runspec.loader import SpecError, canonical_json, parse_spec, spec_digest
from services.common.runspec.run import RunSpec
from services.controller.manager.archive import check_usable
from services.controller.run.state.requests import resource_needs, spec_columns
from services.controller.run.train.checkpoints import Checkpoint
from services.controller.schemas import ForkRequest, RunPatch
from services.controller.store import ledgers
from services.controller.store.records import NewRun, Run
from services.controller.store.rows import queue_deadline

_MAX_NAME: Final = 63


def merged(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns a document with changes merged in; null removes a key (RFC 7396)."""
    result = dict(document)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            old_value = result.get(key)
            result[key] = merged(old_value if isinstance(old_value, dict) else {}, value)
        else:
            result[key] = value
    return result


_SHORT_NAMES: Final = {
    "limits": "limits",
    "validation_every": "validation.every",
    "checkpoint_every": "trainer.checkpoint.every",
    "rollout_replicas": "rollout.replicas",
}
"""Fields of a patch that stand for keys of the specification."""


def patched_spec(run: Run, patch: RunPatch) -> RunSpec | None:
    """Returns the specification with a patch applied; None if the patch does not change it.

    Raises:
        SpecError: If the changed specification breaks a rule.
    """
    renamed = without_aliases(patch.spec or {})
    if problems := [*renamed.problems, *fixed_key_problems(renamed.document)]:
        raise SpecError(problems)
    changes = renamed.document
    for field, key in _SHORT_NAMES.items():
        if (value := getattr(patch, field)) is not None:
            changes = merged(changes, nested(key, value))
    if not changes:
        return None
    document = json.loads(run.spec_json)
    spec = parse_spec(merged(document, changes))
    is_resized = spec.rollout.replicas != document["rollout"]["replicas"]
    if is_resized and spec.topology.placement == "colocated":
        raise SpecError(
            [
                "rollout.replicas: the number of rollouts cannot change with topology.placement 'colocated', "
                "because they share the trainer's GPUs; submit a new run, or fork this one"
            ]
        )
    return spec


def columns_of(patch: RunPatch, spec: RunSpec | None) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if patch.labels is not None:
        values["labels_json"] = json.dumps(patch.labels)
    if patch.priority is not None:
        values["priority"] = patch.priority
    if spec is not None:
        values |= spec_columns(spec)
        keys = {key for key, _ in (*flat(patch.spec or {}), *flat({"limits": patch.limits or {}}))}
        if "limits.queue_timeout_s" in keys:
            values["queue_deadline"] = queue_deadline(values["spec_json"])
    return values


def new_run(spec: RunSpec, *, after: str, **columns: Any) -> NewRun:
    """Builds a run whose id follows another one; ``columns`` do not follow from the specification."""
    return NewRun(
        run_id=new_run_id(after),
        name=spec.name,
        spec_json=canonical_json(spec),
        spec_digest=spec_digest(spec),
        needs=resource_needs(spec),
        **columns,
    )


def fork_name(parent: str, names_in_use: Collection[str]) -> str:
    """Returns a fork's default name: that of its parent, or a similar one if an active run has it."""
    if parent not in names_in_use:
        return parent
    suffixes = ("-fork", *(f"-fork-{number}" for number in range(2, len(names_in_use) + 2)))
    names = (f"{parent[: _MAX_NAME - len(suffix)]}{suffix}" for suffix in suffixes)
    return next(name for name in names if name not in names_in_use)


def fork_of(
    parent: Run, checkpoint: Checkpoint, fork: ForkRequest, *, actor: str, after: str
) -> tuple[NewRun, Callable[[sa.Connection], None]]:
    """Builds the run that continues from a checkpoint, and the function that copies the parent's ledger.

    The function raises NoCheckpointError if the checkpoint was deleted meanwhile.

    Raises:
        SpecError: If the overrides break a rule, name another model, or leave nothing to train.
    """
    spec = _spec(parent, checkpoint, fork)
    old = parse_spec(parent.spec_json)
    if problems := [*_other_model(old, spec), *_no_steps(spec, checkpoint.step)]:
        raise SpecError(problems)
    rows, old_rows = (side.data.model_copy(update={"epochs": None}) for side in (spec, old))
    has_same_prompts = (rows, spec.seed) == (old_rows, old.seed)
    new = new_run(
        spec,
        after=after,
        project=parent.project,
        priority=parent.priority,
        labels=parent.labels,
        created_by=actor,
        step=checkpoint.step,
        weight_version=checkpoint.weight_version,
    )

    def write(connection: sa.Connection) -> None:
        check_usable(connection, checkpoint)
        ledgers.copy_ledger(
            connection,
            parent.run_id,
            new.run_id,
            step=checkpoint.step,
            version=checkpoint.weight_version,
            has_same_prompts=has_same_prompts,
        )

    return new, write


def _no_steps(spec: RunSpec, step: int) -> Iterator[str]:
    """Yields a problem if a fork would end where it begins, because its parent has trained all steps."""
    steps = spec.trainer.steps
    if steps is not None and steps <= step and not spec.validation.only:
        yield (
            f"trainer.steps is {steps}, but the checkpoint was saved at step {step}, so nothing would be "
            "trained; override it with more steps, which include those of the checkpoint, or set "
            "validation.only to true"
        )


def _other_model(old: RunSpec, new: RunSpec) -> Iterator[str]:
    """Yields a problem for each override whose model or optimizer does not fit the parent's checkpoint.

    The trainer also compares the model's shape and vocabulary, which the controller does not read.
    """
    before, after = _model(old), _model(new)
    for key, value in after.items():
        if before[key] != value:
            yield (
                f"{key}: a fork continues the training state of its parent, which has "
                f"{json.dumps(before[key])}, got {json.dumps(value)}; remove the override, or submit a new "
                "run"
            )
    critics = [side.algorithm.advantage_kind.needs_critic for side in (old, new)]
    if critics == [False, True]:
        yield (
            f"algorithm.advantage: {new.algorithm.advantage!r} needs a critic, but the parent, which has "
            f"{old.algorithm.advantage!r}, has trained none; remove the override, or submit a new run"
        )


def _model(spec: RunSpec) -> dict[str, Any]:
    lora = spec.trainer.lora
    adapters = lora and lora.model_dump(mode="json", exclude={"sync"})
    if adapters and adapters["target_modules"]:
        adapters["target_modules"] = sorted(set(adapters["target_modules"]))
    return {
        # Only the folder's own name counts: a copy of the model has another parent folder.
        "model.path": PurePath(spec.model.path).name,
        # Adapters continue on the frozen weights, which are not in the checkpoint.
        "model.revision": lora and spec.model.revision,
        "model.tokenizer": spec.model.tokenizer,
        "trainer.lora": adapters,
        "trainer.optimizer.kind": spec.trainer.optimizer.kind,
    }


def _spec(parent: Run, checkpoint: Checkpoint, fork: ForkRequest) -> RunSpec:
    overrides = without_aliases(fork.overrides)
    if overrides.problems:
        raise SpecError(overrides.problems)
    document = merged(json.loads(parent.spec_json), overrides.document)
    remove_contradictions(document, [key for key, _ in flat(overrides.document)])
    document = merged(document, {"trainer": {"checkpoint": {"start_from": checkpoint.path}}})
    # Two runs must not write to one folder.
    document["trainer"]["checkpoint"].pop("directory", None)
    if fork.name:
        document["name"] = fork.name
    return parse_spec(document)
