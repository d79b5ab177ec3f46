"""State of a sleeping trainer in host memory: it can be saved, cannot be used, and is restored exactly."""

from threading import Event
from typing import Any

import pytest
import torch

from services.common.errors import FailedPreconditionError
from services.common.memory.trainer import Stays
from services.trainer.engines.fsdp import engine
from services.trainer.engines.fsdp.host_copy import OffloadedState
from services.trainer.model.policy import Policy
from services.trainer.ranks.command_group import CommandGroup
from services.trainer.ranks.leader import Leader
from services.trainer.ranks.rank import Rank
from services.wire.step_command import StepCommand
from tests.helpers.batches import policy_of, random_queue, rank_of, spec_of

SPEC = spec_of()
QUEUE = random_queue(policy_of(SPEC))


def _state_of(rank: Rank, *, stays: Stays = "nothing") -> OffloadedState:
    """Returns the policy's state, which its engine moves to host memory."""
    engine: Any = rank.runner.engine
    state: OffloadedState = engine._state
    state._stays = stays
    return state


def _trained(policy: Policy) -> Rank:
    rank = rank_of(SPEC, policy, QUEUE)
    rank.train(StepCommand(1, QUEUE.meta))
    return rank


def test_training_is_unchanged_by_sleep() -> None:
    policies = policy_of(SPEC), policy_of(SPEC)
    for policy, sleeps in zip(policies, (False, True), strict=True):
        rank = _trained(policy)
        for step in (2, 3):
            if sleeps:
                state = _state_of(rank)
                state.offload()
                state.offload()
                assert state.is_offloaded
                assert all(p.untyped_storage().nbytes() == 0 for p in policy.parameters())
                state.reload()
                state.reload()
            rank.train(StepCommand(step, QUEUE.meta))
    for first, second in zip(*(policy.parameters() for policy in policies), strict=True):
        assert torch.equal(first, second)


def test_a_snapshot_of_a_trainer_that_sleeps_has_its_state() -> None:
    rank = _trained(policy_of(SPEC))
    state = _state_of(rank)
    expected = {k: v.clone() for k, v in rank.snapshot(1).parts[""].tensors.items()}
    state.offload()
    tensors = rank.snapshot(1).parts[""].tensors
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    state.reload()
    assert all(torch.equal(rank.snapshot(1).parts[""].tensors[k], v) for k, v in expected.items())


@pytest.mark.parametrize("stays", ["state", "all"])
def test_a_state_that_stays_is_not_moved_and_not_used(stays: Stays) -> None:
    policy = policy_of(SPEC)
    rank = _trained(policy)
    state, places = _state_of(rank, stays=stays), [p.data_ptr() for p in policy.parameters()]
    state.offload()
    assert [p.data_ptr() for p in policy.parameters()] == places
    assert all(state.read(p) is p for p in policy.parameters())
    state.reload()


@pytest.mark.parametrize("stays", ["nothing", "state", "all"])
async def test_a_trainer_that_sleeps_neither_trains_nor_sends(stays: Stays) -> None:
    policy = policy_of(SPEC)
    rank, leader = rank_of(SPEC, policy, QUEUE), Leader()
    _state_of(rank, stays=stays)
    leader.attach(rank, CommandGroup(1))
    await leader.sleep()
    for use in (leader.score_canary, lambda: next(leader.weight_tensors())):
        with pytest.raises(FailedPreconditionError, match="wake it first"):
            use()
    with pytest.raises(FailedPreconditionError, match="wake it first"):
        await leader.train_step(StepCommand(1, QUEUE.meta))
    await leader.wake()
    assert not (await leader.train_step(StepCommand(1, QUEUE.meta))).skipped


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("full"), ValueError("defect")])
def test_a_trainer_compiles_during_its_first_sleep(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, begun, may_end = _trained(policy_of(SPEC)), Event(), Event()
    compiled: list[object] = []

    def compile_layers(module: Policy, *_: object, **__: object) -> None:
        begun.set()
        assert may_end.wait(10)
        compiled.append(module)
        if error is not None:
            raise error

    monkeypatch.setattr(engine, "compile_first_layers", compile_layers)
    sleeper: Any = rank.runner.engine
    sleeper._compiles_asleep = True
    sleeper.sleep()
    sleeper.sleep()
    assert begun.wait(10)
    may_end.set()
    if isinstance(error, ValueError):
        with pytest.raises(ValueError, match="defect"):
            sleeper.wake()
        return
    for _ in range(2):
        sleeper.wake()
        assert compiled == [sleeper.module]
        sleeper.sleep()
