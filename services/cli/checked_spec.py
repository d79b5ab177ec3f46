"""A specification file that was checked before anything is started."""

from pathlib import Path
from typing import Annotated

import typer

from services.cli.machine import shared_gpus, slow_settings
from services.cli.output import console, errors, fail, say
from services.cli.planned_memory import memory_table
from services.cli.preflight import read_checked
from services.common.spec.loader import SpecError
from services.common.spec.run import RunSpec

SpecPath = Annotated[Path, typer.Argument(help="The run's specification: YAML or JSON.")]
Elsewhere = Annotated[
    bool,
    typer.Option(
        "--elsewhere", help="Check keys alone: files, packages and GPUs are on other machines."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Overrides, such as algorithm.max_staleness=2. May be repeated."),
]


def load_checked(
    path: Path,
    overrides: list[str] | None,
    *,
    gpu_gb: float | None = None,
    gpus: int | None = None,
    is_here: bool = True,
) -> RunSpec:
    """Read a specification and check it and all that it names; problems are told, and end the command."""
    try:
        draft = read_checked(path, overrides or (), is_here=is_here)
        for note in draft.notes:
            say(errors, f"note: {note}")
        spec = draft.examined.spec
        assert spec is not None
        for note in (shared_gpus(spec), slow_settings(spec)) if is_here else ():
            if note:
                say(errors, f"note: {note}")
        if gpu_gb is not None:
            table = memory_table(spec, gpu_bytes=int(gpu_gb * 1e9), gpus=gpus)
            console.print(table, highlight=False)
    except SpecError as error:
        for problem in error.problems:
            fail(problem)
        raise typer.Exit(2) from error
    return spec
