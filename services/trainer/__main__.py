"""Entry point of a trainer process. Rank 0 serves the controller; the other ranks execute its commands.

rank 0    register -> load -> serve steps and weights until the controller stops the worker
others    receive the run from rank 0 -> load -> execute commands until rank 0 stops them

The role, for example trainer, critic or logp, determines the functions that do this: ``serve`` and
``follow`` of ``services.common.runspec.workers.WORKERS``.
"""

import asyncio
import faulthandler
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from pkgutil import resolve_name

import torch
from torch import distributed
from transformers.utils import logging as transformers_logging

from services.common.errors import DataLossError
from services.common.host import interface_of, ip_of, usable_processors
from services.common.lifetime import ending_with_outages
from services.common.runspec.loader import parse_spec
from services.common.runspec.workers import WORKERS
from services.common.security.credentials import acting_as
from services.common.settings import set_defaults
from services.common.task_group import TaskGroup, leaves, unwrapped
from services.common.telemetry.logging import configure
from services.trainer.algorithm.own import OwnFunctionError
from services.trainer.checkpoint.compatibility import OtherCheckpointError
from services.trainer.collectives import join_processes
from services.trainer.ranks.build import device_of
from services.trainer.ranks.command_group import CommandGroup, RankFailedError
from services.trainer.ranks.start import FollowerStart, connect_data, share_outages
from services.trainer.settings import TrainerSettings
from services.trainer.transfers import QueueTransfers


async def follow(settings: TrainerSettings) -> None:
    """Executes the commands of rank 0."""
    command_group = CommandGroup(settings.world_size, host=settings.advertise_host)
    with command_group.listening():
        command = await asyncio.to_thread(command_group.receive)
        message = json.loads(command.payload)
        spec = parse_spec(message["spec"])
        with unwrapped():
            async with (
                connect_data(message["transferqueue_address"], spec) as data,
                TaskGroup() as tasks,
            ):
                sharing = tasks.create_task(share_outages(command_group, data.outage))
                transfers = QueueTransfers(data, asyncio.get_running_loop())
                start = FollowerStart(spec, settings, command_group, transfers)
                await resolve_name(WORKERS[settings.role].follow)(start)
                await transfers.finish()
                sharing.cancel()


def main() -> None:
    """Runs ``python -m services.trainer`` and ``torchrun -m services.trainer``."""
    settings = TrainerSettings()
    faulthandler.enable()
    configure(
        level=settings.log_level,
        log_format=settings.log_format,
        service="trainer",
        worker=f"{settings.worker_id}/{settings.rank}",
    )
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # Packs change size at every step; expandable segments let the next pack reuse freed memory.
    set_defaults({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    torch.set_num_threads(min(torch.get_num_threads(), usable_processors()))
    device = device_of(settings)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if settings.world_size > 1:
        # Without it, Gloo uses the address of this host's name, which may be one of the loopback.
        if interface := interface_of(ip_of(settings.advertise_host)):
            set_defaults({"GLOO_SOCKET_IFNAME": interface})
        join_processes(device=device, rank=settings.rank, world_size=settings.world_size)
    failures: list[BaseException] = []
    with ending_with_outages():
        try:
            _work(settings)
        except* (DataLossError, OtherCheckpointError, OwnFunctionError, RankFailedError) as group:
            failures = leaves(group)
    if failures:  # the message is complete; a traceback would hide it
        sys.exit(str(failures[0]))
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _work(settings: TrainerSettings) -> None:
    """Runs this rank's role until it ends."""
    if settings.rank > 0:
        # SIGTERM reaches all ranks at once, but rank 0 still needs the others to finish its current command.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with acting_as(settings.identity()):
            asyncio.run(follow(settings))
        return
    serve_role = resolve_name(WORKERS[settings.role].serve)
    with (
        acting_as(settings.identity()),
        settings.tracing("trainer", run=settings.run_id, worker=settings.worker_id),
    ):
        asyncio.run(_serve_measured(settings, serve_role))


async def _serve_measured(
    settings: TrainerSettings, serve_role: Callable[[TrainerSettings], Awaitable[None]]
) -> None:
    async with settings.serving_metrics():
        await serve_role(settings)


if __name__ == "__main__":
    main()
