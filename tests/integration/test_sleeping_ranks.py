"""FSDP2 ranks sleep and wake together, and train the same as without sleep."""

import asyncio
from pathlib import Path

import pytest
import torch
from torch import distributed

from services.common.runspec.run import RunSpec
from services.trainer.engines.fsdp.parallel import build_topology, distribute
from services.trainer.ranks.command_group import CommandGroup
from services.trainer.ranks.follower import Follower
from services.trainer.ranks.leader import Leader
from services.wire.step_command import StepCommand
from tests.helpers.batches import CPU, Queue, policy_of, random_queue, rank_of, spec_of
from tests.helpers.ranks import run_ranks


def _train(rank: int, folder: str, spec_json: str, sleeps: bool) -> None:
    """Trains two steps, with or without a sleep between them, and saves this rank's rows."""
    spec = RunSpec.model_validate_json(spec_json)
    size = spec.trainer.world_size
    store = f"file://{folder}/store-{sleeps}"
    if size > 1:
        distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    policy, queue = policy_of(spec), random_queue(policy_of(spec))
    topology = build_topology(spec.trainer, device=CPU, rank=rank, world_size=size)
    distribute(policy, spec.trainer, topology)
    trained = rank_of(spec, policy, queue, topology=topology)
    command_group = CommandGroup(size)
    if rank > 0:
        Follower(command_group, trained).follow()
    else:
        leader = Leader()
        leader.attach(trained, command_group)
        asyncio.run(_lead(leader, queue, sleeps=sleeps))
    rows = dict(trained.runner.engine.export_weights(rows=True))
    torch.save(rows, Path(folder) / f"rows-{sleeps}-{rank}.pt")
    distributed.destroy_process_group()


async def _lead(leader: Leader, queue: Queue, *, sleeps: bool) -> None:
    await leader.train_step(StepCommand(1, queue.meta))
    if sleeps:
        await leader.sleep()
        await leader.wake()
        await asyncio.to_thread(leader.score_canary)
        await leader.sleep()
        await leader.wake()
    await leader.train_step(StepCommand(2, queue.meta))
    leader.stop()


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_slept_have_the_weights_of_ranks_that_did_not(
    tmp_path: Path, ranks: int
) -> None:
    spec = spec_of(trainer={"world_size": ranks, "dtype": "bfloat16"})
    for sleeps in (False, True):
        run_ranks(_train, str(tmp_path), spec.model_dump_json(), sleeps, count=ranks)
    for rank in range(ranks):
        contents = [torch.load(tmp_path / f"rows-{sleeps}-{rank}.pt") for sleeps in (False, True)]
        assert contents[0].keys() == contents[1].keys()
        assert all(torch.equal(value, contents[1][name]) for name, value in contents[0].items())
