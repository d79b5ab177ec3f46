"""A rank that runs out of GPU memory ends all ranks: their NCCL collectives are aborted, not timed out."""

import asyncio
import os
import time
from pathlib import Path

import pytest
import torch
from torch import distributed

from services.common.runspec.run import RunSpec
from services.trainer.collectives import join_processes
from services.trainer.engines.fsdp.parallel import build_topology, distribute
from services.trainer.ranks.command_group import CommandGroup, RankFailedError
from services.trainer.ranks.follower import Follower
from services.trainer.ranks.leader import Leader
from services.wire.step_command import StepCommand
from tests.helpers.batches import policy_of, random_queue, rank_of, spec_for
from tests.helpers.ports import free_port
from tests.helpers.ranks import run_ranks
from tests.helpers.shortage import limited

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
RANKS = 2


def _short_of_memory(rank: int, folder: str, port: int, spec_json: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    join_processes(device=device, rank=rank, world_size=RANKS)
    spec = RunSpec.model_validate_json(spec_json)
    policy = policy_of(spec).to(device)
    queue = random_queue(policy_of(spec))
    topology = build_topology(spec.trainer, device=device, rank=rank, world_size=RANKS)
    distribute(policy, spec.trainer, topology)
    trained = rank_of(spec, policy, queue, topology=topology)
    command_group = CommandGroup(RANKS)
    begin = time.monotonic()
    with command_group.listening():
        if rank == 1:
            limited(policy, 1, in_backward=False)
            with pytest.raises(RankFailedError, match="rank 1: a micro-batch"):
                Follower(command_group, trained).follow()
        else:
            leader = Leader()
            leader.attach(trained, command_group)
            with pytest.raises(RankFailedError, match="rank 1: a micro-batch"):
                asyncio.run(leader.train_step(StepCommand(1, queue.meta)))
            leader.stop()
    assert not distributed.is_initialized(), "the process groups are aborted"
    (Path(folder) / f"seconds-{rank}").write_text(f"{time.monotonic() - begin:.2f}")


def test_a_rank_without_memory_ends_the_others_by_aborted_collectives(tmp_path: Path) -> None:
    """The collectives' own deadline is 24 hours, so a rank that ends was aborted."""
    spec = spec_for(world_size=RANKS)
    run_ranks(_short_of_memory, str(tmp_path), free_port(), spec.model_dump_json(), count=RANKS)
    print([(tmp_path / f"seconds-{rank}").read_text() for rank in range(RANKS)])
