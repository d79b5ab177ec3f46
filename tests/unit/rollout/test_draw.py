"""Tests of random numbers and of token sampling."""

import math

import numpy as np
import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from services.rollout.engines.torch.decoding import Truncation, draw_tokens, uniforms


def test_numbers_depend_on_seed_and_counter_alone() -> None:
    seeds = np.arange(100, dtype=np.uint64)
    counters = np.arange(100, dtype=np.uint64) % np.uint64(7)
    together = uniforms(seeds, counters)
    one_by_one = [uniforms(seeds[i : i + 1], counters[i : i + 1])[0] for i in range(100)]
    assert together.tolist() == one_by_one


def test_numbers_are_uniform_over_neighbouring_seeds_and_counters() -> None:
    seeds, counters = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300, dtype=np.uint64))
    numbers = uniforms(seeds.ravel(), counters.ravel())
    counts, _ = np.histogram(numbers, bins=50, range=(0, 1))
    expected = len(numbers) / 50
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 90  # chi-square with 49 degrees of freedom, p > 0.0003
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    assert numbers.min() >= 0
    assert numbers.max() < 1


def test_tokens_are_sampled_by_their_probability() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, float("-inf")]).expand(20_000, -1)
    numbers = torch.from_numpy(
        uniforms(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, dtype=np.uint64))
    )
    tokens, logprobs, _, _ = draw_tokens(logits, torch.full((20_000,), 0.5), numbers)
    expected = torch.softmax(logits[0] / 0.5, dim=-1)
    share = torch.bincount(tokens, minlength=5) / 20_000
    torch.testing.assert_close(share, expected, atol=0.01, rtol=0)
    torch.testing.assert_close(logprobs.exp(), expected[tokens])


def test_the_ends_of_the_interval_never_draw_an_impossible_token() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 1.0, float("-inf")]] * 2)
    numbers = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)
    tokens, _, _, _ = draw_tokens(logits, torch.ones(2), numbers)
    assert tokens.tolist() == [1, 2]


@pytest.mark.parametrize("reported", [False, True])
def test_logprobs_are_relative_to_the_allowed_tokens_if_these_are_reported(reported: bool) -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]])).expand(4, -1)
    count = 400
    numbers = torch.linspace(0, 1, count + 1, dtype=torch.float64)[:-1]
    truncation = Truncation(
        top_p=torch.tensor([1.0, 0.6, 1.0, 1.0, 0.8]),
        top_k=torch.tensor([0, 0, 3, 0, 3]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.25, 0.0]),
        reported=torch.tensor([reported]),
    )
    # In the last row, top_p is relative to the top_k tokens: 0.75 is enough of their 0.9.
    for row, allowed in enumerate([{0, 1, 2, 3}, {0, 1}, {0, 1, 2}, {0, 1, 2}, {0, 1}]):
        masking = Truncation(
            top_p=truncation.top_p[row].expand(count),
            top_k=truncation.top_k[row].expand(count),
            min_p=truncation.min_p[row].expand(count),
            reported=truncation.reported.expand(count),
        )
        tokens, logprobs, mask, _ = draw_tokens(
            logits[:1].expand(count, -1), torch.ones(count), numbers, truncation=masking
        )
        assert set(tokens.tolist()) == allowed
        assert mask is not None
        assert set(mask[0].nonzero().flatten().tolist()) == allowed
        total = sum(math.exp(logits[0][token]) for token in allowed) if reported else 1.0
        torch.testing.assert_close(logprobs, logits[0][tokens] - math.log(total))


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 0.8), (5, 0.5), (0, 0.7), (4, 1.0), (7, 0.95)])
def test_tokens_are_allowed_as_transformers_allows_them(top_k: int, top_p: float) -> None:
    logits = 2 * torch.randn(64, 12, generator=torch.Generator().manual_seed(5))
    expected = TopPLogitsWarper(top_p)(None, logits)
    if top_k:
        expected = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, logits))
    _, _, allowed, _ = draw_tokens(
        logits,
        torch.ones(64),
        torch.zeros(64, dtype=torch.float64),
        truncation=Truncation(
            top_p=torch.full((64,), top_p),
            top_k=torch.full((64,), top_k),
            min_p=torch.zeros(64),
            reported=torch.ones(64, dtype=torch.bool),
        ),
    )
    assert allowed is not None
    assert torch.equal(allowed, expected > -torch.inf)
