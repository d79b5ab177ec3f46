"""Companions: work of an extra during the runs of this machine, such as writing them to trackers.

The name of a companion is the key of a specification that asks for it. ``slipstream run`` starts it if the
run has that key, ``slipstream up`` always.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from rich.console import Console

from services.cli.api import Api
from services.cli.output import print_line
from services.common.callables import describe_error, load_callable
from services.common.doors import References
from services.common.runspec.run import RunSpec

COMPANIONS: Final = References("run_companions")
"""Functions :class:`OpenCompanion` by the key of the specification."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompanionArgs:
    """Arguments with which a companion follows runs."""

    api: Api
    url: str
    """Address of the controller."""
    token: str
    """API token."""
    state_directory: Path
    """Folder for files of the companion."""
    console: Console
    """Receives messages about waits and failures."""
    run_id: str = ""
    """The only run; empty for all runs of the project."""


class OpenCompanion(Protocol):
    """Works while the block runs; its errors do not end the block."""

    def __call__(self, args: CompanionArgs, /) -> AbstractAsyncContextManager[None]: ...


@asynccontextmanager
async def companions(args: CompanionArgs, *, spec: RunSpec | None = None) -> AsyncIterator[None]:
    """Runs companions until the block ends. One that cannot be loaded is reported and left out.

    Args:
        spec: Specification of the only run; None if runs are submitted later.
    """
    async with AsyncExitStack() as stack:
        for key, reference in COMPANIONS.items():
            if spec is not None and not getattr(spec, key, None):
                continue
            try:
                open_companion: OpenCompanion = load_callable(reference)
                companion = open_companion(args)
            except Exception as error:  # noqa: BLE001 -- a run does not depend on it
                print_line(args.console, f"{key} cannot be used: {describe_error(error)}")
                continue
            await stack.enter_async_context(companion)
        yield
