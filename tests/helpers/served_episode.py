"""Episode with an endpoint over a fake engine that generates given lines."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec
from services.extras.agents.endpoint import Endpoint
from services.rollout.calls.pool import CallPool
from services.rollout.data.prompts import Prompt
from services.rollout.engines.base import GenerationRequest, GenerationResult
from services.rollout.workflows.base import Episode, EpisodeLimits
from services.rollout.workflows.turns import Turn

TOKENIZER = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="bytes"))


class Scripted:
    """Fake engine that generates given lines, each with an end token unless it is aborted or limited.

    The ``cut``-th request is aborted after three tokens.
    """

    def __init__(self, lines: Sequence[str], *, cut: int | None = None) -> None:
        self.lines = [(*TOKENIZER.encode(line), TOKENIZER.eos_id) for line in lines]
        self.requests: list[GenerationRequest] = []
        self.cut = cut

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        line = self.lines[0] if self.cut == len(self.requests) else self.lines.pop(0)
        tokens = line[:3] if self.cut == len(self.requests) else line[: request.max_tokens]
        for stop in request.stop_texts:
            text = TOKENIZER.decode(tokens)
            if stop in text:
                tokens = tokens[: text.index(stop) + len(stop)]
        is_whole = tokens == line or bool(request.stop_texts)
        version = len(self.requests)
        return GenerationResult(
            token_ids=tokens,
            logprobs=tuple(-0.25 * version for _ in tokens),
            version_runs=((version, len(tokens)),),
            finish_reason="aborted"
            if self.cut == len(self.requests)
            else ("stop" if is_whole else "length"),
        )


def make_episode(
    engine: Any, *, recorded: Sequence[Turn] = (), room: int = 1000, temperature: float = 1.0
) -> Episode:
    return Episode(
        Prompt(token_ids=(5, 6), text="p", answer=None, row={}, data_source="test"),
        EpisodeLimits(
            seed=1,
            temperature=temperature,
            max_response_tokens=room,
            max_tokens=10_000,
            stop_texts=(),
        ),
        engine=engine,
        tokenizer=TOKENIZER,
        calls=CallPool(1),
        request_id="r",
        recorded=recorded,
    )


@asynccontextmanager
async def client_of(episode: Episode) -> AsyncIterator[httpx.AsyncClient]:
    """Yields an HTTP client with the episode's key, without a socket."""
    endpoint = Endpoint("http://policy/v1", temperature=1.0)
    async with endpoint.open(episode) as access:
        transport = httpx.ASGITransport(endpoint.app())
        async with httpx.AsyncClient(
            transport=transport,
            base_url="http://policy/v1",
            headers={"Authorization": f"Bearer {access.api_key}"},
        ) as client:
            yield client


async def chat(client: httpx.AsyncClient, *messages: Any, **more: Any) -> Any:
    body = {"model": "policy", "messages": list(messages), **more}
    response = await client.post("/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
