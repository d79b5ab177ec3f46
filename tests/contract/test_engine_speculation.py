"""Additional contract of engines with speculation."""

import asyncio

import pytest
import torch

from tests.contract.checks import PROMPT, TOLERANCE, adopt
from tests.contract.engines import SPECULATING_ENGINES, OpenEngine, expected_logprobs
from tests.helpers.engines import request

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


@pytest.mark.parametrize("open_engine", SPECULATING_ENGINES)
async def test_accepted_proposals_have_the_logprobs_of_the_policy(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        await adopt(engine, 0)
        # Greedy tokens of a random model soon repeat.
        greedy = await engine.generate(request("g", PROMPT, temperature=0.0, max_tokens=200))
        context = PROMPT + greedy.token_ids
        for temperature in (0.0, 0.05, 0.7):
            before = engine.stats().drafts
            results = await asyncio.gather(
                *[
                    engine.generate(
                        request(
                            f"{temperature} {seed}",
                            context,
                            seed=seed,
                            max_tokens=120,
                            temperature=temperature,
                        )
                    )
                    for seed in range(4)
                ]
            )
            drafts = engine.stats().drafts
            if temperature == 0:  # the engine may later end proposals that save no time
                assert drafts.num_tokens > before.num_tokens
                assert drafts.num_accepted > before.num_accepted
            for result in results:
                assert len(result.token_ids) == 120
                scale = temperature or 1.0
                expected = expected_logprobs(0, context, result.token_ids, temperature=scale)
                got = torch.tensor(result.logprobs)
                # A low temperature magnifies differences of logits.
                torch.testing.assert_close(got, expected, atol=TOLERANCE / scale, rtol=0)
