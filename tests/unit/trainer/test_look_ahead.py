"""Tests that weights and denominators of a loss are those of the whole batch for any split of the batch."""

from typing import Any

import pytest
import torch

from services.trainer.algorithm import correction
from services.trainer.batch.segments import Segments
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand
from tests.helpers.batches import policy_of, random_queue, rank_of, spec_of

_PLAIN = {"correction": "decoupled", "dual_clip": None}
_REJECTION = [{"level": "token", "statistic": "k1", "lower": 0.9, "upper": 1.2}]


def _trained(algorithm: dict[str, Any], noise: torch.Tensor, **trainer: Any) -> dict[str, float]:
    """Returns the metrics of a step on a batch whose rollout logprobs are changed by ``noise``."""
    spec = spec_of(algorithm={**_PLAIN, **algorithm}, trainer=trainer)
    policy = policy_of(spec)
    queue = random_queue(policy)
    logprobs = queue.fields["rollout_logprobs"]
    moved = Jagged(logprobs.values + noise, logprobs.lengths)
    return (
        rank_of(spec, policy, queue.replaced(rollout_logprobs=moved))
        .train(StepCommand(1, queue.meta))
        .metrics
    )


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor, Segments]:
    """Returns noise, mask and sequences of the batch."""
    queue = random_queue(policy_of(spec_of()))
    mask = queue.fields["response_mask"]
    noise = 0.3 * torch.randn(len(mask.values), generator=torch.Generator().manual_seed(4))
    return noise, mask.values.bool(), Segments.from_lengths(mask.lengths)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("budget", [16_384, 24])
def test_normalized_weights_have_a_mean_of_one_over_the_batch(batch, level, budget) -> None:
    noise, mask, segments = batch
    weights = correction.importance_weights(-noise, mask, segments, level=level, cap=2.0)
    total, count = correction.mean_terms(weights, mask, segments, level=level)
    algorithm = {"correction_level": level}
    plain = _trained(algorithm, noise)
    metrics = _trained(
        {**algorithm, "correction_normalize": True}, noise, tokens_per_micro_batch=budget
    )
    assert abs(total / count - 1) > 0.01
    ratio = float(total / count)
    assert metrics["grad_norm"] * ratio == pytest.approx(plain["grad_norm"], rel=1e-4)
    assert metrics["loss"] * ratio == pytest.approx(plain["loss"], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("budget", [16_384, 24])
@pytest.mark.parametrize("correction_", ["decoupled", "bypass"])
def test_losses_are_divided_by_the_tokens_that_masks_leave(batch, budget, correction_) -> None:
    noise, mask, _ = batch
    ratio = torch.exp(-noise)
    unmasked = mask & (ratio >= 0.9) & (ratio <= 1.2)
    algorithm = {"rejection": _REJECTION, "correction": correction_}
    plain = _trained(algorithm, noise)
    with_kept_tokens = {**algorithm, "rejection_denominator": "kept"}
    metrics = _trained(with_kept_tokens, noise, tokens_per_micro_batch=budget)
    share = float(unmasked.sum() / mask.sum())
    assert 0.2 < share < 0.9
    assert metrics["grad_norm"] * share == pytest.approx(plain["grad_norm"], rel=1e-4)
    assert metrics["rejected_fraction"] == pytest.approx(1 - share, abs=1e-6)
