"""The ``doctor`` command: lists what runs can name on this machine."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from platform import python_version

import typer

from services.cli.output import console
from services.common import doors, launchers, stores
from services.common.doors import OWN_PACKAGE, DoorError, Provider
from services.common.models import weight_formats
from services.common.runspec import engines, rollout, trackers, trainer, weight_modes, workers

_DOORS = {
    door.group: door
    for door in (
        engines.ENGINES,
        engines.TRAIN_ENGINES,
        trainer.OPTIMIZERS,
        workers.WORKERS,
        launchers.LAUNCHERS,
        rollout.ENVIRONMENTS,
        stores.STORES,
        trackers.TRACKERS,
        weight_modes.TRANSPORTS,
        weight_modes.MODES,
        weight_formats.FORMATS,
    )
}


@dataclass(frozen=True, slots=True)
class _Finding:
    """One entry point and why it cannot be used; empty if it can."""

    provider: Provider
    problem: str


def doctor() -> None:
    """List the engines, rewards, sandboxes and other parts that are installed, and what is broken.

    A run can name the listed parts on this machine; another machine has what is installed there. Exit status
    1 if a part cannot be used.
    """
    console.print(
        f"slipstream {version(OWN_PACKAGE)}, Python {python_version()} ({sys.executable})"
    )
    findings = list(_findings())
    group = ""
    for finding in findings:
        provider = finding.provider
        if provider.group != group:
            group = provider.group
            console.print(group)
        where = (
            "" if provider.package == OWN_PACKAGE else f"  {provider.package} {provider.version}"
        )
        console.print(f"  {provider.name:14}{where}".rstrip())
        if finding.problem:
            console.print(f"    cannot be used: {finding.problem}", style="red", soft_wrap=True)
    if any(finding.problem for finding in findings):
        raise typer.Exit(1)


def _findings() -> Iterator[_Finding]:
    for group, names in sorted(doors.providers().items()):
        for name, candidates in names.items():
            for provider in candidates:
                if provider == candidates[0]:
                    yield _Finding(provider, _problem(group, name, provider))
                elif candidates[0].package == OWN_PACKAGE:
                    yield _Finding(provider, f"the name {name!r} is one of {OWN_PACKAGE} itself")
                else:
                    yield _Finding(provider, f"{candidates[0].package} provides {name!r} too")


def _problem(group: str, name: str, provider: Provider) -> str:
    door = _DOORS.get(group)
    if door is None:
        return _missing_module(provider)
    try:
        door[name]
    except DoorError as error:
        return str(error)
    return ""


def _missing_module(provider: Provider) -> str:
    """Returns a problem if the module of a reference does not exist; it is not imported."""
    module = provider.reference.partition(":")[0]
    try:
        exists = find_spec(module) is not None
    except ImportError:
        exists = False
    return "" if exists else f"there is no module {module!r}"
