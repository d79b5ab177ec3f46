"""The same episodes in virtual time, without sockets: memory of ended episodes, cost of turns."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import psutil

from bench.rollout.served_episodes import Episodes, Load, milliseconds
from bench.rollout.tool_agent import converse
from services.extras.agents.agent import Agent
from services.extras.agents.endpoint import Endpoint
from services.extras.fake_engine.virtual_time import VirtualTimeLoop
from services.rollout.monitor import freeze_startup_objects

_WARM_MINUTES = 3


def hour(load: Load, *, minutes: int) -> dict[str, Any]:
    """Runs episodes in virtual time; the overhead is that on a dedicated processor.

    Args:
        load: The load.
        minutes: Measured minutes, after a warm-up.
    """
    with asyncio.Runner(loop_factory=_WorkingTimeLoop) as runner:
        return runner.run(_grown(load, minutes))


class _Here(Agent):
    """The product's workflow, with its agent and its endpoint in this event loop."""

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        endpoint = Endpoint("http://policy/v1", temperature=1.0)
        self._parts = endpoint, _Runner(endpoint.app())
        yield


class _Runner:
    """Calls the application as a server would."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def run(self, keywords: Mapping[str, Any]) -> Any:
        headers = [(b"authorization", f"Bearer {keywords['api_key']}".encode())]
        path = urlsplit(keywords["base_url"]).path + "/chat/completions"
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}

        async def post(body: bytes) -> bytes:
            answer = []

            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": body}

            async def send(message: dict[str, Any]) -> None:
                answer.append(message)

            await self._app({**scope, "query_string": b""}, receive, send)
            assert answer[0]["status"] == 200, answer
            return b"".join(message.get("body", b"") for message in answer)

        return await converse(post, keywords["model"], keywords["prompt"], keywords["row"])


class _WorkingTimeLoop(VirtualTimeLoop):
    """An event loop in which waiting takes no time and work takes its CPU time, whatever the other load."""

    def time(self) -> float:
        return super().time() + time.thread_time()


async def _grown(load: Load, minutes: int) -> dict[str, Any]:
    workflow, episodes, process = _Here(agent="here"), Episodes(load), psutil.Process()
    freeze_startup_objects()
    sizes, overheads = [], Counter[float]()
    async with workflow.answering(), episodes.running(workflow):
        await asyncio.sleep(60 * _WARM_MINUTES)
        begin = asyncio.get_running_loop().time()
        num_asked, used = episodes.engine.num_asked, time.process_time()
        for _ in range(minutes):
            await asyncio.sleep(60)
            turns = [turn for turn in episodes.turns if turn.sent >= begin]
            overheads.update(round(turn.overhead_s, 4) for turn in turns)
            episodes.turns.clear()
            sizes.append(process.memory_info().rss / 2**20)
        num_asked, used = episodes.engine.num_asked - num_asked, time.process_time() - used
    return {
        "episodes": load.episodes,
        "minutes": minutes,
        "ended": episodes.num_ended,
        "failed": len(episodes.failed),
        "memory_mib": [round(size) for size in sizes],
        "grown_mib": round(sizes[-1] - sizes[0], 1),
        "turns": num_asked,
        "cpu_ms_per_turn": round(1e3 * used / num_asked, 3),
        "overhead_ms": milliseconds([*overheads.elements()]),
    }
