"""The images of all agents of an endpoint have a bounded amount of memory after decoding."""

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from PIL import Image

from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.data import DataSpec
from services.common.runspec.run import ModelSpec
from services.common.security.confinement import CodePolicy
from services.extras.agents import endpoint as endpoint_module
from services.extras.agents import images as images_module
from services.extras.agents.endpoint import Endpoint
from services.rollout.calls.outside import AddressPolicy
from services.rollout.data.images import ImageReader
from services.rollout.workflows.base import Episode
from tests.helpers.engines import until
from tests.helpers.served_episode import Scripted, make_episode

MODEL = ModelSpec(path="tiny:qwen2_5_vl-0.6m", tokenizer="bytes", images=True)
TOKENIZER = load_tokenizer(MODEL)
SIDE = 64
KEPT_BYTES = SIDE * SIDE * 24
"""Least memory of the pixels of an image; its places are a few bytes more."""
NEEDED_BYTES = SIDE * SIDE * 32


def seeing(num_replies: int) -> Episode:
    episode = make_episode(Scripted(["a"] * num_replies))
    data = DataSpec(
        train={"source": "jsonl", "path": "x"},  # type: ignore[arg-type]
        answer_column=None,
        chat_template=True,
        max_image_pixels=SIDE * SIDE,
    )
    episode.tokenizer = TOKENIZER
    episode.images = ImageReader(
        MODEL, data, TOKENIZER, allowance=CodePolicy(), reach=AddressPolicy()
    )
    return episode


def body(number: int, *, num_images: int = 1) -> dict[str, Any]:
    """Returns a chat with images of a few hundred bytes, which differ from those of other numbers."""
    buffer = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), (number, 0, 0)).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}] * num_images
    content = [*parts, {"type": "text", "text": "?"}]
    return {"model": "policy", "messages": [{"role": "user", "content": content}]}


Chat = Callable[[dict[str, Any]], Any]


@asynccontextmanager
async def served(
    monkeypatch: pytest.MonkeyPatch, *, max_bytes: int, max_episode_bytes: int | None = None
) -> AsyncIterator[Endpoint]:
    monkeypatch.setattr(endpoint_module, "host_bytes_here", lambda: max_bytes * 4)
    async with (
        asyncio.timeout(120),
        Endpoint.serve("127.0.0.1:0", host="127.0.0.1", temperature=1.0) as endpoint,
    ):
        memory = endpoint._image_memory
        assert memory.max_bytes == max_bytes
        memory.max_episode_bytes = max_bytes if max_episode_bytes is None else max_episode_bytes
        yield endpoint
        assert memory._free_bytes == max_bytes, "memory is given back"


@asynccontextmanager
async def agent(endpoint: Endpoint, num_replies: int = 1) -> AsyncIterator[Chat]:
    """Yields a function that sends a chat of a new episode."""
    async with endpoint.open(seeing(num_replies)) as access:
        headers = {"Authorization": f"Bearer {access.api_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=100) as client:
            yield lambda chat: client.post(f"{access.base_url}/chat/completions", json=chat)


async def test_images_wait_until_those_of_another_episode_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        served(monkeypatch, max_bytes=KEPT_BYTES + NEEDED_BYTES) as endpoint,
        agent(endpoint) as second,
    ):
        async with agent(endpoint) as first:
            assert (await first(body(1))).status_code == 200
            waiting = asyncio.ensure_future(second(body(2)))
            await until(endpoint._image_memory._turn.locked)
        assert (await waiting).status_code == 200


async def test_images_that_find_no_memory_in_time_are_to_be_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(images_module, "_ROOM_S", 0.01)
    async with (
        served(monkeypatch, max_bytes=KEPT_BYTES + NEEDED_BYTES) as endpoint,
        agent(endpoint) as second,
    ):
        async with agent(endpoint) as first:
            assert (await first(body(1))).status_code == 200
            refused = await second(body(2))
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "images_wait"
        assert (await second(body(2))).status_code == 200


async def test_one_episode_cannot_take_the_memory_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounds = {"max_bytes": 8 * NEEDED_BYTES, "max_episode_bytes": KEPT_BYTES + NEEDED_BYTES // 2}
    async with (
        served(monkeypatch, **bounds) as endpoint,
        agent(endpoint, 2) as greedy,
        agent(endpoint) as other,
    ):
        assert (await greedy(body(1))).status_code == 200
        for number in (2, 3):
            refused = await greedy(body(number))
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "too_many_images"
        assert (await other(body(4))).status_code == 200


async def test_requests_of_one_episode_at_once_share_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounds = {"max_bytes": 8 * NEEDED_BYTES, "max_episode_bytes": 2 * NEEDED_BYTES}
    async with served(monkeypatch, **bounds) as endpoint, agent(endpoint, 4) as send:
        answers = await asyncio.gather(*(send(body(number)) for number in range(4)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 400, 400]


async def test_many_requests_at_once_never_have_more_than_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most_taken = 0
    async with served(monkeypatch, max_bytes=4 * NEEDED_BYTES) as endpoint:
        memory = endpoint._image_memory
        take = memory.take

        async def watched(num_bytes: int) -> None:
            nonlocal most_taken
            await take(num_bytes)
            most_taken = max(most_taken, memory.max_bytes - memory._free_bytes)

        monkeypatch.setattr(memory, "take", watched)

        async def chat(number: int) -> int:
            async with agent(endpoint) as send:
                return int((await send(body(number, num_images=2))).status_code)

        assert await asyncio.gather(*map(chat, range(24))) == [200] * 24
    assert 2 * NEEDED_BYTES <= most_taken <= 4 * NEEDED_BYTES


async def test_refused_and_counted_images_keep_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch, max_bytes=2 * NEEDED_BYTES) as endpoint, agent(endpoint) as send:
        broken = body(1)
        broken["messages"][0]["content"][0]["image_url"]["url"] = "data:image/png;base64,AAAA"
        for _ in range(3):
            assert (await send(broken)).status_code == 400
        assert endpoint._image_memory._free_bytes == 2 * NEEDED_BYTES
        (session,) = endpoint._sessions.values()
        await session.record.count(endpoint_module.parse_chat(_encoded(body(2))))
        assert endpoint._image_memory._free_bytes == 2 * NEEDED_BYTES


async def test_images_that_are_read_after_their_episode_has_ended_keep_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(monkeypatch, max_bytes=2 * NEEDED_BYTES) as endpoint, agent(endpoint):
        (session,) = endpoint._sessions.values()
        session.close()
        await session.record.chat(endpoint_module.parse_chat(_encoded(body(1))))
        assert endpoint._image_memory._free_bytes == 2 * NEEDED_BYTES


def _encoded(chat: dict[str, Any]) -> bytes:
    return httpx.Request("POST", "http://x", json=chat).content
