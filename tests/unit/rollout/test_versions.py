"""Tests of per-token weight versions with a model whose output depends on its version."""

from dataclasses import replace

import pytest

from services.rollout.sampling.sample import Sample
from tests.helpers.engines import reference_logprobs, weights_of
from tests.unit.rollout.sampling.test_sampler import (
    LONG,
    MemoryCache,
    ScoreBy,
    assignment,
    sampling,
)

GROUPS = [assignment(f"g{index}", index % 2, seeds=(index, 50 + index, 9)) for index in range(3)]


def check_every_token(sample: Sample) -> int:
    """Compares each logprob with that of the token's reported version; returns the number of versions."""
    tokens = tuple(sample.response_ids)
    logprobs = [value for turn in sample.turns for value in turn.logprobs]
    position = 0
    for version, count in sample.version_runs:
        expected = reference_logprobs(version, sample.prompt_ids, tokens)[
            position : position + count
        ]
        assert expected.tolist() == pytest.approx(logprobs[position : position + count], abs=2e-4)
        position += count
    assert position == len(tokens)
    return len(sample.sampled_versions)


@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_every_token_was_sampled_by_the_version_that_it_claims(seed: int) -> None:
    """Segments have two tokens; each attempt uses a new replica, and every second one new weights."""
    groups = [replace(group, seeds=tuple(100 * seed + s for s in group.seeds)) for group in GROUPS]
    cache = MemoryCache()
    published: dict[str, list[Sample]] = {}
    for attempt in range(1, 60):
        todo = [replace(g, attempt=attempt) for g in groups if g.group_id not in published]
        if not todo:
            break
        async with sampling(
            ScoreBy(lambda _: 1.0), cache=cache, segment_tokens=2, max_segments=100, **LONG
        ) as (sampler, outcome, engine):
            await engine.adopt_weights(attempt // 2, weights_of(attempt // 2))
            sampler.start(todo)
            await outcome.wait_for(len(todo))
            published |= outcome.published
    assert len(published) == len(groups)
    versions = [check_every_token(sample) for samples in published.values() for sample in samples]
    assert sum(count > 1 for count in versions) >= 0.3 * len(versions)
