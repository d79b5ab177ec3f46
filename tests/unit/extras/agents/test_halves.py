"""Tests of the parent agent and its helpers of `examples/halves`."""

import asyncio
from dataclasses import replace
from pathlib import Path

from services.common.callables import load_callable
from services.common.runspec.loader import load_spec
from services.extras.agents.agent import Agent
from services.rollout.calls.outside import AddressPolicy
from services.rollout.calls.pool import CallPool
from services.rollout.engines.base import GenerationRequest, GenerationResult
from services.rollout.workflows.base import WorkflowResources
from services.rollout.workflows.turns import trained_once
from tests.helpers.preflight import check
from tests.helpers.served_episode import TOKENIZER, make_episode

EXAMPLE = Path(__file__).parents[4] / "examples" / "halves"


class Largest:
    """Fake engine that answers with the largest digit of the request."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        digits = TOKENIZER.decode(request.context_ids).partition("user: ")[2].partition("=")[0]
        tokens = (*TOKENIZER.encode(max(digits)), TOKENIZER.eos_id)
        return GenerationResult(
            token_ids=tokens,
            logprobs=(-1.0,) * len(tokens),
            version_runs=((0, len(tokens)),),
            finish_reason="stop",
        )


async def test_helpers_and_parent_are_three_sequences_of_one_sample() -> None:
    workflow = Agent(agent=f"{EXAMPLE / 'halves.py'}:solve", train="all")
    rows = load_callable(f"{EXAMPLE / 'halves.py'}:heldout")()[:4]
    episodes = [make_episode(Largest()) for _ in rows]
    for episode, row in zip(episodes, rows, strict=True):
        episode.prompt = replace(episode.prompt, text=row["prompt"])
    async with workflow.serving(
        WorkflowResources(calls=CallPool(1), reach=AddressPolicy(["127.0.0.1"]))
    ):
        await asyncio.gather(*[workflow.run(episode) for episode in episodes])
    for episode, row in zip(episodes, rows, strict=True):
        assert episode.response_text == row["answer"]
        assert len(trained_once(episode.sequences)) == 3


def test_its_specification_is_valid_and_trains_all_conversations() -> None:
    spec = load_spec(EXAMPLE / "halves.yaml")
    check(spec)
    assert spec.rollout.workflow_arguments["train"] == "all"


def test_held_out_prompts_are_not_trained() -> None:
    train, heldout = (
        {row["prompt"] for row in load_callable(f"{EXAMPLE / 'halves.py'}:{split}")()}
        for split in ("train", "heldout")
    )
    assert len(heldout) == 256
    assert not train & heldout
