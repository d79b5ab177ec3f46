"""Signal handling of local commands: Ctrl-C, hang-up and ``kill`` pause runs; a second Ctrl-C cancels."""

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console

from services.cli.api import Api, ApiError
from services.cli.output import print_line
from services.controller.api.operations import CancelRun, ListRuns, PauseRun
from services.controller.rules.run_state import TERMINAL

_PAUSE_TIMEOUT_S = 300.0


class SignalHandler:
    """Catches signals that ask this process to end, from its construction on."""

    def __init__(self) -> None:
        self._came = asyncio.Event()
        self._again = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        loop.add_signal_handler(signal.SIGTERM, self._came.set)
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)

    async def pause_runs(self, api: Api, console: Console) -> None:
        """Waits for a signal, then pauses all active runs; returns when none is active any more.

        Args:
            api: The controller.
            console: Receives messages about progress and about how to resume.
        """
        await self._came.wait()
        active = await _active(api)
        if not active:
            return
        print_line(console, "pausing behind the current step; Ctrl-C again cancels instead")
        pausing = []
        for run_id in active:
            with suppress(ApiError):  # what is only being started has nothing to save
                await api.call(PauseRun(run_id=run_id))
                pausing.append(run_id)
        paused = asyncio.ensure_future(_until_paused(api, pausing))
        again = asyncio.ensure_future(self._again.wait())
        try:
            async with asyncio.timeout(_PAUSE_TIMEOUT_S):
                await asyncio.wait((paused, again), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            print_line(
                console, f"not paused within {_PAUSE_TIMEOUT_S:.0f} s: it is cut off where it is"
            )
        finally:
            again.cancel()
            paused.cancel()
        if self._again.is_set():
            for run_id in active:
                with suppress(ApiError):  # it may have ended
                    await api.call(CancelRun(run_id=run_id))
            print_line(console, "cancelled")
        else:
            print_line(console, "paused: the same command goes on from there")

    def _interrupted(self) -> None:
        (self._again if self._came.is_set() else self._came).set()

    def _hung_up(self) -> None:
        # The terminal is gone, and writing to it would be an error.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
        self._came.set()


async def _active(api: Api) -> list[str]:
    listed = (await api.call(ListRuns())).items
    return [run.id for run in listed if run.state not in TERMINAL and run.state != "PAUSED"]


async def _until_paused(api: Api, run_ids: Sequence[str]) -> None:
    for run_id in run_ids:
        async for kind, _ in api.watch(run_id):
            # The state is queried because events also report earlier pauses.
            if kind == "StateChanged" and (await api.get(run_id)).state == "PAUSED":
                break
