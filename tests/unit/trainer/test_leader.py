"""Tests that rank 0 trains steps in order, and each step once."""

import asyncio
import threading
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from services.common.errors import FailedPreconditionError, UnavailableError
from services.trainer.checkpoint.checkpointer import Snapshot
from services.trainer.engines.fsdp.weights import WeightExport
from services.trainer.ranks.command_group import CommandGroup
from services.trainer.ranks.leader import Leader
from services.wire.step_command import StepCommand
from tests.helpers.batches import policy_of, random_queue, rank_of, spec_of


async def test_steps_are_trained_once_and_in_order() -> None:
    spec = spec_of()
    policy = policy_of(spec)
    queue = random_queue(policy)
    leader = Leader()
    with pytest.raises(UnavailableError, match="still loading"):
        await leader.train_step(StepCommand(1, queue.meta))
    leader.attach(rank_of(spec, policy, queue), CommandGroup(1))
    with pytest.raises(FailedPreconditionError, match="train step 1 next"):
        await leader.train_step(StepCommand(2, queue.meta))
    first, repeated = await asyncio.gather(
        leader.train_step(StepCommand(1, queue.meta)), leader.train_step(StepCommand(1, queue.meta))
    )
    assert first is repeated


def test_weights_come_once_by_their_names_in_the_order_of_the_specs() -> None:
    policy = policy_of(spec_of())
    export = WeightExport(policy, dtype=torch.bfloat16)
    specs, tensors = export.weight_specs(), dict(export.weight_tensors())
    assert [spec.name for spec in specs] == list(tensors)
    assert "lm_head.weight" not in tensors  # the weight is tied to the embedding
    for spec in specs:
        assert tuple(tensors[spec.name].shape) == spec.shape
        assert spec.dtype == "bfloat16"


async def test_only_the_newest_step_is_saved(tmp_path: Path) -> None:
    spec = spec_of()
    policy = policy_of(spec)
    queue = random_queue(policy)
    leader = Leader()
    leader.attach(
        rank_of(spec, policy, queue, root=tmp_path),
        CommandGroup(1),
    )
    await leader.train_step(StepCommand(1, queue.meta))
    saved = await leader.save(1)
    assert saved.folder == tmp_path / "step-00000001"
    assert saved.num_bytes == sum(file.stat().st_size for file in saved.folder.rglob("*"))
    with pytest.raises(FailedPreconditionError, match="save step 1"):
        await leader.save(0)


def test_a_fault_of_the_users_own_code_that_names_gloo_is_no_lost_rank() -> None:
    with pytest.raises(RuntimeError, match="no gloo"), CommandGroup(2).guard():
        raise RuntimeError("this loss knows no gloo")


async def test_a_save_whose_caller_leaves_is_written_before_the_next_one_begins(
    tmp_path: Path,
) -> None:
    spec = spec_of()
    policy = policy_of(spec)
    queue = random_queue(policy)
    leader, rank = Leader(), rank_of(spec, policy, queue, root=tmp_path)
    leader.attach(rank, CommandGroup(1))
    write, begun, may_end = rank.checkpointer.write, threading.Event(), threading.Event()

    def slowly(snapshot: Snapshot, keep_steps: Collection[int] = ()) -> Path:
        begun.set()
        may_end.wait(10)
        return write(snapshot, keep_steps)

    rank.checkpointer.write = slowly  # type: ignore[method-assign]
    await leader.train_step(StepCommand(1, queue.meta))
    saving = asyncio.create_task(leader.save(1))
    await asyncio.to_thread(begun.wait)
    saving.cancel()  # as if the controller died
    await leader.train_step(StepCommand(2, queue.meta))
    next_ = asyncio.create_task(leader.save(2))
    await asyncio.sleep(0.5)
    may_end.set()
    second = (await next_).folder
    first = tmp_path / "step-00000001"
    async with asyncio.timeout(10):
        while not first.exists():  # noqa: ASYNC110 -- a thread renames it
            await asyncio.sleep(0.01)
    assert saved_weights(first) and saved_weights(first) != saved_weights(second)


def saved_weights(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(folder.rglob("*.safetensors"))]
