"""Measures what concurrent episodes of an environment cost the rollout's process.

Usage: python -m bench.rollout.environments [--smoke] [--out FILE.json]

The environment of ``examples/looking`` runs in a child process, as in a run. An episode takes four requests:
begin, look, answer, end. ``cpu_ms`` is the CPU time of the rollout's process for one episode, and
``pool_cpu_ms`` the same with the connection pool of httpcore.
"""

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import httpx

from bench.report import report_to
from bench.rollout.parts import machine_state
from bench.whole_run import REPOSITORY
from services.common.http.limits import raise_descriptor_limit
from services.extras.environments import local
from services.extras.environments.local import LocalEnvironments, local_environments

RESULTS = REPOSITORY / "bench" / "results" / "rollout-environments.json"
_LOOKING = f"{REPOSITORY}/examples/looking/looking.py:Looking"
_OWN = local.ReusedConnections


class _Pool(httpx.AsyncHTTPTransport):
    """The pool of httpcore, without a limit."""

    def __init__(self, *, uds: str) -> None:
        super().__init__(uds=uds, limits=httpx.Limits(max_connections=None))


async def _episode(environments: LocalEnvironments, seed: int) -> None:
    session, _ = await environments.begin({}, seed=seed)
    for content in ("l", "A"):
        await session.step({"role": "assistant", "content": content})
    await session.close()


async def cpu_ms(count: int, repetitions: int) -> float:
    """Returns the median CPU milliseconds of one of ``count`` concurrent episodes."""
    times_ms = []
    async with local_environments(
        _LOOKING, {}, processes=1, timeout_s=120, wait_s=120
    ) as environments:
        await environments.check()
        for _ in range(repetitions):
            begin = time.process_time()
            await asyncio.gather(*(_episode(environments, seed) for seed in range(count)))
            times_ms.append(1e3 * (time.process_time() - begin) / count)
    return round(statistics.median(times_ms), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="fewer episodes, not kept")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    raise_descriptor_limit()
    rows: list[dict[str, Any]] = []
    for count in (8, 32) if arguments.smoke else (32, 128, 512):
        row: dict[str, Any] = {"episodes": count}
        for name, transport in (("cpu_ms", _OWN), ("pool_cpu_ms", _Pool)):
            local.ReusedConnections = transport  # type: ignore[assignment, misc]
            row[name] = asyncio.run(cpu_ms(count, 2 if arguments.smoke else 3))
        rows.append(row)
    report_to(None if arguments.smoke else arguments.out, {"rows": rows, **machine_state()})


if __name__ == "__main__":
    main()
