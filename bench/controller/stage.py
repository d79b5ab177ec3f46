"""A real controller process between fakes, for one measurement."""

import asyncio
import json
import os
import re
import socket
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from slipstream_client import AsyncClient

TOKEN = "slp_" + "b" * 43


@dataclass(kw_only=True)
class Stage:
    """A controller and its fakes."""

    client: AsyncClient
    url: str
    grpc: str
    fleet: asyncio.subprocess.Process
    controller: asyncio.subprocess.Process
    metrics_url: str
    num_runs: int = 0

    def rss_mib(self) -> float:
        """Returns the memory of the controller."""
        return psutil.Process(self.controller.pid).memory_info().rss / 2**20

    def cpu_s(self) -> float:
        """Returns the CPU time that the controller has used."""
        times = psutil.Process(self.controller.pid).cpu_times()
        return times.user + times.system

    async def submit(
        self,
        *,
        steps: int,
        prompts_per_step: int,
        rollouts: int,
        group_size: int = 4,
        max_staleness: int = 1,
        running: int = 1 << 20,
        rows: int = 1 << 16,
        group_s: tuple[float, float] = (0.0, 0.0),
        step_s: float = 0.0,
        heartbeat_s: float = 1.0,
        rollout: Mapping[str, Any] | None = None,
        algorithm: Mapping[str, Any] | None = None,
        trainer: Mapping[str, Any] | None = None,
        samples: Mapping[str, Any] | None = None,
        topology: Mapping[str, Any] | None = None,
        fakes: Mapping[str, Any] | None = None,
    ) -> str:
        """Submits a run and starts its workers; returns its id.

        The last six arguments add to ``spec.rollout``, ``spec.algorithm``, ``spec.trainer``,
        ``spec.samples`` and ``spec.topology``, and to the order of the fakes.
        """
        spec = {
            "name": f"bench-{uuid.uuid4().hex[:8]}",
            "model": {"path": "tiny:qwen2-0.4m"},
            "data": {"train": {"source": "jsonl", "path": "prompts.jsonl"}},
            "algorithm": {"max_staleness": max_staleness, **(algorithm or {})},
            "rollout": {
                "replicas": rollouts,
                "group_size": group_size,
                "max_running_samples": running,
                "max_response_tokens": 64,
                "rewards": [{"name": "exact_match"}],
                **(rollout or {}),
            },
            "trainer": {"steps": steps, "prompts_per_step": prompts_per_step, **(trainer or {})},
            "validation": {"every": 0, "before_train": False, "at_end": False},
            "samples": samples or {},
            "topology": topology or {},
        }
        self.num_runs += 1
        run = await self.client.submit(spec)
        order = {
            "run_id": run.id,
            "rollouts": rollouts,
            "least_s": group_s[0],
            "most_s": group_s[1],
            "step_s": step_s,
            "rows": rows,
            "heartbeat_s": heartbeat_s,
            "controller": self.grpc,
            **(fakes or {}),
        }
        assert self.fleet.stdin is not None
        self.fleet.stdin.write(json.dumps(order).encode() + b"\n")
        await self.fleet.stdin.drain()
        return run.id

    async def until_step(self, run_id: str, step: int, *, every_s: float = 0.2) -> None:
        """Waits until a step is committed."""
        while True:
            run = await self.client.get_run(run_id)
            if run.state in ("FAILED", "CANCELLED"):
                raise RuntimeError(f"{run.state}: {run.message}")
            if run.step >= step or run.state == "SUCCEEDED":
                return
            await asyncio.sleep(every_s)

    async def step_times(self, run_id: str) -> list[float]:
        """Returns the commit time of each step in seconds."""
        run = await self.client.run(run_id)
        return [event.time.timestamp() async for event in run.events("StepCommitted")]

    async def histogram(self, name: str) -> dict[float, float]:
        """Returns the cumulative counts of a controller's histogram by upper bound, over all labels."""
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(self.metrics_url)).text
        counts: dict[float, float] = {}
        for bound, value in re.findall(rf'{name}_bucket{{[^}}]*le="([^"]+)"[^}}]*}} (\S+)', text):
            counts[float(bound)] = counts.get(float(bound), 0.0) + float(value)
        return counts


@asynccontextmanager
async def stage(
    fleet_module: str = "bench.controller.fleet",
    *,
    prepare: Callable[[Path], None] = lambda folder: None,
) -> AsyncIterator[Stage]:
    """Starts a controller and its fakes; ends them with the block.

    Args:
        fleet_module: Module of the fakes' process, which prints the port of its transferqueue.
        prepare: Called with the controller's folder before the controller starts.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        fleet = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", fleet_module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert fleet.stdout is not None
        port = json.loads(await fleet.stdout.readline())["port"]
        metrics_port = _free_port()
        ready = folder / "ready"
        (folder / "token").write_text(TOKEN)
        settings = {
            "TRANSFERQUEUE_ADDRESS": f"127.0.0.1:{port}",
            "STATE_DIRECTORY": name,
            "LAUNCHER": "none",
            "ADMIN_TOKEN_FILE": str(folder / "token"),
            "READY_FILE": str(ready),
            "MAX_REQUESTS_PER_SECOND": "0",
            "MAX_EVENT_STREAMS": "0",
            "METRICS_PORT": str(metrics_port),
            "LOG_LEVEL": "WARNING",
        }
        environment = {f"SLIPSTREAM_CONTROLLER_{key}": value for key, value in settings.items()}
        controller = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.controller"),
            env={**os.environ, **environment},  # noqa: TID251
        )
        try:
            addresses = await _addresses(ready, controller)
            async with AsyncClient(addresses["rest"], token=TOKEN) as client:
                yield Stage(
                    client=client,
                    url=addresses["rest"],
                    grpc=addresses["grpc"],
                    fleet=fleet,
                    controller=controller,
                    metrics_url=f"http://127.0.0.1:{metrics_port}/metrics",
                )
        finally:
            for process in (fleet, controller):
                if process.returncode is None:
                    process.kill()
                await process.wait()


async def _addresses(ready: Path, controller: asyncio.subprocess.Process) -> dict[str, Any]:
    while not ready.exists():
        if controller.returncode is not None:
            raise RuntimeError("the controller did not start")
        await asyncio.sleep(0.05)
    content: dict[str, Any] = json.loads(ready.read_text())
    return content


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
