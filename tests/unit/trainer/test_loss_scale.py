"""Loss scaling for float16: torch's rules, exact updates, and skipped updates."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from services.common.runspec.run import RunSpec
from services.common.runspec.trainer import LossScaleSpec
from services.trainer.model.policy import Policy
from services.trainer.ranks.rank import Rank
from services.trainer.steps.updates import LossScale, NotFiniteError
from services.wire.step_command import StepCommand
from tests.helpers.batches import policy_of, random_queue, rank_of, spec_of


def test_the_scale_changes_as_in_torch() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    scale = LossScale(LossScaleSpec(initial=2.0**12, growth_interval=3))
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight])
    overflows = torch.rand(200, generator=torch.Generator().manual_seed(0)) < 0.2
    scales = set()
    for overflows_now in overflows.tolist():
        scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
        if overflows_now:
            assert weight.grad is not None
            weight.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if overflows_now:
            scale.back_off()
        else:
            scale.grow()
        assert scale.value == scaler.get_scale()
        scales.add(scale.value)
    assert len(scales) > 3


def test_a_checkpoint_has_the_whole_state_and_one_of_another_dtype_has_none() -> None:
    scale = LossScale(LossScaleSpec(growth_interval=3))
    scale.back_off()
    scale.grow()
    scale.grow()
    facts = scale.facts("critic")
    resumed = LossScale(LossScaleSpec(growth_interval=3))
    resumed.restore({"num_updates": 7}, "critic")
    assert resumed.value == 65536
    resumed.restore(facts, "critic")
    assert resumed.facts("critic") == facts
    resumed.grow()
    assert resumed.value == 65536


def rank_with(
    *, dtype: str = "float16", algorithm: Any = None, **trainer: Any
) -> tuple[Rank, Policy, Any]:
    """Returns a rank that scales the loss but computes in float32, with its policy and its queue."""
    spec: RunSpec = spec_of(
        algorithm=algorithm,
        trainer={"dtype": dtype, "optimizer": {"learning_rate": 1e-2}, **trainer},
    )
    policy = policy_of(spec, scale=1.5)
    queue = random_queue(policy)
    return rank_of(spec, policy, queue), policy, queue


def weights_of(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])


def overflow(policy: Policy) -> Any:
    """Makes the gradient of one parameter infinite until the returned handle is removed."""
    (*_, weight) = policy.parameters()
    return weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))


@pytest.mark.parametrize(
    "trainer",
    [
        {"optimizer": {"learning_rate": 1e-2, "max_grad_norm": 0.1}},
        {"optimizer": {"learning_rate": 1e-2, "kind": "muon"}},
        {"optimizer": {"learning_rate": 1e-2, "kind": "adamw_8bit"}},
        {"accumulate_early": True},
        {"updates_per_step": 2},
    ],
    ids=str,
)
def test_scaled_gradients_give_the_same_clipped_update_bit_by_bit(trainer: Any) -> None:
    outcomes = []
    for dtype in ("float32", "float16"):
        rank, policy, queue = rank_with(dtype=dtype, algorithm={"max_staleness": 0}, **trainer)
        for step in (1, 2):
            if "accumulate_early" in trainer:
                rank.accumulate(queue.meta.select(range(4)), weight_version=step - 1)
            metrics = rank.train(StepCommand(step, queue.meta, weight_version=step - 1)).metrics
        outcomes.append((weights_of(policy), metrics["grad_norm"], metrics["loss"]))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1:] == outcomes[1][1:]


def test_an_overflow_skips_the_step_and_leaves_the_schedule_where_it_is() -> None:
    rank, policy, queue = rank_with(
        algorithm={"max_nonfinite_steps": 0},
        optimizer={"learning_rate": 1e-2, "warmup_steps": 4},
    )
    before, handle = weights_of(policy), overflow(policy)
    for step, scale in ((1, 2.0**15), (2, 2.0**14)):
        result = rank.train(StepCommand(step, queue.meta))
        assert result.skipped
        assert result.overflowed
        assert result.metrics["loss_scale"] == scale
        numbers = ("overflow_updates", "nonfinite_updates", "nonfinite_grad", "learning_rate")
        assert [result.metrics[name] for name in numbers] == [1, 0, 0, 0]
        assert math.isfinite(result.metrics["loss"])
    assert torch.equal(weights_of(policy), before)
    handle.remove()
    result = rank.train(StepCommand(3, queue.meta))
    assert (result.skipped, result.overflowed) == (False, False)
    assert result.metrics["learning_rate"] == pytest.approx(1e-2 / 4), "it is the first update"
    assert not torch.equal(weights_of(policy), before)
    facts = rank.runner.facts()
    assert [facts[name] for name in ("num_updates", "loss_scale", "loss_scale_updates")] == [
        *(1, 2.0**14, 1)
    ]


def test_one_overflow_of_several_updates_is_no_skipped_step() -> None:
    rank, policy, queue = rank_with(updates_per_step=2)
    (*_, weight) = policy.parameters()
    calls: list[int] = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return gradient * (torch.inf if len(calls) == 1 else 1.0)

    weight.register_hook(hook)
    result = rank.train(StepCommand(1, queue.meta))
    assert (result.skipped, result.overflowed) == (False, False)
    assert (result.metrics["overflow_updates"], rank.runner.facts()["num_updates"]) == (1, 1)


def test_overflows_at_the_lowest_scale_end_the_run() -> None:
    rank, policy, queue = rank_with(loss_scale={"initial": 4})
    overflow(policy)
    assert [rank.train(StepCommand(step, queue.meta)).metrics["loss_scale"] for step in (1, 2)] == [
        2,
        1,
    ]
    with pytest.raises(NotFiniteError, match=r"loss scale 1.* trainer.dtype"):
        rank.train(StepCommand(3, queue.meta))


def test_a_loss_that_is_no_number_is_no_overflow() -> None:
    rank, policy, queue = rank_with()
    with torch.no_grad():
        next(policy.parameters()).fill_(torch.nan)
    result = rank.train(StepCommand(1, queue.meta))
    assert (result.skipped, result.overflowed) == (True, False)
    assert result.metrics["nonfinite_loss"] == 1
    assert result.metrics["loss_scale"] == 65536


def test_policy_and_critic_have_their_own_scales() -> None:
    rank, _, queue = rank_with(algorithm={"advantage": "gae"})
    critic: Any = rank.runner.trained()["critic"]
    critic.module.head.weight.register_hook(lambda gradient: gradient * torch.inf)
    metrics = rank.train(StepCommand(1, queue.meta)).metrics
    assert (metrics["loss_scale"], metrics["critic_loss_scale"]) == (2.0**16, 2.0**15)
    assert (metrics["overflow_updates"], metrics["critic_overflow_updates"]) == (0, 1)
    assert metrics["nonfinite_critic"] == 0
    facts = rank.runner.facts()
    assert (facts["critic.num_updates"], facts["critic.loss_scale"]) == (0, 2.0**15)
    assert (facts["num_updates"], facts["loss_scale"]) == (1, 2.0**16)


def test_only_float16_scales_the_loss() -> None:
    rank, _, queue = rank_with(dtype="float32")
    assert "loss_scale" not in rank.train(StepCommand(1, queue.meta)).metrics
    assert "loss_scale" not in rank.runner.facts()
