"""A process whose pass broke in the middle trains on if it is alone; one of several ends, and is missed."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from services.common.errors import UnavailableError
from services.common.spec.run import RunSpec
from services.trainer.model.parallel import build_topology, distribute
from services.trainer.ranks.crew import Crew
from services.trainer.ranks.follower import Follower
from services.trainer.ranks.leader import Leader
from services.trainer.steps.fitting import OutgrownError
from tests.helpers.batches import CPU, policy_of, random_queue, rank_of
from tests.helpers.ranks import run_ranks
from tests.helpers.shortage import limited
from tests.integration.test_trainer_ranks import Recorder, spec_for


def _train(rank: int, folder: str, spec_json: str) -> None:
    torch.set_num_threads(1)
    spec = RunSpec.model_validate_json(spec_json)
    queue = random_queue(policy_of(spec, seed=1, scale=1.5), num_groups=4)
    found: list[Any] = []
    for limit, in_backward in ((None, False), (40, False), (40, True)):
        policy = policy_of(spec, scale=1.5)
        topology = build_topology(spec.trainer, device=CPU, rank=0, world_size=1)
        distribute(policy, spec.trainer, topology)
        trained = rank_of(spec, policy, queue, ranks=topology.data)
        recorder: Any = Recorder(policy)
        runner: Any = trained.runner
        runner.optimizer = recorder
        if limit is not None:
            limited(policy, limit, in_backward=in_backward)
        divided = trained.train(1, queue.meta).metrics["divided_micro_batches"]
        first = _flat(recorder.gradients)
        # Nothing of a pass that broke is left for the next step.
        trained.train(2, queue.meta)
        found.append((divided, first, _flat(recorder.gradients)))
        distributed.destroy_process_group()
    torch.save(found, f"{folder}/found.pt")


def _short_of_memory(rank: int, folder: str, spec_json: str) -> None:
    """Rank 1 alone runs out of memory; rank 0 waits for it in the same pass."""
    torch.set_num_threads(1)
    spec = RunSpec.model_validate_json(spec_json)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    policy = policy_of(spec)
    queue = random_queue(policy_of(spec))
    topology = build_topology(spec.trainer, device=CPU, rank=rank, world_size=2)
    distribute(policy, spec.trainer, topology)
    trained = rank_of(spec, policy, queue, ranks=topology.data)
    if rank == 1:
        limited(policy, 1, in_backward=False)
        with pytest.raises(OutgrownError, match=r"tokens in \d+ sequence.* 2\.00 GiB"):
            Follower(Crew(2), trained).follow()
        os._exit(0)
    leader = Leader()
    leader.attach(trained, Crew(2))
    with pytest.raises(UnavailableError, match="a rank is gone"):
        asyncio.run(leader.train_step(1, queue.meta))


def _flat(gradients: dict[str, Any]) -> torch.Tensor:
    whole = (g.full_tensor() if isinstance(g, DTensor) else g for g in gradients.values())
    return torch.cat([gradient.flatten() for gradient in whole])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"cpu_offload": True}, marks=pytest.mark.nightly)],
    ids=["gathered", "offloaded"],
)
def test_a_pass_that_broke_leaves_nothing_behind(tmp_path: Path, options: dict[str, Any]) -> None:
    spec = spec_for(dtype="bfloat16", tokens_per_micro_batch=90, **options)
    run_ranks(_train, str(tmp_path), spec.model_dump_json(), count=1)
    (whole, *expected), *broken = torch.load(tmp_path / "found.pt", weights_only=True)
    assert whole == 0
    for divided, *actual in broken:
        assert divided >= 1
        for found, wanted in zip(actual, expected, strict=True):
            assert (found - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.timeout(300)
def test_a_rank_that_outgrows_memory_leaves_nobody_waiting(tmp_path: Path) -> None:
    spec = spec_for(world_size=2)
    run_ranks(_short_of_memory, str(tmp_path), spec.model_dump_json(), count=2)
