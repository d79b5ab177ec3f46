"""Context-parallel steps of mixtures of experts equal those of one rank: balance, replay, biases."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from services.common.models.loading import build_model, stored_tensors
from services.common.runspec.run import RunSpec
from services.trainer.engines.fsdp.parallel import build_topology, distribute
from services.trainer.model.policy import Policy
from services.wire.step_command import StepCommand
from tests.helpers.batches import CPU, random_queue, rank_of, spec_of, with_experts
from tests.helpers.mixtures import tiny_config
from tests.helpers.ranks import run_ranks
from tests.integration.test_trainer_ranks import Recorder

_LOSS = {"balancing": {"kind": "loss", "coefficient": 0.5}}
_BIAS = {"balancing": {"kind": "bias", "bias_rate": 0.01}}
_CASES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("qwen3_moe", _LOSS, "off"),
    ("qwen3_moe", _LOSS, "replay"),
    ("mixtral", {}, "off"),
    ("gpt_oss", {}, "replay"),
    ("deepseek_v3", _BIAS, "off"),
    ("deepseek_v3", _BIAS, "compare"),
)
_TOLD = ("loss", "grad_norm", "entropy", "balance_loss", "routing_differs", "expert_load_worst")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"context_parallel": 2}),
        (2, {"context_parallel": 2, "expert_parallel": 2}),
        (4, {"context_parallel": 2, "expert_parallel": 2}),
    ],
    ids=str,
)
def test_steps_of_mixtures_are_those_of_one_rank(
    tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    run_ranks(_compare, str(tmp_path / "store"), ranks, options, count=ranks)


def _compare(rank: int, store: str, ranks: int, options: dict[str, Any]) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    for family, trainer, replay in _CASES:
        if ranks > 2:
            # The balance loss counts the tokens of each micro-batch, which differ from those of one rank.
            if trainer is _LOSS:
                continue
            trainer = {**trainer, "share_prefixes": False}
        case = f"{family}, {trainer}, {replay}"
        expected = _train(family, _spec(trainer, replay))
        actual = _train(family, _spec({**trainer, **options, "world_size": ranks}, replay), rank)
        for name in _TOLD:
            expected_value = expected["metrics"].get(name, -1.0)
            actual_value = actual["metrics"].get(name, -1.0)
            assert actual_value == pytest.approx(expected_value, rel=2e-6, abs=1e-7), (
                f"{case}: {name}"
            )
        if replay != "off":
            assert 0.1 < actual["metrics"]["routing_differs"] < 1.0
        norm = torch.stack([value.norm() for value in expected["gradients"].values()]).norm()
        for key, value in expected["gradients"].items():
            error = (actual["gradients"][key] - value).norm() / norm
            assert error <= 1e-6, f"{case}: gradient of {key} differs by {error}"
        for key, value in expected["biases"].items():
            assert value.norm() > 0
            assert torch.equal(actual["biases"][key], value), f"{case}: {key}"
    distributed.destroy_process_group()


def _spec(trainer: dict[str, Any], replay: str) -> RunSpec:
    optimizer = {"max_grad_norm": 1e9}
    return spec_of(trainer={"optimizer": optimizer, **trainer}, rollout={"routing_replay": replay})


def _train(family: str, spec: RunSpec, rank: int = 0) -> dict[str, Any]:
    """Trains a step; returns its metrics, its gradients and the router biases after it."""
    policy = _policy(family, spec)
    queue = with_experts(random_queue(policy, num_groups=3), policy)
    topology = build_topology(
        spec.trainer, device=CPU, rank=rank, world_size=spec.trainer.world_size
    )
    distribute(policy, spec.trainer, topology)
    trained = rank_of(spec, policy, queue, topology=topology)
    recorder: Any = Recorder(policy)
    runner: Any = trained.runner
    runner.engine.optimizer = recorder
    metrics = trained.train(StepCommand(1, queue.meta)).metrics
    biases = {
        name: value.clone()
        for name, value in stored_tensors(policy.model).items()
        if name.endswith("e_score_correction_bias")
    }
    return {"metrics": metrics, "gradients": recorder.gradients, "biases": biases}


def _policy(family: str, spec: RunSpec) -> Policy:
    model = build_model(tiny_config(family), dtype=torch.float32, device=CPU, seed=3)
    return Policy(model, temperature=1.0, routing_replay=spec.rollout.routing_replay)
