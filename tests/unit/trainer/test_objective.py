"""Tests of the metrics and terms that the loss of the policy adds to the loss function."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from services.common.runspec.algorithm import AlgorithmSpec
from services.trainer.batch.samples import Samples, idle_samples
from services.trainer.collectives import MetricTotals, Ranks
from services.trainer.steps.objective import Objective
from services.wire.data.jagged import Jagged


def samples_of(lengths: list[int]) -> tuple[Samples, torch.Tensor]:
    """Returns sequences whose policies differ, and the logprobs of the current one, ``[R]``."""
    total, count = sum(lengths), len(lengths)
    generator = torch.Generator().manual_seed(1)
    rollout = -3 * torch.rand(total, generator=generator)
    proximal = rollout + 0.3 * torch.randn(total, generator=generator) + 0.1
    ones = torch.ones(count, dtype=torch.int64)
    samples = replace(
        idle_samples(),
        rows=torch.arange(count),
        numbers=torch.zeros(count, dtype=torch.int64),
        prompts=Jagged(ones, ones),
        responses=Jagged(torch.ones(total, dtype=torch.int64), torch.tensor(lengths)),
        rewards=torch.zeros(count),
        groups=None,
        tokens={},
    )
    mask = torch.ones(total, dtype=torch.bool)
    return samples.with_tokens(
        loss_mask=mask,
        response_mask=mask,
        rollout_logprobs=rollout,
        proximal_logprobs=proximal,
        ref_logprobs=proximal - 0.5 + 0.1 * torch.randn(total, generator=generator),
        advantages=torch.randn(total, generator=generator),
        staleness=torch.zeros(total),
    ), proximal


@pytest.mark.parametrize("correction", ["decoupled", "bypass"])
@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize(
    "bounds",
    [
        {"correction_cap": 1.05},
        {"correction_cap": 1.2, "correction_floor": 0.8, "correction_cap_mode": "mask"},
        {"correction_level": "sequence", "correction_cap": 1.05},
    ],
)
def test_the_reported_divergence_does_not_depend_on_importance_weights(
    correction: Any, is_weighted: bool, bounds: dict[str, Any]
) -> None:
    samples, logprobs = samples_of([100] * 8)
    kl = {"coefficient": 0.1, "importance_weighted": is_weighted}
    spec = AlgorithmSpec.model_validate({"max_staleness": 2, "kl": kl, **bounds})
    objective, tally = Objective(spec, correction=correction, horizon=100), MetricTotals()
    counts = torch.tensor(float(len(logprobs))), torch.tensor(8.0)
    objective(
        logprobs.clone().requires_grad_(),
        torch.zeros_like(logprobs),
        samples,
        denominators=objective.denominators(*counts),
        kl_coefficient=0.1,
        tally=tally,
    )
    distance = (logprobs - samples.tokens["ref_logprobs"]).double()
    expected = float((torch.exp(-distance) + distance - 1).mean())
    assert tally.reduce(Ranks())["kl_ref"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("correction", ["decoupled", "bypass"])
def test_opsm_masks_sequences_that_the_policy_left_and_that_have_a_negative_advantage(
    correction: Any,
) -> None:
    delta, lengths = 0.1, [50, 70, 90, 110]
    samples, logprobs = samples_of(lengths)
    # The policy is less likely to sample the first and third sequence, by 0.15 nats per token.
    moved = samples.segments.expand(torch.tensor([-0.15, -0.05, -0.15, 0.15]))
    rollout = samples.tokens["proximal_logprobs"] - moved
    advantages = samples.segments.expand(torch.tensor([-1.0, -1.0, 1.0, -1.0]))
    samples = samples.with_tokens(rollout_logprobs=rollout, advantages=advantages)
    spec = AlgorithmSpec(max_staleness=2, opsm=delta)
    objective, tally = Objective(spec, correction=correction, horizon=128), MetricTotals()
    current = logprobs.clone().requires_grad_()
    loss = objective(
        current,
        torch.zeros_like(logprobs),
        samples,
        denominators=objective.denominators(torch.tensor(320.0), torch.tensor(4.0)),
        kl_coefficient=0.0,
        tally=tally,
    )
    loss.backward()
    assert current.grad is not None
    trains = samples.segments.max((current.grad != 0).double(), samples.tokens["loss_mask"])
    assert trains.tolist() == [0, 1, 1, 1]
    assert tally.reduce(Ranks())["rejected_fraction"] == pytest.approx(50 / 320)
