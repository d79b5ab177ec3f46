"""The same episodes in virtual time, without sockets: what the endpoint keeps of what has ended."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import psutil

from bench.rollout.served_episodes import Episodes, Load
from bench.rollout.tool_agent import converse
from services.rollout.engines.virtual_time import VirtualTimeLoop
from services.rollout.openai.agent import Agent
from services.rollout.openai.endpoint import Endpoint

_WARM_MINUTES = 5


def hour(load: Load, *, minutes: int) -> dict[str, Any]:
    """Run episodes on a loop whose time jumps; memory is in MiB, after a collection."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
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


async def _grown(load: Load, minutes: int) -> dict[str, Any]:
    workflow, episodes, process = _Here(agent="here"), Episodes(load), psutil.Process()
    sizes = []
    async with workflow.answering(), episodes.running(workflow):
        await asyncio.sleep(60)
        num_asked, used = episodes.engine.num_asked, time.process_time()
        for _ in range(minutes):
            await asyncio.sleep(60)
            episodes.asked.clear()
            gc.collect()
            sizes.append(process.memory_info().rss / 2**20)
    num_asked, used = episodes.engine.num_asked - num_asked, time.process_time() - used
    warm = sizes[min(_WARM_MINUTES, minutes) - 1 :]
    return {
        "episodes": load.episodes,
        "minutes": minutes,
        "ended": episodes.num_ended,
        "failed": len(episodes.failed),
        "memory_mib": [round(size) for size in sizes],
        "grown_mib": round(warm[-1] - warm[0], 1),
        "turns": num_asked,
        "cpu_ms_per_turn": round(1e3 * used / num_asked, 3),
    }
