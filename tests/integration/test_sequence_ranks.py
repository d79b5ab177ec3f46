"""Episodes of several conversations have the gradient of a hand-written loop, on any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from services.common.runspec.run import RunSpec
from services.trainer.engines.fsdp.parallel import build_topology, distribute
from services.wire.step_command import StepCommand
from tests.helpers.batches import CPU, policy_of, rank_of, spec_of
from tests.helpers.episodes import branched_episodes, gradients_by_hand
from tests.helpers.ranks import run_ranks
from tests.integration.test_trainer_ranks import Recorder


def _train(rank: int, world_size: int, folder: str, spec_json: str) -> None:
    spec = RunSpec.model_validate_json(spec_json)
    if world_size > 1:
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )
    policy = policy_of(spec, scale=1.5)
    queue, _ = branched_episodes(policy_of(spec, seed=1, scale=1.5))
    topology = build_topology(spec.trainer, device=CPU, rank=rank, world_size=world_size)
    distribute(policy, spec.trainer, topology)
    trained = rank_of(spec, policy, queue, topology=topology)
    recorder: Any = Recorder(policy)
    trained.runner.engine.optimizer = recorder
    trained.train(StepCommand(1, queue.meta))
    if rank == 0:
        torch.save(recorder.gradients, f"{folder}/gradients.pt")
    if world_size > 1:
        distributed.destroy_process_group()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [
        {"share_prefixes": False},
        {"tokens_per_micro_batch": 40},
        {"world_size": 2, "tokens_per_micro_batch": 40},
    ],
    ids=str,
)
def test_branches_have_the_gradient_of_a_loop_by_hand(options: Any, tmp_path: Path) -> None:
    spec = spec_of(
        rollout={"group_size": 3},
        trainer={"prompts_per_step": 3, "optimizer": {"max_grad_norm": 1e9}, **options},
    )
    world_size = spec.trainer.world_size
    if world_size == 1:
        _train(0, 1, str(tmp_path), spec.model_dump_json())
    else:
        run_ranks(_train, world_size, str(tmp_path), spec.model_dump_json(), count=world_size)
    content = torch.load(tmp_path / "gradients.pt", weights_only=True)
    queue, episodes = branched_episodes(policy_of(spec, seed=1, scale=1.5))
    expected = gradients_by_hand(policy_of(spec, scale=1.5), queue, episodes)
    assert content.keys() == expected.keys()
    expected_gradient = torch.cat([gradient.flatten() for gradient in expected.values()])
    actual = torch.cat([content[name].flatten() for name in expected])
    assert (actual - expected_gradient).norm() <= 1e-6 * expected_gradient.norm()
