"""Tests that a rank trains a batch exactly once and refuses invalid batches."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from services.common.errors import InvalidArgumentError
from services.common.runspec.trainer import CriticSpec
from services.trainer.batch.columns import SCORED
from services.trainer.batch.samples import IncompleteBatchError, empty_samples
from services.trainer.batch.step_plan import StepPlan
from services.trainer.ranks.rank import StepProfiler
from services.trainer.steps.step import without_unscored
from services.trainer.steps.updates import NotFiniteError
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand
from tests.helpers.batches import policy_of, random_queue, rank_of, spec_of


def test_the_first_synchronous_step_is_on_policy() -> None:
    spec = spec_of()
    policy = policy_of(spec)
    queue = random_queue(policy)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    result = rank_of(spec, policy, queue).train(StepCommand(1, queue.meta))
    assert not result.skipped
    assert result.metrics["rollout_logprob_abs_diff_max"] <= 1e-4
    assert result.metrics["clip_fraction"] == 0
    assert result.metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert result.metrics["staleness_max"] == 0
    assert any(not torch.equal(value, before[key]) for key, value in policy.state_dict().items())


def test_chosen_steps_are_profiled(tmp_path: Path) -> None:
    spec = spec_of()
    policy = policy_of(spec)
    queue = random_queue(policy)
    profiler = StepProfiler(tmp_path / "profiles", rank=3, steps=frozenset({2}))
    rank = rank_of(spec, policy, queue, profiler=profiler)
    for step in (1, 2):
        rank.train(StepCommand(step, queue.meta))
    (file,) = (tmp_path / "profiles").iterdir()
    assert file.name == "step-2-rank-3.json.gz"
    with gzip.open(file) as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert {"aten::mm", "autograd::engine::evaluate_function: MmBackward0"} <= names


@pytest.mark.parametrize("field", ["rollout_logprobs", "version_runs"])
def test_a_batch_without_what_the_correction_needs_is_refused(field: str) -> None:
    spec = spec_of()
    policy = policy_of(spec)
    queue = random_queue(policy).without(field)
    with pytest.raises(IncompleteBatchError, match=field) as refusal:
        rank_of(spec, policy, queue).train(StepCommand(1, queue.meta))
    assert refusal.value.code is grpc.StatusCode.INTERNAL, "no setting is at fault"
    plain = spec_of(algorithm={"correction": "none", "max_staleness": 0})
    assert not rank_of(plain, policy, queue).train(StepCommand(1, queue.meta)).skipped


def test_a_nonfinite_reward_skips_the_step_and_too_many_need_a_checkpoint() -> None:
    spec = spec_of(algorithm={"max_nonfinite_steps": 1})
    policy = policy_of(spec)
    queue = random_queue(policy)
    rewards = queue.fields["rewards"].values.clone()
    rewards[3] = torch.nan
    bad = queue.replaced(rewards=Jagged.from_list(list(rewards)))
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    rank = rank_of(spec, policy, bad)
    assert rank.train(StepCommand(1, bad.meta)).skipped
    assert all(torch.equal(value, before[key]) for key, value in policy.state_dict().items())
    with pytest.raises(NotFiniteError, match="no checkpoint"):
        rank.train(StepCommand(2, bad.meta))


def test_tokens_that_are_too_stale_do_not_train() -> None:
    spec = spec_of(algorithm={"max_staleness": 1})
    policy = policy_of(spec)
    queue = random_queue(policy, version=0)
    metrics = rank_of(spec, policy, queue).train(StepCommand(3, queue.meta)).metrics
    assert metrics["stale_token_fraction"] == 1
    assert metrics["trained_tokens"] == 0
    assert metrics["staleness_max"] == 0, "no token over the bound trains"


def test_staleness_is_that_of_the_tokens_that_train() -> None:
    spec = spec_of(algorithm={"max_staleness": 1})
    policy = policy_of(spec)
    queue = random_queue(policy)
    runs = [
        torch.tensor([[0, 1], [2, length - 1]], dtype=torch.int32)
        for length in queue.fields["response_ids"].lengths.tolist()
    ]
    queue = queue.replaced(version_runs=Jagged.from_list(runs))
    metrics = rank_of(spec, policy, queue).train(StepCommand(4, queue.meta)).metrics
    assert metrics["staleness_max"] == metrics["staleness_mean"] == 1
    assert metrics["staleness_head"] > 1, "the oldest sampled token is over the bound, and masked"
    assert 0 < metrics["stale_token_fraction"] < 1


def test_older_tokens_of_a_response_may_be_context_only() -> None:
    trained = []
    for is_masked in (False, True):
        spec = spec_of(algorithm={"mask_older_tokens": is_masked})
        policy = policy_of(spec)
        queue = random_queue(policy)
        lengths = queue.fields["response_ids"].lengths.tolist()
        runs = [
            torch.tensor([[0, length // 2], [1, length - length // 2]], dtype=torch.int32)
            for length in lengths
        ]
        queue = queue.replaced(version_runs=Jagged.from_list(runs))
        result = rank_of(spec, policy, queue).train(StepCommand(2, queue.meta))
        trained.append(result.metrics["trained_tokens"])
    mask = queue.fields["response_mask"].unbind()
    newer = [int(row[len(row) // 2 :].sum()) for row in mask]
    assert trained == [int(sum(row.sum() for row in mask)), sum(newer)]


def test_a_failed_sample_is_in_neither_loss_nor_group() -> None:
    spec = spec_of()
    policy = policy_of(spec)
    queue = random_queue(policy)
    reasons = ("failed", *("stop",) * 15)
    rewards = queue.fields["rewards"].values.clone()
    rewards[0] = torch.nan
    failed = queue.replaced(rewards=Jagged.from_list(list(rewards)))
    failed.meta.tags["finish_reason"] = reasons  # type: ignore[index]
    result = rank_of(spec, policy, failed).train(StepCommand(1, failed.meta))
    assert not result.skipped
    whole = rank_of(spec, policy_of(spec), queue).train(StepCommand(1, queue.meta))
    assert result.metrics["trained_tokens"] < whole.metrics["trained_tokens"]
    assert result.metrics["reward_mean"] == pytest.approx(float(rewards[1:].mean()))
    assert result.metrics["failed_fraction"] == 1 / 16


def test_a_batch_without_a_trained_token_leaves_weights_and_schedule_as_they_are() -> None:
    spec = spec_of(trainer={"optimizer": {"learning_rate": 0.01, "weight_decay": 0.1}})
    policy = policy_of(spec)
    queue = random_queue(policy)
    rank = rank_of(spec, policy, queue)
    rank.train(StepCommand(1, queue.meta))
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    mask = queue.fields["response_mask"]
    idle = queue.replaced(response_mask=Jagged(torch.zeros_like(mask.values), mask.lengths))
    rank = rank_of(spec, policy, idle)
    result = rank.train(StepCommand(2, idle.meta))
    assert not result.skipped
    assert result.metrics["empty_updates"] == 1
    assert rank.runner.facts()["num_updates"] == 0
    assert all(torch.equal(value, before[key]) for key, value in policy.state_dict().items())


def test_an_interpolated_proximal_policy_costs_no_forward_pass() -> None:
    changes = {"correction": "decoupled", "max_staleness": 4}
    metrics = {}
    for proximal in ("computed", "interpolated"):
        spec = spec_of(algorithm={**changes, "proximal": proximal}, trainer={"updates_per_step": 2})
        policy = policy_of(spec, scale=1.0)
        queue = random_queue(policy, version=1)
        metrics[proximal] = rank_of(spec, policy, queue).train(StepCommand(4, queue.meta)).metrics
    assert "seconds_old_logprob" in metrics["computed"]
    assert "seconds_old_logprob" not in metrics["interpolated"]
    # The current policy sampled the batch, so the interpolated policy equals it.
    assert metrics["interpolated"]["is_weight_mean"] == pytest.approx(1.0, abs=1e-3)


def test_the_divergence_is_bounded_as_its_ratio_is() -> None:
    spec = spec_of(algorithm={"correction": "bypass"})
    policy = policy_of(spec)
    queue = random_queue(policy)
    logprobs = queue.fields["rollout_logprobs"]
    far = queue.replaced(rollout_logprobs=Jagged(logprobs.values + 100.0, logprobs.lengths))
    metrics = rank_of(spec, policy, far).train(StepCommand(1, far.meta)).metrics
    assert metrics["ppo_kl"] == pytest.approx(20.0)


@pytest.mark.parametrize("field", ["rollout_logprobs", "response_mask", "version_runs"])
def test_a_shift_between_two_rows_is_refused(field: str) -> None:
    spec = spec_of()
    policy = policy_of(spec)
    queue = random_queue(policy)
    rows = queue.fields[field].unbind()
    if field == "version_runs":
        first, second = rows[0].clone(), rows[1].clone()
        first[0, 1] += 1
        second[0, 1] -= 1
        rows = [first, second, *rows[2:]]
    else:
        both = torch.cat(rows[:2])
        rows = [both[: len(rows[0]) + 1], both[len(rows[0]) + 1 :], *rows[2:]]
    shifted = queue.replaced(**{field: Jagged.from_list(rows)})
    with pytest.raises(IncompleteBatchError, match=f"{field} covers"):
        rank_of(spec, policy, shifted).train(StepCommand(1, shifted.meta))


def test_fewer_groups_than_updates_give_an_update_each() -> None:
    spec = spec_of(trainer={"updates_per_step": 4})
    policy = policy_of(spec)
    queue = random_queue(policy, num_groups=2)
    rank = rank_of(spec, policy, queue)
    assert not rank.train(StepCommand(1, queue.meta)).skipped
    assert rank.runner.facts()["num_updates"] == 2


def test_a_skipped_step_leaves_the_adaptive_coefficient_a_number() -> None:
    kl = {"coefficient": 0.1, "target": 0.01}
    spec = spec_of(algorithm={"kl": kl})
    policy = policy_of(spec)
    queue = random_queue(policy)
    logprobs = queue.fields["rollout_logprobs"]
    queue = queue.replaced(ref_logprobs=logprobs)
    rank = rank_of(spec, policy, queue)
    with torch.no_grad():
        next(policy.parameters()).fill_(torch.nan)
    assert rank.train(StepCommand(1, queue.meta)).skipped
    assert rank.runner.kl_coefficient == 0.1


def test_an_adaptive_coefficient_never_rewards_leaving_the_reference() -> None:
    spec = spec_of(algorithm={"kl": {"coefficient": 0.1, "target": 1000.0, "horizon": 2}})
    policy = policy_of(spec)
    queue = random_queue(policy)
    queue = queue.replaced(ref_logprobs=queue.fields["rollout_logprobs"])
    rank = rank_of(spec, policy, queue)
    rank.train(StepCommand(1, queue.meta))
    assert rank.runner.kl_coefficient == 0.05


def test_the_critic_learns_the_returns_of_a_repeated_batch() -> None:
    spec = spec_of(algorithm={"advantage": "gae"}, trainer={"optimizer": {"learning_rate": 1e-3}})
    policy = policy_of(spec, scale=1.0)
    queue = random_queue(policy)
    rank = rank_of(spec, policy, queue)
    errors = [
        rank.train(StepCommand(step, queue.meta)).metrics["value_loss"] for step in range(1, 9)
    ]
    assert errors[-1] < 0.5 * errors[0]


def test_only_the_critic_trains_in_its_warm_up() -> None:
    critic = {"warmup_steps": 2, "learning_rate": 1e-3}
    spec = spec_of(algorithm={"advantage": "gae"}).model_copy(
        update={"critic": CriticSpec.model_validate(critic)}
    )
    policy = policy_of(spec, scale=1.0)
    queue = random_queue(policy)
    rank = rank_of(spec, policy, queue)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    errors = [rank.train(StepCommand(step, queue.meta)).metrics["value_loss"] for step in (1, 2)]
    assert errors[1] < errors[0]
    assert all(torch.equal(value, before[key]) for key, value in policy.state_dict().items())
    optimizer = rank.runner.trained()["critic"].optimizer
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert rank.runner.facts()["num_updates"] == 0
    assert rank.runner.facts()["critic.num_updates"] == 2
    rank.train(StepCommand(3, queue.meta))
    assert not all(torch.equal(value, before[key]) for key, value in policy.state_dict().items())


def test_the_warm_up_of_the_critic_counts_steps_also_after_a_rewind() -> None:
    spec = spec_of(algorithm={"advantage": "gae"}).model_copy(
        update={"critic": CriticSpec(warmup_steps=2)}
    )
    policy = policy_of(spec, scale=1.0)
    queue = random_queue(policy)
    rank = rank_of(spec, policy, queue)
    # After a rewind, the weight versions of a run are ahead of its steps.
    rank.train(StepCommand(2, queue.meta, weight_version=5))
    assert rank.runner.facts()["num_updates"] == 0
    rank.train(StepCommand(3, queue.meta, weight_version=6))
    assert rank.runner.facts()["num_updates"] == 1


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_policys_schedule_ends_with_the_run_after_a_warm_up_of_the_critic(schedule) -> None:
    optimizer = {"learning_rate": 1e-3, "warmup_steps": 1, "schedule": schedule}
    spec = spec_of(
        algorithm={"advantage": "gae"},
        trainer={"optimizer": optimizer, "steps": 5, "updates_per_step": 2},
    ).model_copy(update={"critic": CriticSpec(warmup_steps=2)})
    policy = policy_of(spec, scale=1.0)
    queue = random_queue(policy)
    rank = rank_of(spec, policy, queue)
    rates = [
        rank.train(StepCommand(step, queue.meta)).metrics["learning_rate"] for step in range(1, 6)
    ]
    assert rates[:2] == [0, 0]
    assert rates[4] == pytest.approx(1e-4)
    assert rank.runner.trained()["critic"].optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_a_critic_whose_gradient_is_no_number_is_counted_and_left_as_it_is() -> None:
    spec = spec_of(algorithm={"advantage": "gae"})
    policy = policy_of(spec)
    queue = random_queue(policy)
    rank = rank_of(spec, policy, queue)
    critic = rank.runner.trained()["critic"].module
    with torch.no_grad():
        critic.get_submodule("head").weight.fill_(1e30)
    before = [parameter.clone() for parameter in critic.parameters()]
    metrics = rank.train(StepCommand(1, queue.meta)).metrics
    assert (metrics["nonfinite_critic"], metrics["nonfinite_updates"]) == (1, 0)
    assert all(map(torch.equal, before, critic.parameters()))


@pytest.mark.parametrize("shape", [(), (5, 2)])
@pytest.mark.parametrize("name", SCORED)
def test_a_rank_without_samples_leaves_none_out(name: str, shape: tuple[int, ...]) -> None:
    samples = empty_samples(("rollout_logprobs",)).with_tokens(**{name: torch.zeros(0, *shape)})
    plan = StepPlan(updates=(((),),))
    assert without_unscored(samples, plan) == (samples, plan)


def test_a_critic_that_never_trains_ends_the_run_like_a_policy_that_never_trains() -> None:
    spec = spec_of(algorithm={"advantage": "gae", "max_nonfinite_steps": 1})
    policy = policy_of(spec)
    queue = random_queue(policy)
    rank = rank_of(spec, policy, queue)
    head = rank.runner.trained()["critic"].module.get_submodule("head")
    assert rank.train(StepCommand(1, queue.meta)).metrics["critic_skipped"] == 0
    with torch.no_grad():
        head.weight.fill_(1e30)
    result = rank.train(StepCommand(2, queue.meta))
    assert (result.metrics["critic_skipped"], result.skipped) == (1, False)
    with pytest.raises(NotFiniteError, match="step 2"):
        rank.train(StepCommand(3, queue.meta))


def early_rank(queue=None):
    """Returns a rank that trains groups early, its policy, and its queue."""
    spec = spec_of(algorithm={"max_staleness": 0}, trainer={"accumulate_early": True})
    policy = policy_of(spec)
    queue = queue or random_queue(policy)
    return rank_of(spec, policy, queue), policy, queue


def weights_of(policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])


FIRST, REST = range(4), range(4, 16)


def test_what_was_trained_early_is_not_trained_again_and_moves_no_weight() -> None:
    rank, policy, queue = early_rank()
    before = weights_of(policy)
    for _ in range(2):
        rank.accumulate(queue.meta.select(FIRST), weight_version=0)
    assert torch.equal(weights_of(policy), before)
    # only the other rows
    rank._fetch = lambda meta, fields: queue.fetch(meta.select(range(12)), fields)
    assert rank.train(StepCommand(1, queue.meta)).metrics["samples"] == 16
    whole, same, _ = early_rank()
    whole.train(StepCommand(1, queue.meta))
    torch.testing.assert_close(weights_of(policy), weights_of(same), rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", ["other groups", "other attempt", "other weights", "everything"])
def test_early_groups_that_are_no_part_of_the_step_are_forgotten(case: str) -> None:
    rank, policy, queue = early_rank()
    queue.meta.tags["attempt"] = (1,) * 16  # type: ignore[index]
    early = queue.meta if case == "everything" else queue.meta.select(FIRST)
    rank.accumulate(early, weight_version=3 if case == "other weights" else 0)
    if case == "other attempt":
        queue.meta.tags["attempt"] = (2,) * 16  # type: ignore[index]
    batch = queue.meta.select(REST) if case == "other groups" else queue.meta
    rank.train(StepCommand(1, batch))
    plain, same, _ = early_rank()
    plain.train(StepCommand(1, batch))
    assert torch.equal(weights_of(policy), weights_of(same))


def test_a_reward_that_is_no_number_skips_the_step_of_early_groups_too() -> None:
    rank, policy, queue = early_rank()
    rewards = queue.fields["rewards"].values.clone()
    rewards[5] = torch.nan
    rank, policy, bad = early_rank(queue.replaced(rewards=Jagged.from_list(list(rewards))))
    before = weights_of(policy)
    for rows in (FIRST, range(4, 8)):
        rank.accumulate(bad.meta.select(rows), weight_version=0)
    assert rank.train(StepCommand(1, bad.meta)).metrics["nonfinite_reward"] == 1
    assert torch.equal(weights_of(policy), before)
    assert all(parameter.grad is None for parameter in policy.parameters())


ALGORITHMS = [
    {"advantage": "dr_grpo", "aggregation": "seq-mean-token-sum-norm"},
    {"advantage": "rloo", "aggregation": "token-sum"},
    {"advantage": "opo", "aggregation": "seq-mean-token-sum"},
    {"advantage": "pass_at_k"},
    {"advantage": "reinforce_pp", "gamma": 0.9},
    {"advantage": "reinforce_pp_baseline"},
    {"advantage": "gae", "gae_lambda": 0.9},
    {"loss": "gspo"},
    {"loss": "cispo"},
    {"loss": "aipo"},
    {"loss": "sapo"},
    {"loss": "reinforce", "entropy_coefficient": 0.01},
    {"correction": "decoupled", "correction_level": "sequence", "correction_cap_mode": "mask"},
    {"correction": "decoupled", "proximal": "interpolated"},
    {"correction": "none", "max_staleness": 0},
    {"rejection": [{"level": "token", "lower": 0.5, "upper": 2.0, "negative_only": True}]},
    {"overlong": {"buffer_tokens": 4, "mask_truncated": True}},
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_every_algorithm_trains(algorithm: dict[str, Any]) -> None:
    spec = spec_of(algorithm=algorithm, trainer={"updates_per_step": 2})
    policy = policy_of(spec, scale=1.0)
    queue = random_queue(policy)
    result = rank_of(spec, policy, queue).train(StepCommand(1, queue.meta))
    assert not result.skipped
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert result.metrics["grad_norm"] > 0


def test_terms_that_no_sample_has_are_a_fault_of_the_setting_that_names_them() -> None:
    weights = {"weights": {"polite": 1.0}}
    spec = spec_of(algorithm={"advantage": "gdpo", "advantage_arguments": weights})
    policy = policy_of(spec)
    queue = random_queue(policy)
    with pytest.raises(InvalidArgumentError, match=r"advantage_arguments\.weights has polite"):
        rank_of(spec, policy, queue).train(StepCommand(1, queue.meta))


def test_remax_needs_a_greedy_response_in_each_group() -> None:
    spec = spec_of(algorithm={"advantage": "remax"})
    policy = policy_of(spec)
    queue = random_queue(policy)
    with pytest.raises(IncompleteBatchError, match="4 groups have none"):
        rank_of(spec, policy, queue).train(StepCommand(1, queue.meta))
    queue.meta.tags["greedy"] = (1, 0, 0, 0) * 4  # type: ignore[index]
    assert rank_of(spec, policy, queue).train(StepCommand(1, queue.meta)).metrics["grad_norm"] > 0
    rewards = queue.fields["rewards"].values.clone()
    rewards[0] = torch.nan
    bad = queue.replaced(rewards=Jagged.from_list(list(rewards)))
    assert rank_of(spec, policy, bad).train(StepCommand(1, bad.meta)).skipped, (
        "the baseline is no number"
    )


def test_a_group_whose_greedy_response_failed_does_not_train_under_remax() -> None:
    """A failed greedy response must not count as a baseline of 0."""
    spec = spec_of(algorithm={"advantage": "remax"})
    policy = policy_of(spec)
    queue = random_queue(policy)
    queue.meta.tags["greedy"] = (1, 0, 0, 0) * 4  # type: ignore[index]
    whole = rank_of(spec, policy_of(spec), queue).train(StepCommand(1, queue.meta)).metrics
    lengths = queue.fields["response_mask"].lengths
    num_untrained = int(
        queue.fields["response_mask"].values[int(lengths[0]) : int(lengths[:4].sum())].sum()
    )
    queue.meta.tags["finish_reason"] = ("failed", *("stop",) * 15)  # type: ignore[index]
    result = rank_of(spec, policy, queue).train(StepCommand(1, queue.meta))
    assert not result.skipped
    assert result.metrics["trained_tokens"] == whole["trained_tokens"] - num_untrained
