"""Tests how long a member of a weight group may be silent before it counts as lost."""

import asyncio
from types import SimpleNamespace

import pytest

from services.common.errors import DeadlineExceededError, ServiceError, UnavailableError
from services.common.runspec.run import WeightSyncSpec
from services.controller.run.state.worker_failures import UnresponsiveError
from services.controller.run.weights import members as members_module
from services.controller.run.weights.members import WeightMembers
from services.weightsync.weight_plan import TensorSpec

SPEC = WeightSyncSpec(answer_timeout_s=1.0, form_timeout_s=60.0)
CALL_S = 0.1


class Silent:
    """Fake member whose process stands still for ``silence_s`` seconds from each probe or abort on.

    Args:
        failure: Raised by its probes; None for a process that only stands still.
    """

    def __init__(self, silence_s: float, failure: ServiceError | None = None) -> None:
        self.silence_s = silence_s
        self._failure = failure
        self.num_probes = 0

    async def alive(self, *, timeout_s: float) -> None:
        self.num_probes += 1
        if self._failure is not None:
            raise self._failure
        if timeout_s < self.silence_s:
            raise DeadlineExceededError("/grpc.health.v1.Health/Check: Deadline Exceeded")

    async def abort(self, epoch: int, reason: str, *, timeout_s: float) -> None:
        await self.alive(timeout_s=timeout_s)


@pytest.fixture(autouse=True)
def fast_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "_PROBE_EVERY_S", CALL_S / 10)


def group_of(**members: Silent) -> WeightMembers:
    group = WeightMembers("run", SPEC)
    group.rollouts = dict(members)  # type: ignore[arg-type]
    return group


async def call(group: WeightMembers) -> None:
    await group.call_all({name: asyncio.sleep(CALL_S) for name in group.rollouts})


async def test_a_member_may_stand_still_until_it_has_prepared_its_first_version() -> None:
    group = group_of(busy=(busy := Silent(30.0)), other=Silent(0.0))
    await call(group)
    assert busy.num_probes > 1
    assert await group.abort(1, "a test") == []
    group.note_prepared(["busy", "other"])
    with pytest.raises(UnresponsiveError, match="busy does not answer"):
        await call(group)
    assert await group.abort(1, "a test") == ["busy"]


async def test_a_member_that_never_answers_is_lost_before_its_first_version_too() -> None:
    group = group_of(stopped=Silent(61.0))
    with pytest.raises(UnresponsiveError, match="stopped does not answer"):
        await call(group)
    assert await group.abort(1, "a test") == ["stopped"]


async def test_a_killed_member_is_seen_by_its_closed_connection_at_any_time() -> None:
    group = group_of(killed=Silent(0.0, UnavailableError("connection refused")), busy=Silent(30.0))
    with pytest.raises(UnresponsiveError, match="killed does not answer"):
        await call(group)
    assert await group.abort(1, "a test") == ["killed"]


async def test_a_member_that_stands_still_delays_no_probe_of_another() -> None:
    class Waiting(Silent):
        async def alive(self, *, timeout_s: float) -> None:
            await super().alive(timeout_s=timeout_s)
            await asyncio.sleep(timeout_s)

    group = group_of(busy=(busy := Waiting(0.0)), prepared=(prepared := Silent(0.0)))
    group.note_prepared(["prepared"])
    await call(group)
    assert (busy.num_probes, prepared.num_probes > 1) == (1, True)


async def test_an_error_names_all_members_that_do_not_answer_and_their_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, silent = WeightMembers("run", SPEC), Silent(0.0)
    tensors = (TensorSpec("w", (8, 2), "float32"),)
    described = SimpleNamespace(
        source_addresses=("10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:1"), tensors=tensors, device="cpu"
    )

    async def agree(tensors: object, bucket_bytes: int, **_: object) -> object:
        return SimpleNamespace(device="cpu", plan_hash=group.plan.plan_hash)

    async def describe() -> object:
        return described

    async def connect(address: str) -> object:
        alive = (silent if address in silent_addresses else Silent(0.0)).alive
        return SimpleNamespace(describe=describe, agree_plan=agree, alive=alive)

    monkeypatch.setattr(group, "_connect", connect)
    trainer, rollout = (
        SimpleNamespace(worker_id=name, host_id=name, address=f"{name}.example:1")
        for name in ("trainer-0", "rollout-0")
    )
    silent.silence_s, silent_addresses = 61.0, ["10.0.0.2:1"]
    with pytest.raises(UnresponsiveError, match=r"^trainer-0/2 does not answer within 60 s"):
        await group.open(trainer, [rollout])  # type: ignore[arg-type, list-item]
    silent_addresses.append("10.0.0.1:2")
    both = r"^trainer-0/1 does not answer within .*; trainer-0/2 does not answer within 60 s"
    with pytest.raises(UnresponsiveError, match=both):
        await group.open(trainer, [rollout])  # type: ignore[arg-type, list-item]
    silent.silence_s = 0.0
    await group.open(trainer, [rollout])  # type: ignore[arg-type, list-item]
    assert group.unpublishable(["rollout-0"]).message.startswith(
        "rollout-0 at rollout-0.example:1 does not answer"
    )
    assert group.unpublishable(["trainer-0/1", "trainer-0/2"]).message.startswith(
        "trainer-0/1 at 10.0.0.1:2 and trainer-0/2 at 10.0.0.2:1 do not answer"
    )
    assert group.unpublishable(["trainer-0/1", "trainer-0/2"]).worker_ids == {"trainer-0"}
