"""Tests that the record of an episode equals the engine's responses to the same requests."""

from typing import Any

from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec
from services.extras.agents.trained import TrainedConversations
from services.rollout.calls.pool import CallPool
from services.rollout.data.prompts import Prompt
from services.rollout.engines.base import GenerationRequest, GenerationResult
from services.rollout.workflows.base import Episode, EpisodeLimits
from services.rollout.workflows.turns import Conversation, token_ids, trained_once
from tests.helpers.engines import make_engine, running
from tests.helpers.served_episode import client_of

TOKENIZER = load_tokenizer(
    ModelSpec(path="tiny:qwen2-0.4m", tokenizer="chars:0123456789=abcdefghijk")
)


class RequestRecorder:
    """Engine wrapper that records requests."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        return await self.inner.generate(request)  # type: ignore[no-any-return]


async def complete(client: Any, text: str) -> str:
    body = {"model": "policy", "prompt": text, "max_tokens": 5}
    answer = (await client.post("/completions", json=body)).json()["choices"][0]
    return text + answer["text"]


def sampled(conversations: list[Conversation]) -> dict[tuple[int, ...], Any]:
    """Returns tokens, logprobs and versions of each trained turn, by the tokens before it."""
    result = {}
    for conversation in conversations:
        for index, turn in enumerate(conversation):
            if turn.is_sampled:
                before = token_ids(conversation[:index])
                result[before] = (turn.token_ids, turn.logprobs, turn.version_runs)
    return result


async def test_tokens_logprobs_and_versions_of_branches_are_those_of_a_replay() -> None:
    async with running(engine := make_engine()):
        recorder = RequestRecorder(engine)
        episode = Episode(
            Prompt(token_ids=(), text="", answer=None, row={}, data_source="test"),
            EpisodeLimits(
                seed=3, temperature=1.0, max_response_tokens=60, max_tokens=100, stop_texts=()
            ),
            engine=recorder,  # type: ignore[arg-type]
            tokenizer=TOKENIZER,
            calls=CallPool(1),
            request_id="r",
        )
        async with client_of(episode) as client:
            first = await complete(client, "12=")
            await complete(client, first + "a")
            await complete(client, first + "b")
            await complete(client, "34=")
        await TrainedConversations("all").choose(episode)
        recorded = sampled(trained_once(episode.sequences))
        replayed = {}
        for request in recorder.requests:
            result = await engine.generate(request)
            replayed[request.context_ids] = (
                result.token_ids,
                result.logprobs,
                result.version_runs,
            )
    assert len(recorder.requests) == 4
    assert recorded == replayed
