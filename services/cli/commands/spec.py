"""Commands on a specification file: ``validate`` and ``submit``."""

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from services.checks.start.machine import (
    gpu_bytes_here,
    gpu_shortages,
    has_gpus,
    num_gpus,
    shared_gpus,
    slow_settings,
)
from services.checks.start.preflight import read_checked, record_note
from services.cli import output
from services.cli.controller_address import Url, is_controller_here
from services.cli.output import console, errors, escaping_descriptors, fail, print_line, write
from services.common.callables import load_callable
from services.common.doors import DoorError
from services.common.launchers import LAUNCHERS, PodTopology
from services.common.models.configs import full_config
from services.common.models.stages import bubble, most_packs
from services.common.runspec.base import did_you_mean
from services.common.runspec.loader import SpecError
from services.common.runspec.run import RunSpec

SpecPath = Annotated[Path, typer.Argument(help="Specification of the run: YAML or JSON.")]
Elsewhere = Annotated[
    bool,
    typer.Option(
        "--elsewhere",
        help="Check only the keys, because files, packages and GPUs are on other machines.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Overrides, such as trainer.steps=200. May be repeated."),
]


def checked_launcher(name: str | None) -> str | None:
    """Returns the name of a launcher.

    Raises:
        typer.BadParameter: If no package provides it, or its package is broken.
    """
    if name is not None and name not in LAUNCHERS:
        raise typer.BadParameter(
            f"expected one of {', '.join(LAUNCHERS.names())}, got {name!r}."
            f"{did_you_mean(name, LAUNCHERS.names())}"
        )
    try:
        return name if name is None or LAUNCHERS[name] else None
    except DoorError as error:
        raise typer.BadParameter(str(error)) from error


def startable_launcher(name: str) -> str:
    """Returns the name of a launcher whose services a command can start on this machine.

    Raises:
        typer.BadParameter: If it is none.
    """
    checked_launcher(name)
    if not LAUNCHERS[name].site:
        startable = [launcher for launcher in LAUNCHERS if LAUNCHERS[launcher].site]
        raise typer.BadParameter(
            f"expected one of {', '.join(startable)}, got {name!r}, whose controller is installed otherwise; "
            "submit the run to that controller (slipstream submit --url)"
        )
    return name


def _check_launcher(spec: RunSpec, launcher: str | None, *options: PodTopology) -> None:
    """Raises SpecError with the reasons why a launcher, with these options, can never start a run."""
    reference = LAUNCHERS[launcher].problems if launcher is not None else ""
    if reference and (problems := [*load_callable(reference)(spec, *options)]):
        raise SpecError(problems)


def load_checked(
    path: Path,
    overrides: list[str] | None,
    *,
    gpu_gb: float | None = None,
    gpus: int | None = None,
    is_here: bool = True,
    checks_memory: bool = False,
    is_start: bool = False,
    launcher: str | None = None,
) -> RunSpec:
    """Reads a specification and checks it and all resources that it names; problems end the command.

    Args:
        is_here: True if the run will be on this machine.
        checks_memory: True if the run must fit on this machine's GPUs, if ``gpu_gb`` is not given.
        is_start: True if the run starts now, so that the GPUs must have enough free memory.
        launcher: Name of the launcher of the run's workers; None if it is not known.
    """
    has_workers = is_here and launcher in (None, "process")
    try:
        draft = read_checked(
            path,
            overrides or (),
            is_here=is_here,
            has_workers=has_workers,
            capturing=escaping_descriptors,
        )
        for note in draft.notes:
            print_line(errors, f"note: {note}")
        spec = draft.examined.spec
        assert spec is not None
        _check_launcher(spec, launcher)
        notes = [record_note(spec)] if is_here else []
        notes += [shared_gpus(spec), slow_settings(spec)] if has_workers else []
        for note in filter(None, notes):
            print_line(errors, f"note: {note}")
        _check_free_memory(spec, is_here=has_workers, is_start=is_start)
        gpu_bytes = int(gpu_gb * 1e9) if gpu_gb is not None else None
        if gpu_bytes is None and checks_memory and has_workers and has_gpus():
            gpu_bytes = gpu_bytes_here()
            gpus = gpus or num_gpus() or None
        if gpu_bytes is not None:
            # Imports torch, which no other check needs.
            from services.checks.start.memory import memory_table

            table = memory_table(spec, gpu_bytes=gpu_bytes, gpus=gpus)
            console.print(table, highlight=False)
    except SpecError as error:
        _refuse(error)
    return spec


def _refuse(error: SpecError) -> NoReturn:
    """Prints the problems of a specification and ends the command."""
    for problem in error.problems:
        fail(problem)
    raise typer.Exit(2) from error


def _check_free_memory(spec: RunSpec, *, is_here: bool, is_start: bool) -> None:
    """Prints a note about GPUs that other programs use too much; raises SpecError if the run starts now."""
    if not (is_here and has_gpus()) or spec.model.is_tiny:
        return
    shortages = [*gpu_shortages(spec, full_config(spec.model))]
    if shortages and is_start:
        raise SpecError(shortages)
    for shortage in shortages:
        print_line(errors, f"note: {shortage}")


def validate(
    spec: SpecPath,
    overrides: Overrides = None,
    elsewhere: Elsewhere = False,
    gpu_gb: Annotated[
        float | None,
        typer.Option(
            help=(
                "Memory of one GPU in GB, such as 141: prints each GPU's estimated use, and fails if it does "
                "not fit. Default: the memory of this machine's GPUs."
            ),
            min=1,
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            help="Number of GPUs of the machine, for --gpu-gb. Default: enough for all workers.",
            min=1,
        ),
    ] = None,
    pods: Annotated[
        PodTopology | None,
        typer.Option(
            help=(
                "Check for Kubernetes pods, as workers.topology of the chart, in place of this machine."
            )
        ),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            "--launcher",
            help=(
                "Check whether this launcher can start the run, such as 'slurm' or 'kubernetes', in place of "
                "this machine."
            ),
            callback=checked_launcher,
        ),
    ] = None,
    url: Url = None,
) -> None:
    """Check a specification and everything that it refers to, without starting anything.

    If --url or SLIPSTREAM_URL names a controller of other machines, it checks the specification for its
    launcher, and this machine is not checked.
    """
    is_here = is_controller_here(url)
    loaded = load_checked(
        spec,
        overrides,
        gpu_gb=gpu_gb,
        gpus=gpus,
        is_here=is_here and not elsewhere and pods is None,
        checks_memory=True,
        launcher=launcher,
    )
    if pods is not None:
        try:
            _check_launcher(loaded, "kubernetes", pods)
        except SpecError as error:
            _refuse(error)
    if not is_here:
        # A check of this machine needs no API client, whose imports take a third of a second.
        from services.cli.api_calls import call_operation
        from services.controller.api.operations import CreateRun

        document = loaded.model_dump(mode="json")
        call_operation(url, CreateRun, spec=document, validate_only=True)
    console.print(f"{spec}: run {loaded.name!r} is valid", highlight=False)
    if (stages := loaded.trainer.pipeline_parallel) > 1:
        packs = most_packs(loaded)
        console.print(
            f"each of {stages} pipeline stages is idle for at least {bubble(stages, packs):.0%} of an "
            f"update, which has at most {packs} micro-batches; a lower "
            "trainer.tokens_per_micro_batch gives more",
            highlight=False,
            soft_wrap=True,
        )


def submit(
    spec: SpecPath,
    overrides: Overrides = None,
    elsewhere: Elsewhere = False,
    label: Annotated[
        list[str] | None, typer.Option(help="Label, such as team=blue. May be repeated.")
    ] = None,
    priority: Annotated[
        int,
        typer.Option(help="Queued runs with a higher priority start first.", min=-1000, max=1000),
    ] = 0,
    url: Url = None,
) -> None:
    """Submit a run and print its id.

    If --url or SLIPSTREAM_URL names a controller of other machines, this machine is not checked.
    """
    labels = output.label_pairs(label or [])
    is_here = is_controller_here(url) and not elsewhere
    loaded = load_checked(spec, overrides, is_here=is_here)
    from services.cli.api_calls import call_api

    created = call_api(
        url,
        lambda api: api.submit(loaded.model_dump(mode="json"), priority=priority, labels=labels),
    )
    write(created.id)
