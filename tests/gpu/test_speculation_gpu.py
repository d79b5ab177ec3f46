"""Speculation in vLLM on a GPU: recorded logprobs, aborted and resumed requests, and weight updates."""

import asyncio
import importlib.util
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from services.common.runspec.rollout import SpeculationSpec
from services.rollout.engines.base import Engine, GenerationResult
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig
from services.rollout.engines.speculation import propose_ngram
from tests.helpers.engines import begun, made, request, running, until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
CONFIG = Qwen2Config(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    initializer_range=0.05,
    architectures=["Qwen2ForCausalLM"],
)
PROMPT = tuple(3 + (7 * i) % 250 for i in range(100))


async def adopt(engine: Engine, version: int) -> None:
    """Adopts a model that often draws the last token again, so that proposals are accepted."""
    torch.manual_seed(version)
    model = Qwen2ForCausalLM(CONFIG).to(DEVICE, DTYPE)
    model.model.embed_tokens.weight.data.mul_(6)
    model.model.norm.weight.data.fill_(0.2)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    await engine.adopt_weights(version, weights)


async def assert_scored(
    engine: Engine, context: tuple[int, ...], results: list[GenerationResult]
) -> None:
    """Checks logprobs against those that the engine computes without speculation."""
    expected = []
    for result in results:
        expected += (await engine.score(context + result.token_ids))[len(context) - 1 :]
    got = torch.tensor([logprob for result in results for logprob in result.logprobs])
    difference = (got - torch.tensor(expected)).abs()
    # In bfloat16, passes over one token and over several tokens round products differently.
    assert difference.mean() <= 0.02
    assert difference.max() <= 0.5


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "graphs"])
def test_logprobs_with_proposals_are_those_of_the_policy(is_eager: bool) -> None:
    asyncio.run(check_logprobs(is_eager=is_eager))


async def check_logprobs(*, is_eager: bool) -> None:
    engine_config = EngineConfig(
        config=CONFIG,
        dtype=DTYPE,
        device=DEVICE,
        max_running=8,
        arguments={"max_model_len": 512, "gpu_memory_utilization": 0.3, "enforce_eager": is_eager},
        speculation=SpeculationSpec(tokens=3, prompt_lookup_min=1),
    )
    engine = make_engine("vllm", engine_config)
    async with asyncio.timeout(500), running(engine):
        await engine.wait_ready()
        await adopt(engine, 0)
        drafts = engine.stats().drafts
        assert drafts is not None
        for temperature in (0.0, 1.0):
            results = await asyncio.gather(
                *[
                    engine.generate(
                        request(
                            f"{temperature} {seed}",
                            PROMPT,
                            seed=seed,
                            max_tokens=200,
                            temperature=temperature,
                        )
                    )
                    for seed in range(4)
                ]
            )
            await assert_scored(engine, PROMPT, results)
        totals = engine.stats().drafts
        assert totals is not None
        assert totals.num_tokens > totals.num_accepted > drafts.num_accepted

        (task,) = begun(engine, [PROMPT], max_tokens=300)
        await until(made(engine, 10), poll_s=0.001)
        await engine.abort()
        head = await task
        assert 10 <= len(head.token_ids) < 300
        await assert_scored(engine, PROMPT, [head])
        await adopt(engine, 1)
        context = PROMPT + head.token_ids
        rest = request("rest", context, max_tokens=100, draw_offset=len(head.token_ids))
        tail = await engine.generate(rest)
        assert tail.version_runs == ((1, 100),)
        await assert_scored(engine, context, [tail])


def test_proposals_on_the_gpu_are_those_of_the_torch_engine() -> None:
    from services.extras.vllm import versions

    if not versions.ADDS_NGRAMS:
        pytest.skip("this vLLM proposes by itself")
    from services.extras.vllm.ngram_worker import NgramProposer  # needs Triton

    drawn = random.Random(0)
    for _ in range(40):
        shortest = drawn.randint(1, 3)
        most, longest, num_slots = drawn.randint(1, 5), drawn.randint(shortest, 5), 9
        proposer = NgramProposer(
            SimpleNamespace(
                speculative_config=SimpleNamespace(
                    num_speculative_tokens=most,
                    prompt_lookup_min=shortest,
                    prompt_lookup_max=longest,
                ),
                scheduler_config=SimpleNamespace(max_num_seqs=num_slots),
            ),
            DEVICE,
        )
        tokens = torch.randint(0, drawn.choice([2, 9, 60]), (num_slots, 3000), dtype=torch.int32)
        lengths = [drawn.randint(1, 3000) for _ in range(num_slots)]
        proposer.req_states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=tokens.to(DEVICE)),
            total_len=SimpleNamespace(gpu=torch.tensor(lengths, dtype=torch.int32, device=DEVICE)),
        )
        slots = drawn.sample(range(num_slots), 5)
        batch = SimpleNamespace(
            num_reqs=len(slots), idx_mapping=torch.tensor(slots, dtype=torch.int32, device=DEVICE)
        )
        expected = [
            propose_ngram(
                tokens[slot, : lengths[slot]].long().numpy(),
                limit=most,
                shortest=shortest,
                longest=longest,
            )
            for slot in slots
        ]
        # The second step verifies the proposals of the first one: it accepts none, or all.
        for accepted in (0, most):
            counts = torch.full((len(slots),), 1 + accepted, dtype=torch.int32, device=DEVICE)
            steps = (batch, None, None, None, None, counts, most + 1 - counts)
            proposals = proposer.propose(*steps).tolist()
            for slot, proposal, expected_proposal in zip(slots, proposals, expected, strict=True):
                assert proposal == (
                    expected_proposal or [int(tokens[slot, lengths[slot] - 1])] * most
                )
        count = sum(map(bool, expected))
        assert proposer.totals.tolist() == [count, count * most, count * most]
