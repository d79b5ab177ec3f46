"""Submits a run to a controller."""

from typing import Annotated

import typer

from services.cli.calling import Url, call_api
from services.cli.checked_spec import Elsewhere, Overrides, SpecPath, load_checked
from services.cli.output import write


def submit(
    spec: SpecPath,
    overrides: Overrides = None,
    elsewhere: Elsewhere = False,
    label: Annotated[
        list[str] | None, typer.Option(help="Label, such as team=blue. May be repeated.")
    ] = None,
    priority: Annotated[
        int, typer.Option(help="Runs with a higher one start first.", min=-1000, max=1000)
    ] = 0,
    url: Url = None,
) -> None:
    """Submit a run and print its id."""
    labels = _labels(label or [])
    loaded = load_checked(spec, overrides, is_here=not elsewhere)
    created = call_api(
        url,
        lambda api: api.submit(loaded.model_dump(mode="json"), priority=priority, labels=labels),
    )
    write(created.id)


def _labels(pairs: list[str]) -> dict[str, str]:
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise typer.BadParameter(f"--label {wrong[0]}: expected KEY=VALUE, such as team=blue")
    return dict(pair.split("=", 1) for pair in pairs)
