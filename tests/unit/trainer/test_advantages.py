"""Tests that advantages equal the golden vectors."""

import statistics

import pytest
import torch
from torch import Tensor

from services.trainer.algorithm import advantages, estimators
from services.trainer.algorithm.estimators import ScoredBatch
from services.trainer.batch.segments import Segments
from tests.unit.trainer.vectors import assert_close, case, flat, groups_of, mask_of, segments_of


def test_grpo_and_dr_grpo_match_with_zero_for_singletons_and_equal_scores() -> None:
    for name, divide in (("grpo_norm_std", True), ("dr_grpo_no_std", False)):
        inputs, expected = case("advantages_group", name)
        result = advantages.grpo(
            flat(inputs["scores"]), groups_of(inputs["groups"]), divide_by_std=divide
        )
        assert_close(result, expected["seq_advantage"])


@pytest.mark.parametrize(
    "estimate",
    [
        advantages.grpo,
        advantages.rloo,
        advantages.maxrl,
        advantages.pass_at_k,
        advantages.group_baseline,
        lambda scores, groups: advantages.opo(scores, groups, torch.ones_like(scores)),
        lambda scores, groups: advantages.gdpo({"term": scores}, groups, weights={"term": 1.0}),
        lambda scores, groups: advantages.whiten(scores, groups == 0),
        lambda scores, groups: advantages.without_rounding(scores - 0.5, scores),
    ],
)
def test_a_score_that_is_not_finite_never_counts_as_no_advantage(estimate) -> None:
    scores = torch.tensor([1.0, 0.0, torch.nan, 0.0], dtype=torch.float64)
    assert estimate(scores, torch.zeros(4, dtype=torch.int64))[2].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_give_exactly_nothing(dtype: torch.dtype) -> None:
    scores = torch.tensor([0.1] * 7 + [1e6 + 0.1] * 3, dtype=dtype)
    groups = torch.tensor([0] * 7 + [1] * 3)
    for result in (
        advantages.grpo(scores, groups),
        advantages.rloo(scores, groups),
        advantages.group_baseline(scores, groups),
        advantages.maxrl(scores, groups),
        advantages.pass_at_k(scores, groups),
        advantages.opo(scores, groups, torch.arange(2, 12)),
        advantages.gdpo({"right": scores}, groups, weights={"right": 0.7}),
        advantages.whiten(scores[:7], torch.ones(7, dtype=torch.bool)),
    ):
        assert not result.any()


def test_a_group_of_equal_terms_gets_exactly_nothing_among_others() -> None:
    terms = {
        "right": torch.tensor([0.1] * 7 + [0.3, 0.9, 0.7], dtype=torch.float64),
        "brief": torch.tensor([0.7] * 7 + [0.2, 0.1, 0.4], dtype=torch.float64),
    }
    groups = torch.tensor([0] * 7 + [1] * 3)
    result = advantages.gdpo(terms, groups, weights={"right": 1.0, "brief": 0.3})
    assert not result[:7].any()
    assert bool((result[7:] != 0).all())


def test_terms_that_cancel_give_exactly_nothing() -> None:
    right = torch.tensor([1.0, 0.0, 0.0, 0.3, 0.9, 0.7], dtype=torch.float64)
    terms = {"right": right, "brief": torch.where(torch.arange(6) < 3, 1.0 - right, right)}
    groups = torch.tensor([0] * 3 + [1] * 3)
    result = advantages.gdpo(terms, groups, weights={"right": 1.0, "brief": 1.0})
    assert not result[:3].any()
    assert bool((result[3:] != 0).all())


def test_a_group_of_equal_scores_is_whitened_to_exactly_nothing_if_the_mean_is_only_rounded() -> (
    None
):
    scores = torch.tensor([1.0, 0.0, 0.0, 0.7, 0.7, 0.7], dtype=torch.float64)
    centred = advantages.group_baseline(scores, torch.tensor([0] * 3 + [1] * 3))
    assert centred.mean() != 0
    result = _whitened(centred, torch.ones(6, dtype=torch.bool))
    assert not result[3:].any()
    assert bool((result[:3] != 0).all())


def test_token_rewards_with_the_greedy_score_as_sum_give_remax_exactly_nothing() -> None:
    earned = torch.tensor([0.1, 0.2, 0.4, 0.0], dtype=torch.float64)
    batch = ScoredBatch(
        scores=torch.zeros(1),
        groups=torch.zeros(1, dtype=torch.int64),
        lengths=torch.ones(1),
        greedy_scores=torch.tensor([0.7], dtype=torch.float64),
        prompts=torch.zeros(1, dtype=torch.int64),
        terms={},
        places=torch.zeros(1, dtype=torch.int64),
        segments=Segments.from_lengths(torch.tensor([4])),
        rewards=earned,
        mask=torch.ones(4, dtype=torch.bool),
        trained=torch.ones(4, dtype=torch.bool),
        values=None,
        sum_over_ranks=lambda value: value,
    )
    result = estimators.remax(batch, gamma=1.0)
    assert result[0] == 0
    torch.testing.assert_close(result, torch.tensor([0.0, -0.1, -0.3, -0.7]).double())


def test_rloo_matches() -> None:
    inputs, expected = case("advantages_group", "rloo")
    result = advantages.rloo(flat(inputs["scores"]), groups_of(inputs["groups"]))
    assert_close(result, expected["seq_advantage"])


def test_opo_matches() -> None:
    inputs, expected = case("advantages_group", "opo_length_weighted_baseline")
    result = advantages.opo(
        flat(inputs["scores"]), groups_of(inputs["groups"]), flat(inputs["lengths"])
    )
    assert_close(result, expected["seq_advantage"])


def test_pass_at_k_rewards_only_a_unique_best_member() -> None:
    scores = torch.tensor([0.0, 1.0, 0.5, 1.0, 1.0, 3.0], dtype=torch.float64)
    result = advantages.pass_at_k(scores, torch.tensor([0, 0, 0, 1, 1, 2]))
    std = scores[:3].std()
    assert_close(result, [0.0, 0.5 / (std.item() + 1e-6), 0.0, 0.0, 0.0, 0.0])


def _whitened(values: Tensor, mask: Tensor) -> Tensor:
    return advantages.whiten(values, mask)


def test_reinforce_pp_matches() -> None:
    inputs, expected = case("advantages_token", "reinforce_plus_plus_gamma_1.0")
    mask, segments = mask_of(inputs["response_mask"]), segments_of(inputs["response_mask"])
    rewards = flat(inputs["token_level_rewards"])
    returns = advantages.returns_to_go(rewards, mask, segments, gamma=1.0)
    assert_close(returns, expected["returns"], mask)
    assert_close(_whitened(returns, mask), expected["advantages"])


def test_reinforce_pp_baseline_matches() -> None:
    inputs, expected = case("advantages_token", "reinforce_plus_plus_baseline")
    mask, segments = mask_of(inputs["response_mask"]), segments_of(inputs["response_mask"])
    scores = segments.sum(flat(inputs["token_level_rewards"]))
    centred = advantages.group_baseline(scores, groups_of(inputs["groups"]))
    assert_close(_whitened(segments.expand(centred), mask), expected["advantages"])


def test_remax_matches() -> None:
    inputs, expected = case("advantages_token", "remax")
    mask, segments = mask_of(inputs["response_mask"]), segments_of(inputs["response_mask"])
    returns = advantages.returns_to_go(
        flat(inputs["token_level_rewards"]), mask, segments, gamma=1.0
    )
    assert_close(returns, expected["returns"])
    baseline = segments.expand(flat(inputs["reward_baselines"]))
    assert_close(returns - baseline, expected["advantages"], mask)


def test_gae_matches_and_ignores_values_outside_the_mask() -> None:
    inputs, expected = case("advantages_token", "gae_1.0_1.0")
    mask, segments = mask_of(inputs["response_mask"]), segments_of(inputs["response_mask"])
    raw, returns = advantages.gae(
        flat(inputs["token_level_rewards"]),
        flat(inputs["values"]),
        mask,
        segments,
        gamma=inputs["gamma"],
        decay=inputs["lam"],
    )
    assert_close(raw, expected["advantages_raw"], mask)
    assert_close(returns, expected["returns"], mask)
    assert_close(_whitened(raw, mask), expected["advantages_whitened"])


def test_gae_discounts_like_its_definition() -> None:
    rewards, values = flat([0.0, 0.0, 1.0]), flat([0.1, 0.2, 0.3])
    result, _ = advantages.gae(
        rewards,
        values,
        torch.ones(3, dtype=torch.bool),
        Segments.from_lengths(torch.tensor([3])),
        gamma=0.9,
        decay=0.8,
    )
    delta = [0.9 * 0.2 - 0.1, 0.9 * 0.3 - 0.2, 1.0 - 0.3]
    last, middle = delta[2], delta[1] + 0.72 * delta[2]
    assert_close(result, [delta[0] + 0.72 * middle, middle, last])


@pytest.mark.parametrize("offset", [0.0, 1e7])
def test_parts_of_a_batch_are_whitened_as_the_whole(offset: float) -> None:
    values, mask = torch.randn(20, dtype=torch.float64) * 0.1 + offset, torch.rand(20) > 0.3
    values[~mask] = torch.nan
    whole = _whitened(values, mask)
    assert whole[mask].mean().item() == pytest.approx(0.0, abs=1e-6)
    assert whole[mask].var().item() == pytest.approx(1.0, rel=1e-5)

    def sum_over_ranks(value: Tensor) -> Tensor:
        selected = values[mask]
        if value.ndim:
            return torch.stack([mask.sum().double(), selected.sum()])
        return (selected - selected.mean()).square().sum()

    first_half = advantages.whiten(values[:7], mask[:7], sum_over_ranks=sum_over_ranks)
    torch.testing.assert_close(first_half, whole[:7])


def test_gdpo_normalizes_each_term_and_then_the_batch() -> None:
    """Compares with equations 4 to 6 of arXiv:2601.05242; one term is constant in the second group."""
    groups, weights = [0, 0, 0, 1, 1, 1], {"correct": 1.0, "format": 0.5}
    terms = {"correct": [0.0, 1.0, 1.0, 0.0, 0.0, 1.0], "format": [3.0, 0.0, 9.0, 2.0, 2.0, 2.0]}
    sums = [0.0] * 6
    for name, weight in weights.items():
        for group in (0, 1):
            members = [row for row in range(6) if groups[row] == group]
            mean = statistics.mean(terms[name][row] for row in members)
            deviation = statistics.stdev(terms[name][row] for row in members)
            for row in members:
                sums[row] += weight * (terms[name][row] - mean) / (deviation + 1e-6)
    mean, deviation = statistics.mean(sums), statistics.stdev(sums)
    expected = [(total - mean) / (deviation + 1e-6) for total in sums]
    tensors = {name: torch.tensor(row, dtype=torch.float64) for name, row in terms.items()}
    actual = advantages.gdpo(tensors, torch.tensor(groups), weights=weights)
    assert actual.tolist() == pytest.approx(expected, abs=1e-9)


def test_the_overlong_penalty_matches() -> None:
    inputs, expected = case("dapo", "overlong_soft_penalty")
    penalty = advantages.overlong_penalty(
        torch.tensor(inputs["lengths"]),
        max_tokens=inputs["max_len"],
        buffer_tokens=inputs["buffer"],
        factor=inputs["factor"],
    )
    torch.testing.assert_close(
        penalty, torch.tensor(expected["penalty"]).double(), atol=1e-7, rtol=1e-6
    )


def test_length_adaptive_gae_decays_by_length_and_leaves_the_targets_alone() -> None:
    lengths, alpha = torch.tensor([3, 40]), 0.05
    segments = Segments.from_lengths(lengths)
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(43, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.ones(43, dtype=torch.bool)
    batch = ScoredBatch(
        scores=torch.zeros(2),
        groups=torch.zeros(2, dtype=torch.int64),
        lengths=lengths.double(),
        greedy_scores=torch.zeros(1),
        prompts=torch.zeros(2, dtype=torch.int64),
        terms={},
        places=torch.arange(2),
        segments=segments,
        rewards=rewards,
        mask=mask,
        trained=mask,
        values=values,
        sum_over_ranks=lambda value: value,
    )
    actual, targets = estimators.gae(batch, gamma=1.0, gae_lambda=1.0, length_adaptive=alpha)

    targets_by_hand = torch.empty(43, dtype=torch.float64)
    # Lambda is max(0, 1 - 1 / (0.05 * length)): 0 for 3 tokens, and 0.5 for 40.
    for start, end, decay in ((0, 3, 0.0), (3, 43, 0.5)):
        state, following = 0.0, 0.0
        for t in reversed(range(start, end)):
            state = float(rewards[t]) + following - float(values[t]) + decay * state
            following = float(values[t])
            targets_by_hand[t] = state
    torch.testing.assert_close(actual, advantages.whiten(targets_by_hand, mask))
    returns = advantages.returns_to_go(rewards, mask, segments, gamma=1.0)
    torch.testing.assert_close(targets, returns)


def test_maxrl_divides_by_the_mean_and_skips_groups_without_success() -> None:
    scores = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    actual = advantages.maxrl(scores, groups)
    assert actual.tolist() == [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
