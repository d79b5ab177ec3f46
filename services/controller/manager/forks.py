"""A new run that goes on from a checkpoint of another one."""

import json
from collections.abc import Callable

import sqlalchemy as sa

from services.common.ids import new_run_id
from services.common.spec.aliases import let_win, without_aliases
from services.common.spec.keys import flat
from services.common.spec.loader import SpecError, canonical_json, parse_spec, spec_digest
from services.common.spec.run import RunSpec
from services.controller.manager.patches import merged
from services.controller.models import ForkRequest
from services.controller.run.checkpoints import Checkpoint
from services.controller.run.requests import needs_of
from services.controller.store import ledger_copies
from services.controller.store.records import NewRun, Run


def fork_of(
    parent: Run, checkpoint: Checkpoint, fork: ForkRequest, *, actor: str
) -> tuple[NewRun, Callable[[sa.Connection], None]]:
    """The run that goes on from a checkpoint, and the write of the steps that it has behind it.

    Raises:
        SpecError: If the overrides break a rule, or leave nothing to train.
    """
    spec = _spec(parent, checkpoint, fork)
    old = parse_spec(parent.spec_json)
    rows, old_rows = (each.data.model_copy(update={"epochs": None}) for each in (spec, old))
    has_same_prompts = (rows, spec.seed) == (old_rows, old.seed)
    new = NewRun(
        run_id=new_run_id(),
        name=spec.name,
        spec_json=canonical_json(spec),
        spec_digest=spec_digest(spec),
        needs=needs_of(spec),
        project=parent.project,
        priority=parent.priority,
        labels=parent.labels,
        created_by=actor,
        step=checkpoint.step,
        weight_version=checkpoint.weight_version,
    )

    def write(connection: sa.Connection) -> None:
        ledger_copies.copy_ledger(
            connection,
            parent.run_id,
            new.run_id,
            step=checkpoint.step,
            version=checkpoint.weight_version,
            has_same_prompts=has_same_prompts,
        )

    return new, write


def _spec(parent: Run, checkpoint: Checkpoint, fork: ForkRequest) -> RunSpec:
    overrides = without_aliases(fork.overrides)
    if overrides.problems:
        raise SpecError(overrides.problems)
    document = merged(json.loads(parent.spec_json), overrides.document)
    let_win(document, [key for key, _ in flat(overrides.document)])
    document = merged(document, {"trainer": {"checkpoint": {"start_from": checkpoint.path}}})
    # Two runs must not write to one folder.
    document["trainer"]["checkpoint"].pop("directory", None)
    if fork.name:
        document["name"] = fork.name
    return parse_spec(document)
