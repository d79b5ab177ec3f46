"""Commands about a specification that start nothing."""

from typing import Annotated

import typer

from services.cli.checked_spec import Elsewhere, Overrides, SpecPath, load_checked
from services.cli.output import console


def validate(
    spec: SpecPath,
    overrides: Overrides = None,
    elsewhere: Elsewhere = False,
    gpu_gb: Annotated[
        float | None,
        typer.Option(help="Memory of one GPU: also say what each of a rollout's will hold.", min=1),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            help="GPUs of the machine, for --gpu-gb. Default: enough for all workers.", min=1
        ),
    ] = None,
) -> None:
    """Check a specification and everything it names, without starting anything."""
    loaded = load_checked(spec, overrides, gpu_gb=gpu_gb, gpus=gpus, is_here=not elsewhere)
    console.print(f"{spec}: run {loaded.name!r} is valid", highlight=False)
