"""Sends a day of abuse in ten minutes: ``python -m bench.abuse [--minutes 10 | --smoke]``.

Two projects train a run each, one of them with an agent. Meanwhile a third identity sends
oversized, malformed, slow and concurrent requests to every port of every process on loopback: REST,
gRPC, ZeroMQ, rendezvous, the agents' endpoint. Both runs must succeed with closed ledgers, the
controller and the transferqueue must stay below the memory limits of the chart, and the API must
answer the honest clients within 250 ms at the 99th percentile. Results go to
``bench/results/abuse.json``; ``--smoke`` writes none.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from statistics import quantiles
from typing import Any

import psutil
import yaml

from bench.abuse.honest import is_closed, look, spec_for
from bench.abuse.memory import own_mib
from bench.report import report_to
from bench.whole_run import REPOSITORY
from services.cli.local import LocalServices, local_services
from services.common.security.credentials import issue_token
from services.controller.api.principals import TokenStore
from services.controller.settings import DATABASE_FILE
from services.controller.store.database import Database
from slipstream_client import AsyncClient, AsyncRun
from slipstream_client.models import RunView

RESULTS = REPOSITORY / "bench" / "results" / "abuse.json"
HONEST = ("blue", "green")
P99_MS = 250.0
_QUIET_S = 10.0
_SAMPLE_S = 0.5
_ENDS_WITHIN_S = 1800.0
_VALUES = REPOSITORY / "deploy" / "helm" / "slipstream" / "values.yaml"
_UNITS = {"Mi": 1, "Gi": 1024}


def chart_limits_mib() -> dict[str, float]:
    """Returns the chart's memory limits in MiB; that of the transferqueue excludes memory for samples."""
    values = yaml.safe_load(_VALUES.read_text(encoding="utf-8"))
    limit = values["controller"]["resources"]["limits"]["memory"]
    return {
        "controller": float(limit[:-2]) * _UNITS[limit[-2:]],
        "transferqueue": float(values["transferqueue"]["overheadMiB"]),
    }


def services_of(local: LocalServices) -> dict[str, psutil.Process]:
    """Returns the processes of the controller and the transferqueue."""
    result = {}
    for service in local.services:
        assert service.process is not None
        result[service.name] = psutil.Process(service.process.pid)
    return result


def listening() -> dict[int, str]:
    """Returns the ports of all processes below this one, with the names of the listeners."""
    result = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            words = [word for word in process.cmdline() if word.startswith("services.")]
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    name = words[0].removeprefix("services.") if words else "other"
                    result[connection.laddr.port] = name
    return result


async def measure_memory(processes: dict[str, psutil.Process], most: dict[str, float]) -> None:
    """Updates each process's max memory until cancelled."""
    while True:
        for name, process in processes.items():
            most[name] = max(most.get(name, 0.0), own_mib(process))
        await asyncio.sleep(_SAMPLE_S)


@asynccontextmanager
async def attacking(order: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Runs the attacking identity; its results are available after the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.abuse.attacks"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
    )
    answers: dict[str, Any] = {}
    assert process.stdin is not None
    process.stdin.write(json.dumps(order).encode() + b"\n")
    await process.stdin.drain()
    try:
        yield answers
        out, _ = await process.communicate()
        answers |= json.loads(out)
    finally:
        if process.returncode is None:
            process.kill()


def spread_ms(waits_s: list[float]) -> dict[str, float]:
    """Returns percentiles of waiting times in milliseconds."""
    cuts = quantiles(waits_s, n=100)
    spread = {"p50": cuts[49], "p99": cuts[98], "max": max(waits_s)}
    return {name: round(1000 * value, 1) for name, value in spread.items()} | {"n": len(waits_s)}


async def abused(folder: Path, *, seconds: float) -> dict[str, Any]:
    """Trains under attack and returns the results."""
    began, state = time.monotonic(), folder / "state"
    async with AsyncExitStack() as stack:
        local = await stack.enter_async_context(local_services(state))
        tokens = TokenStore(Database(f"sqlite:///{state / DATABASE_FILE}"))
        clients: dict[str, AsyncClient] = {}
        runs: dict[str, AsyncRun] = {}
        for number, project in enumerate((*HONEST, "third")):
            token = tokens.create(name=project, project=project, role="operator")
            client = AsyncClient(local.url, token=token)
            clients[project] = await stack.enter_async_context(client)
            project_folder = folder / project
            project_folder.mkdir()
            spec = spec_for(project_folder, project, seconds=seconds, has_agent=number == 1)
            runs[project] = await clients[project].submit(spec)
        third = runs["third"]
        for run in runs.values():
            await until_step(run, 1)
        # The third project needs streams to hold, but no workers.
        await third.pause(checkpoint=False)
        quiet_s: list[float] = []
        waits_s: list[float] = []
        most: dict[str, float] = {}
        processes = services_of(local)
        async with asyncio.TaskGroup() as tasks:
            watching = [
                tasks.create_task(look(clients[name], runs[name].id, quiet_s)) for name in HONEST
            ]
            await asyncio.sleep(_QUIET_S)
            before = {name: round(own_mib(process)) for name, process in processes.items()}
            for task in watching:
                task.cancel()
        ports = listening()
        order = {
            "url": local.url,
            "token": token,
            "forged": issue_token(b"another installation", runs["blue"].id),
            "run_id": third.id,
            "ports": {str(port): name for port, name in ports.items()},
            "spec": spec_for(folder / "third", "third", seconds=1, has_agent=False),
            "seconds": seconds,
            "seed": 0,
        }
        async with asyncio.TaskGroup() as tasks:
            watching = [
                tasks.create_task(look(clients[name], runs[name].id, waits_s)) for name in HONEST
            ]
            watching.append(tasks.create_task(measure_memory(processes, most)))
            async with attacking(order) as answers:
                await asyncio.sleep(seconds)
            for task in watching:
                task.cancel()
        then = {name: (await runs[name].refresh()).state for name in HONEST}
        ended_runs = {name: await until_end(runs[name]) for name in HONEST}
        assert {name: process.pid for name, process in services_of(local).items()} == {
            name: process.pid for name, process in processes.items()
        }, "a service was started again"
        log = (state / "logs" / "controller.log").read_text(encoding="utf-8")
    limits, abused_ms = chart_limits_mib(), spread_ms(waits_s)
    faults = Counter[str]()
    for counts in answers.values():
        faults.update({code: n for code, n in counts.items() if code in ("INTERNAL", "UNKNOWN")})
        faults.update({code: n for code, n in counts.items() if code[:1] == "5"})
    return {
        "seconds": seconds,
        "whole_s": round(time.monotonic() - began),
        "ports": dict(Counter(ports.values())),
        "attacks": {name: dict(counts) for name, counts in sorted(answers.items())},
        "our_faults": dict(faults),
        "log_mib": round(len(log) / 2**20, 2),
        "runs": {
            name: {
                "state": run.state,
                "steps": run.step,
                "is_closed": is_closed(run),
                "when_the_attack_ended": then[name],
            }
            for name, run in ended_runs.items()
        },
        "memory_mib": {name: round(value) for name, value in most.items()},
        "memory_before_mib": before,
        "limits_mib": limits,
        "api_ms": {"quiet": spread_ms(quiet_s), "abused": abused_ms, "bar": P99_MS},
        "load": round(os.getloadavg()[0], 1),
        "holds": (
            all(run.state == "SUCCEEDED" and is_closed(run) for run in ended_runs.values())
            and all(most[name] <= limit for name, limit in limits.items())
            and abused_ms["p99"] <= P99_MS
            and not faults
        ),
    }


async def until_step(run: AsyncRun, step: int) -> None:
    """Waits until a run has trained a step."""
    end = time.monotonic() + _ENDS_WITHIN_S
    while (view := await run.refresh()).step < step:
        assert time.monotonic() < end and view.state not in ("FAILED", "CANCELLED"), view.message
        await asyncio.sleep(_SAMPLE_S)


async def until_end(run: AsyncRun) -> RunView:
    """Waits until a run has ended."""
    async for _ in run.follow(timeout_s=_ENDS_WITHIN_S):
        pass
    return run.view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--smoke", action="store_true", help="half a minute, not kept")
    options = parser.parse_args()
    seconds = 30.0 if options.smoke else 60 * options.minutes
    with tempfile.TemporaryDirectory() as name:
        result = asyncio.run(abused(Path(name), seconds=seconds))
    report_to(None if options.smoke else RESULTS, result)
    if not result["holds"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
