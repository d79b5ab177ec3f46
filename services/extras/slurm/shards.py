"""Storage shards of the transferqueue on the further nodes of the allocation, each as a step."""

import asyncio
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil

from services.controller.launch.worker_process import (
    ChildProcess,
    adopt,
    last_lines,
    write_record,
)
from services.controller.settings import ControllerSettings
from services.extras.slurm.allocation import Allocation
from services.extras.slurm.identity import write_private
from services.extras.slurm.nodes import silence
from services.extras.slurm.placement import Node
from services.extras.slurm.settings import SlurmSettings, step_environment
from services.extras.slurm.steps import StepProcess, StepRequest, srun_command, start_srun

logger = logging.getLogger(__name__)
_KILL_S = 10.0
_AGAIN_S = 5.0
_SILENCE_S = 2.0
_AUTHORITY = ("tls.crt", "tls.key", "ca.crt")
_PREFIX = "SLIPSTREAM_TRANSFERQUEUE_"


class Shards:
    """Keeps a shard running on each further node; a node that is lost gets none.

    Args:
        settings: Settings of the controller: the address of the index, the key and the authority. Shards read
            the latter two from copies on the shared file system, which only this user can read.
    """

    def __init__(
        self, allocation: Allocation, slurm: SlurmSettings, settings: ControllerSettings
    ) -> None:
        self._allocation = allocation
        self._slurm = slurm
        self._settings = settings
        self._folder = settings.state_directory / "shards"
        self._logs = settings.state_directory / "logs"

    @contextmanager
    def identity(self) -> Iterator[None]:
        """Copies the key and the authority to the shared file system until the block ends."""
        settings = self._settings
        assert settings.service_key_file is not None
        assert settings.tls_issuer is not None
        write_private(self._folder / "key", settings.service_key_file.read_bytes())
        for name in _AUTHORITY:
            content = (settings.tls_issuer / name).read_bytes()
            write_private(self._folder / "authority" / name, content)
        try:
            yield
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def keep(self, node: Node) -> None:
        """Keeps the shard of a node running until cancelled, or until the node is lost."""
        adopted = adopt(self._folder / f"{node.name}.process")
        process = StepProcess(adopted) if adopted is not None else await self._start(node)
        while True:
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                await process.kill(_KILL_S)
                raise
            why = await silence(node, _SILENCE_S)
            cause = why or last_lines(self._logs / f"shard-{node.name}.log", 1)
            extra = {"node": node.name, "code": code, "why": cause}
            logger.warning("a shard of the transferqueue ended", extra=extra)
            if why:
                return
            await asyncio.sleep(_AGAIN_S)
            process = await self._start(node)

    async def _start(self, node: Node) -> StepProcess:
        settings = {
            "INDEX_ADDRESS": self._settings.transferqueue_address,
            "SERVICE_KEY_FILE": str(self._folder / "key"),
            "TLS_ISSUER": str(self._folder / "authority"),
            "SHARD_ID": f"shard-{node.name}",
            "DATA_BIND": f"{node.address}:0",
            "USE_CURVE": "true",
        }
        plan = {
            "module": "services.transferqueue",
            "prefix": _PREFIX,
            "environment": {f"{_PREFIX}{name}": value for name, value in settings.items()},
            "ranks": 1,
            "nodes": {node.name: {"address": node.address, "gpus": [], "threads": node.processors}},
        }
        file = self._folder / f"{node.name}.plan"
        write_private(file, json.dumps(plan).encode())
        request = StepRequest(
            name=f"shard-{node.name}",
            group=self._allocation.components[node.component].group,
            nodes=[node.name],
            tasks_per_node=1,
            module="services.extras.slurm.task",
            arguments=[str(file)],
        )
        process = await start_srun(
            srun_command(request, job_id=self._allocation.job_id, extra=self._slurm.srun_arguments),
            step_environment(),
            self._logs / f"shard-{node.name}.log",
        )
        try:
            write_record(self._folder / f"{node.name}.process", [process.pid])
        except psutil.NoSuchProcess:
            logger.warning("a shard ended during its start", extra={"node": node.name})
        return StepProcess(ChildProcess(process))


def further_nodes(nodes: Sequence[Node], controller_address: str) -> list[Node]:
    """Returns the nodes without the controller and the first shard."""
    host = controller_address.rpartition(":")[0]
    return [node for node in nodes if node.address != host]
