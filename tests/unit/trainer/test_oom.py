"""Tests that split micro-batches and left out sequences after an OOM error lead to correct gradients."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.common.runspec.run import RunSpec
from services.trainer.batch.step_plan import Bounds
from services.trainer.collectives import Ranks
from services.trainer.engines.base import UNSCORED, OomLimitError
from services.trainer.engines.fsdp.oom import (
    OomLimits,
    OomRetry,
    catch_oom,
    load_oom_limits,
    unrecorded_limits,
)
from services.trainer.model.policy import Policy
from services.trainer.settings import TrainerSettings
from services.trainer.steps.step import StepResult, without_unscored
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand
from tests.helpers.batches import CPU, Queue, policy_of, random_queue, rank_of, spec_of
from tests.helpers.shortage import limited


class Recorder:
    """Fake optimizer that records the gradients of each update."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.param_groups: list[dict[str, Any]] = [{}]
        self.gradients: list[Tensor] = []

    def step(self) -> None:
        grads = [weight.grad for weight in self._policy.parameters() if weight.grad is not None]
        self.gradients.append(torch.cat([gradient.flatten() for gradient in grads]))

    def zero_grad(self, *, set_to_none: bool) -> None:
        self._policy.zero_grad(set_to_none=set_to_none)


def trained(
    spec: RunSpec, queue: Queue, *, limit: int | None = None, in_backward: bool = False
) -> tuple[StepResult, list[Tensor]]:
    policy = policy_of(spec, scale=1.5)
    rank = rank_of(spec, policy, queue)
    recorder: Any = Recorder(policy)
    runner: Any = rank.runner
    runner.engine.optimizer = recorder
    if limit is not None:
        limited(policy, limit, in_backward=in_backward)
    if spec.trainer.accumulate_early:
        for rows in ([8, 9, 10, 11], [0, 1, 2, 3]):
            rank.accumulate(queue.meta.select(rows), weight_version=0)
    return rank.train(StepCommand(1, queue.meta)), recorder.gradients


def queue_for(spec: RunSpec) -> Queue:
    return random_queue(policy_of(spec, seed=1, scale=1.5), num_groups=4)


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for gradient, expected_gradient in zip(actual, expected, strict=True):
        assert (gradient - expected_gradient).norm() <= 1e-6 * expected_gradient.norm()


def spec_for(algorithm: Mapping[str, Any] | None = None, **trainer: Any) -> RunSpec:
    return spec_of(algorithm=algorithm, trainer={"optimizer": {"max_grad_norm": 1e9}, **trainer})


@pytest.mark.parametrize(
    ("options", "in_backward"),
    [
        ({}, False),
        ({}, True),
        ({"share_prefixes": False, "tokens_per_micro_batch": 90}, True),
        ({"updates_per_step": 2}, True),
        ({"accumulate_early": True}, True),
    ],
    ids=str,
)
def test_what_does_not_fit_is_divided(options: dict[str, Any], in_backward: bool) -> None:
    spec = spec_for({"max_staleness": 0}, **options)
    queue = queue_for(spec)
    whole, expected = trained(spec, queue)
    result, actual = trained(spec, queue, limit=40, in_backward=in_backward)
    assert_same(actual, expected)
    assert result.metrics["divided_micro_batches"] >= 1
    assert result.metrics["left_out_sequences"] == whole.metrics["divided_micro_batches"] == 0
    assert not result.left_out
    for name in ("loss", "grad_norm", "entropy", "trained_tokens", "reward_mean"):
        assert result.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-5)


@pytest.mark.parametrize(
    ("aggregation", "in_backward"),
    [
        ("token-mean", False),
        ("token-mean", True),
        ("seq-mean-token-mean", True),
        ("seq-mean-token-sum-norm", True),
    ],
)
def test_a_sequence_that_is_too_long_alone_is_left_out(aggregation: str, in_backward: bool) -> None:
    spec = spec_for({"aggregation": aggregation})
    queue = queue_for(spec)
    lengths = queue.fields["prompt_ids"].lengths + queue.fields["response_ids"].lengths
    longest = int(lengths.max())
    too_long = (lengths == longest).nonzero().flatten().tolist()
    # The model does not compute the last token of a sequence.
    result, actual = trained(spec, queue, limit=longest - 2, in_backward=in_backward)
    assert result.left_out == {queue.meta.keys[row]: longest for row in too_long}
    assert result.metrics["left_out_sequences"] == len(too_long)
    assert not result.skipped
    mask = queue.fields["response_mask"]
    rows = mask.unbind()
    for row in too_long:
        rows[row][:] = False
    masked = queue.replaced(response_mask=type(mask).from_list(rows))
    without, expected = trained(spec, masked)
    assert_same(actual, expected)
    assert result.metrics["trained_tokens"] == without.metrics["trained_tokens"]
    assert result.metrics["samples"] == without.metrics["samples"] == len(lengths)


_SCORED: tuple[dict[str, Any], ...] = (
    {"correction": "decoupled", "loss": "ppo"},
    {"kl": {"coefficient": 0.1, "placement": "reward"}},
    {"kl": {"coefficient": 0.1, "placement": "loss"}},
    {"advantage": "gae"},
)


@pytest.mark.parametrize(
    ("algorithm", "limit"),
    [
        *((algorithm, "left out") for algorithm in _SCORED),
        (_SCORED[0], "divided"),
        (_SCORED[3], "divided"),
    ],
    ids=str,
)
def test_what_cannot_be_scored_is_left_out(algorithm: dict[str, Any], limit: str) -> None:
    # With several updates, scores under the weights before the first update are needed.
    spec = spec_for(algorithm, updates_per_step=2 if "correction" in algorithm else 1)
    queue = queue_for(spec)
    lengths = queue.fields["prompt_ids"].lengths + queue.fields["response_ids"].lengths
    longest = int(lengths.max())
    too_long = (lengths == longest).nonzero().flatten().tolist() if limit == "left out" else []
    rows = queue.fields["response_mask"].unbind()
    for row in too_long:
        rows[row][:] = False
    masked = queue.replaced(response_mask=Jagged.from_list(rows))
    result, actual = scored(spec, queue, limit=longest - 2 if too_long else 40)
    without, expected = scored(spec, masked)
    assert result.left_out == {queue.meta.keys[row]: longest for row in too_long}
    assert result.metrics["left_out_sequences"] == len(too_long)
    assert_same(actual, expected)
    assert result.metrics["loss"] == pytest.approx(without.metrics["loss"], rel=1e-5)
    assert result.metrics["reward_mean"] == pytest.approx(without.metrics["reward_mean"])


def scored(
    spec: RunSpec, queue: Queue, *, limit: int | None = None
) -> tuple[StepResult, list[Tensor]]:
    """Trains a step in which passes without gradients over ``limit`` tokens run out of memory."""
    policy, reference = policy_of(spec, scale=1.5), policy_of(spec, seed=2, scale=1.5)
    rank = rank_of(spec, policy, queue, reference=reference if spec.needs_reference else None)
    recorder: Any = Recorder(policy)
    runner: Any = rank.runner
    runner.engine.optimizer = recorder
    if limit is not None:
        modules = [policy, reference]
        modules += [runner.critic.engine.module] if runner.critic is not None else []
        for module in modules:
            limited(module, limit, scores=True)
    return rank.train(StepCommand(1, queue.meta)), recorder.gradients


def test_what_another_worker_could_not_score_is_left_out() -> None:
    spec = spec_for({"kl": {"coefficient": 0.1, "placement": "reward"}})
    queue = queue_for(spec)
    logprobs = queue.fields["rollout_logprobs"]
    rows = [row.clone() for row in logprobs.unbind()]
    rows[3][:] = UNSCORED
    result, gradients = scored(spec, queue.replaced(ref_logprobs=Jagged.from_list(rows)))
    assert list(result.left_out) == [queue.meta.keys[3]]
    assert not result.skipped
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_members_that_are_compared_are_left_out_together() -> None:
    spec = spec_for()
    queue = queue_for(spec)
    share = rank_of(spec, policy_of(spec), queue)._share(queue.meta, 0, num_updates=1)
    scores = torch.zeros(len(share.samples.responses.values))
    scores[share.samples.places([5])] = UNSCORED
    groups = share.samples.rows // 4
    samples = replace(share.samples, groups=groups).with_tokens(ref_logprobs=scores)
    unscored, plan = without_unscored(samples, share.plan)
    left_out = (groups == groups[5]).nonzero().flatten().tolist()
    assert list(plan.left_out) == left_out
    assert len(left_out) == 4
    remaining = sorted(i for micros in plan.updates for micro in micros for i in micro)
    assert remaining == [i for i in range(len(groups)) if i not in left_out]
    assert not unscored.tokens["ref_logprobs"].any()
    assert not unscored.tokens["loss_mask"][unscored.places(left_out)].any()


def test_processes_that_start_again_know_what_did_not_fit(tmp_path: Path) -> None:
    spec = spec_for(world_size=2, tokens_per_micro_batch=1000)
    queue = queue_for(spec)

    def known(rank: int = 0, **changes: Any) -> OomLimits:
        settings = TrainerSettings(
            controller_address="none",
            run_id="run",
            worker_id="trainer-0",
            state_directory=tmp_path,
            rank=rank,
        )
        return load_oom_limits(settings, spec.trainer.model_copy(update=changes), ranks=Ranks())

    def fail(oom_limits: OomLimits, rows: tuple[int, ...]) -> None:
        def attempt(work: Any) -> None:
            with catch_oom(0):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        samples = rank_of(spec, policy_of(spec), queue)._share(queue.meta, 0, num_updates=1).samples
        with pytest.raises(OomLimitError, match="all ranks restart"):
            OomRetry(policy_of(spec), spec, device=CPU, oom_limits=oom_limits).run_with_retry(
                attempt, samples, (rows,)
            )

    assert known().bounds == Bounds(1000)
    lengths = (queue.fields["prompt_ids"].lengths + queue.fields["response_ids"].lengths).tolist()
    fail(known(), (0, 1, 2, 3))
    assert known().bounds == Bounds(sum(lengths[:4]) // 2)
    fail(known(rank=1), (0, 1, 2))
    assert known().bounds == Bounds(sum(lengths[:3]) // 2 // 2)
    fail(known(), (5,))
    assert known().bounds.too_long == lengths[5]
    # Other settings start with the configured bounds, because more may fit.
    assert known(activation_checkpointing=True).bounds == Bounds(1000)


def test_a_step_of_which_nothing_fits_leaves_the_weights() -> None:
    spec = spec_for()
    queue = queue_for(spec)
    result, gradients = trained(spec, queue, limit=1)
    assert len(result.left_out) == len(queue.meta.keys)
    assert not gradients
    assert result.metrics["empty_updates"] == 1


def test_later_steps_do_not_fail_again_before_they_are_divided() -> None:
    spec = spec_for()
    queue = queue_for(spec)
    policy = policy_of(spec, scale=1.5)
    rank = rank_of(spec, policy, queue)
    limited(policy, 40, in_backward=True)
    retries = [
        rank.train(StepCommand(step, queue.meta)).metrics["divided_micro_batches"]
        for step in (1, 2, 3)
    ]
    assert retries[0] >= 1
    assert retries[1:] == [0, 0]


def test_a_critic_leaves_out_what_it_cannot_learn_from() -> None:
    spec = spec_for({"advantage": "gae"})
    queue = queue_for(spec)
    rank = rank_of(spec, policy_of(spec), queue)
    runner: Any = rank.runner
    critic = runner.critic
    limited(critic.engine.module, 12, in_backward=True)
    metrics = rank.train(StepCommand(1, queue.meta)).metrics
    assert metrics["critic_left_out_sequences"] >= 1
    assert metrics["left_out_sequences"] == 0
    assert critic.updates.count == 1


def test_a_model_that_does_not_fit_without_samples_is_reported() -> None:
    spec = spec_for()
    with pytest.raises(OomLimitError, match="0 tokens"):
        trained(spec, queue_for(spec), limit=0)


def test_a_step_of_several_ranks_fails_with_the_size_that_did_not_fit() -> None:
    spec = spec_for(world_size=2)
    queue = queue_for(spec)
    samples = rank_of(spec, policy_of(spec), queue)._share(queue.meta, 0, num_updates=1).samples

    def attempt(work: Any) -> None:
        with catch_oom(1):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    with pytest.raises(OomLimitError, match=r"tokens in 2 sequence\(s\) .*2\.00 GiB") as failed:
        OomRetry(
            policy_of(spec), spec, device=CPU, oom_limits=unrecorded_limits(spec.trainer)
        ).run_with_retry(attempt, samples, ((0,), (1, 2)))
    assert "trainer.activation_offloading" in str(failed.value)
    assert failed.value.reason == "OUT_OF_MEMORY"


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="shape"), catch_oom(0):
        raise RuntimeError("a shape is wrong")
