"""Writes the kinds of workers: a page for people, and the programs for the chart."""

from services.common.runspec.workers import WORKERS, WorkerKind, programs

_PAGE = """# Kinds of workers

The kinds of a run's processes: the entry points of the group `slipstream.worker_roles`, from which
`make docs` writes this page. [Adding](adding.md#a-kind-of-worker) shows how to add a kind.

`topology.task_groups` lists tasks. The role that does a task has the GPUs of the task's group. A role that is
not in every run has workers if its task has a separate group; otherwise the trainer does its work.

| role | tasks | program | in every run | weights | samples | trains |
| --- | --- | --- | --- | --- | --- | --- |
"""
_SCORES = {"": "", "groups": "adds {} to finished groups", "batches": "adds {} to batches"}


def page() -> str:
    """Returns docs/workers.md."""
    return _PAGE + "".join(_row(role, kind) for role, kind in WORKERS.items())


def _row(role: str, kind: WorkerKind) -> str:
    weights = "whole or adapters" if kind.merges_adapters else "whole"
    fields = (
        ", ".join(f"`{name}`" for name in kind.adds) or "fields that the trainer can also compute"
    )
    cells = (
        f"`{role}`",
        ", ".join(f"`{task}`" for task in kind.tasks),
        f"`python -m {kind.module}`",
        "yes" if kind.is_required else "",
        weights if kind.receives_weights else "",
        _SCORES[kind.scores].format(fields),
        "yes" if kind.trains else "",
    )
    return f"| {' | '.join(cells)} |\n"


def chart() -> str:
    """Returns the chart's files/workers.yaml."""
    return (
        "# Programs that workers run, each with a section of values. Written by `make docs`.\n"
        f"programs: [{', '.join(programs())}]\n"
    )
