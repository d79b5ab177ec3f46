"""Submits a run, or resumes the one that was paused or interrupted, for example by a machine failure."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from services.cli.api import Api
from services.cli.output import print_line
from services.common.runspec.loader import SpecError
from services.common.runspec.run import RunSpec
from services.controller.api.operations import (
    CancelRun,
    ForkRun,
    ListCheckpoints,
    ListRuns,
    ResumeRun,
)
from services.controller.models import ListedRun
from services.controller.rules.run_state import TERMINAL


async def submit_or_resume(
    api: Api, spec: RunSpec, console: Console, *, resume: bool = False
) -> str:
    """Submits a run, or resumes the same run if it was paused or interrupted before.

    An interrupted run with the same name but another specification is cancelled; its checkpoints
    are kept.

    Args:
        api: The controller.
        spec: The run.
        console: Receives messages about an interrupted run.
        resume: If true, a cancelled or failed run with this name is continued from its
            checkpoint, as a new run.

    Returns:
        The id of the run to follow.

    Raises:
        SpecError: If there is nothing to resume.
    """
    wanted = spec.model_dump(mode="json")
    for left in (await api.call(ListRuns(name=spec.name))).items:
        if left.state in TERMINAL:
            continue
        how = "paused" if left.state == "PAUSED" else "cut off"
        cut_off = f"{left.id} was {how} after step {left.step}"
        if (await api.get(left.id)).spec == wanted:
            print_line(console, f"{cut_off}; it goes on")
            if left.state == "PAUSED":
                await api.call(ResumeRun(run_id=left.id))
            return left.id
        print_line(console, f"{cut_off}, with another specification; it is cancelled")
        await api.call(CancelRun(run_id=left.id))
        async for _ in api.watch(left.id):
            pass
    ended = await _newest_with_checkpoint(api, spec.name)
    if ended is not None and resume:
        print_line(
            console,
            f"{ended.id} ended {ended.state} after step {ended.step}; a new run goes on from there",
        )
        changes = _changes((await api.get(ended.id)).spec, wanted)
        return (await api.call(ForkRun(run_id=ended.id, overrides=changes))).id
    if resume:
        raise SpecError(
            [
                f"--resume: the newest run {spec.name!r} did not end early with a checkpoint; leave it out"
            ]
        )
    if ended is not None:
        print_line(
            console,
            f"{ended.id} ended {ended.state} after step {ended.step}; this is a new run from step 0, and "
            "--resume would go on from there",
        )
    return (await api.submit(wanted)).id


async def _newest_with_checkpoint(api: Api, name: str) -> ListedRun | None:
    """Returns the newest run with a name, if it did not succeed and has a checkpoint."""
    for run in (await api.call(ListRuns(name=name, page_size=1))).items:
        kept = (await api.call(ListCheckpoints(run_id=run.id))).items
        if run.state != "SUCCEEDED" and any(point.state == "READY" for point in kept):
            return run
    return None


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of ``new`` whose values differ, nested as in ``new``."""
    found: dict[str, Any] = {}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := _changes(before, value):
                found[key] = inner
        elif value != before:
            found[key] = value
    return found
