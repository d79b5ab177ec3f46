"""Members of a run's weight group: connections, plan agreement, and concurrent calls with liveness probes."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

from services.common.errors import (
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    ServiceError,
)
from services.common.rpc.client import open_channel
from services.common.runspec.run import WeightSyncSpec
from services.common.runspec.weight_modes import (
    BUCKET_BYTES,
    HANDLE,
    HOST_MODE,
    MODES,
    transport_of,
)
from services.common.task_group import TaskGroup, unwrapped
from services.controller.membership import Worker
from services.controller.run.state.worker_failures import UnpublishableError, UnresponsiveError
from services.weightsync.weight_plan import TensorSpec, WeightPlan, make_plan, row_shards
from services.wire.weightsync import WeightSyncClient

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Interval at which a member's process is probed during a call.
_PROBE_EVERY_S = 0.5
# Max probes per second to all members together, because each costs this process CPU time. With many
# members, the interval and the time-out grow.
_PROBES_PER_S = 250
# Number of time-outs that are retried because this process itself was late.
_MAX_LATE = 2


class WeightMembers:
    """Connected weight sources (trainer ranks) and receivers (rollouts)."""

    def __init__(self, run_id: str, spec: WeightSyncSpec) -> None:
        self._run_id = run_id
        self._spec = spec
        self._mode: str = spec.mode
        self._backend: str = spec.backend
        # Fallbacks if members cannot reach each other, as (mode, backend).
        self._fallbacks: list[tuple[str, str]] = []
        self._stack = AsyncExitStack()
        self._tensors: tuple[TensorSpec, ...] = ()
        self._bucket_bytes = 0
        self._devices: dict[str, str] = {}
        self._hosts: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._reserved: dict[str, WeightSyncClient] = {}
        # Members that prepared a version since they agreed on the plan. Before that, a process may stand
        # still for longer than ``answer_timeout_s``: it allocates its buffers, which are pinned memory of
        # tens of GB in some modes, and loads the libraries of its group.
        self._prepared: set[str] = set()
        self.sources: dict[str, WeightSyncClient] = {}
        """Trainer ranks that send, in the order of the rows of the weights that they hold."""
        self.rollouts: dict[str, WeightSyncClient] = {}
        """Receivers, by worker."""
        self.plan: WeightPlan
        """Agreed weight plan; available once the trainer is connected."""

    async def close(self) -> None:
        await self._stack.aclose()

    async def open(self, trainer: Worker, rollouts: Sequence[Worker]) -> None:
        """Connects to all members and agrees on a plan with them.

        Members that share a GPU use other transports, because NCCL does not connect two processes on one GPU.

        Raises:
            DataLossError: If members made different plans.
            UnresponsiveError: If sources do not answer; it names the ranks.
            ServiceError: If a member does not answer or cannot take part.
        """
        self._hosts = {worker.worker_id: worker.host_id for worker in (trainer, *rollouts)}
        self._addresses = {worker.worker_id: worker.address for worker in (trainer, *rollouts)}
        first = await self._connect(trainer.address)
        self.sources = {trainer.worker_id: first}
        described = (await self.call_all({trainer.worker_id: first.describe()}))[trainer.worker_id]
        for number, address in enumerate(described.source_addresses[1:], 1):
            self._addresses[name := f"{trainer.worker_id}/{number}"] = address
            self.sources[name] = await self._connect(address)
        await self._probe_sources()
        self._tensors = described.tensors
        self._make_plan(described.device)
        self.rollouts = {w.worker_id: await self._connect(w.address) for w in rollouts}
        await self._agree(self.all())
        if not self._spec.is_stored and self._share_gpus():
            self._fallbacks = self._shared_gpu_fallbacks()
            if self._fallbacks:
                await self._use_path(*self._fallbacks.pop(0))

    async def _probe_sources(self) -> None:
        """Raises UnresponsiveError if sources do not answer; its message names all of them."""
        items = self.sources.items()
        probes = [_probe(name, member, self._silence_s(name)) for name, member in items]
        results = await asyncio.gather(*probes, return_exceptions=True)
        if errors := [result for result in results if result is not None]:
            if isinstance(errors[0], UnresponsiveError):
                errors[0].message = "; ".join(map(str, errors))
            raise errors[0]

    async def switch_transfer_path(self, error: ServiceError) -> None:
        """Agrees on the next fallback transport.

        Raises:
            ServiceError: ``error``, if no fallback is left.
        """
        if not self._fallbacks:
            raise error
        mode, backend = self._fallbacks.pop(0)
        logger.warning(
            "falling back to a slower weight transfer",
            extra={"run": self._run_id, "why": str(error), "mode": mode, "backend": backend},
        )
        await self._use_path(mode, backend)

    async def admit(self, rollouts: Sequence[Worker]) -> bool:
        """Adds further rollouts; returns False if the current transport does not reach them.

        Raises:
            DataLossError: If they made a different plan.
            FailedPreconditionError: If no transport reaches them.
            ServiceError: If one does not answer or cannot take part.
        """
        backend = self.backend()
        clients = {w.worker_id: await self._connect(w.address) for w in rollouts}
        try:
            await self._agree(clients)
            is_one_gpu = self._spec.backend == HANDLE or len(set(self._devices.values())) == 1
            is_reached = is_one_gpu if backend == HANDLE else not self._share_gpus()
            if not (is_reached or self._spec.is_stored):
                return False
            self.backend()
            self.rollouts |= clients
            self._hosts |= {worker.worker_id: worker.host_id for worker in rollouts}
            self._addresses |= {worker.worker_id: worker.address for worker in rollouts}
        finally:
            for name in clients.keys() - self.rollouts.keys():
                self._devices.pop(name, None)
        return True

    def peers(self, new_rollouts: Sequence[str]) -> dict[str, list[str]]:
        """Returns serving rollouts as senders, each with the rollouts of ``new_rollouts`` on its host.

        Rollouts on the trainer's host are left out: the trainer itself is on their host.
        """
        may_lend = MODES[self._mode].lends and len(self.sources) == 1 and not self._spec.is_stored
        if not may_lend or self.backend() == HANDLE:
            return {}
        (trainer,) = self.sources
        there = {self._hosts[name]: name for name in self.rollouts if name not in new_rollouts}
        there.pop(self._hosts[trainer], None)
        near: dict[str, list[str]] = {}
        for name in new_rollouts:
            if (peer := there.get(self._hosts[name])) is not None:
                near.setdefault(peer, []).append(name)
        return near

    def remove_rollouts(self, names: Sequence[str]) -> None:
        for name in names:
            self.rollouts.pop(name, None)
            self._devices.pop(name, None)

    def reserve(self, names: Sequence[str]) -> None:
        """Excludes rollouts that keep their weights for now."""
        for name in names:
            self._reserved[name] = self.rollouts.pop(name)

    def unreserve(self, names: Iterable[str]) -> None:
        """Includes reserved rollouts again."""
        for name in names:
            self.rollouts[name] = self._reserved.pop(name)

    def note_prepared(self, names: Iterable[str]) -> None:
        """Notes members that have prepared a version: from now on they answer in ``answer_timeout_s``."""
        self._prepared.update(names)

    def all(self) -> dict[str, WeightSyncClient]:
        return {**self.sources, **self.rollouts}

    def backend(self) -> str:
        """Returns the collective backend that all members share.

        Raises:
            FailedPreconditionError: If there is none; the message names the members' devices.
        """
        backend, mode = self._backend, MODES[self._mode]
        device_types = {mode.wire_device(device) for device in self._devices.values()}
        if len(device_types) > 1:
            raise FailedPreconditionError(
                f"trainer and rollouts must have their weights on the same kind of device, got "
                f"{self._devices}; give all of them a GPU or none, or set weight_sync.mode to {HOST_MODE}"
            )
        (device,) = device_types
        if self._spec.is_stored:
            return backend
        if backend == HANDLE and (device == "cpu" or len(set(self._devices.values())) == 1):
            return HANDLE
        fitting = transport_of(device)
        if backend not in ("auto", fitting):
            raise FailedPreconditionError(
                f"weight_sync.backend must be {fitting} or auto for transfers from {device} to {device} "
                f"(mode {self._mode}), got {backend}; set weight_sync.backend to auto, or weight_sync.mode "
                f"to {HOST_MODE} to transfer through host memory"
            )
        return fitting

    async def call_all(self, calls: Mapping[str, Awaitable[_T]]) -> dict[str, _T]:
        """Awaits a call to each member and returns the results by member.

        Raises:
            ServiceError: At the first failure, naming the member, or as soon as a member's process
                stops answering probes; the other calls are cancelled.
        """
        results: dict[str, _T] = {}

        async def answer(name: str, call: Awaitable[_T]) -> None:
            try:
                results[name] = await call
            except ServiceError as error:
                error.message = f"{name}: {error.message}"
                raise

        with unwrapped(ServiceError):
            async with TaskGroup() as tasks:
                answers = [tasks.create_task(answer(*item)) for item in calls.items()]
                watch = tasks.create_task(self._watch(list(calls)))
                await asyncio.wait(answers)
                watch.cancel()
        return results

    async def abort(self, epoch: int, reason: str, names: Sequence[str] | None = None) -> list[str]:
        """Aborts an epoch on some members, or on all; returns those that do not answer."""
        members = self.all()
        if names is not None:
            members = {name: member for name, member in members.items() if name in names}
        answers = await asyncio.gather(
            *(_aborted(m, epoch, reason, self._silence_s(name)) for name, m in members.items()),
            return_exceptions=True,
        )
        return [
            name
            for name, answer in zip(members, answers, strict=True)
            if isinstance(answer, ServiceError)
        ]

    def unpublishable(self, silent_members: Collection[str]) -> UnpublishableError:
        """Returns the error of a publication whose members do not answer; its text has their addresses."""
        names = " and ".join(f"{name} at {self._addresses[name]}" for name in silent_members)
        verb = "do" if " and " in names else "does"
        return UnpublishableError(
            f"{names} {verb} not answer, so no version can be published",
            {name.partition("/")[0] for name in silent_members},
        )

    def _silence_s(self, name: str) -> float:
        """Returns the seconds without an answer after which a member counts as lost."""
        answer_s, form_s = self._spec.answer_timeout_s, self._spec.form_timeout_s
        return answer_s if name in self._prepared else max(answer_s, form_s)

    async def _watch(self, names: Sequence[str]) -> None:
        members = {name: member for name, member in self.all().items() if name in names}
        round_s = len(members) / _PROBES_PER_S

        async def watch(name: str, member: WeightSyncClient) -> None:
            while True:
                await asyncio.sleep(max(_PROBE_EVERY_S, round_s))
                await _probe(name, member, max(self._silence_s(name), 2 * round_s))

        async with TaskGroup() as watches:
            for name, member in members.items():
                watches.create_task(watch(name, member))

    def _make_plan(self, device: str) -> None:
        # Stored versions pass through host memory, bucket by bucket.
        wire = "cpu" if self._spec.is_stored else MODES[self._mode].wire_device(device)
        shards = row_shards(self._tensors, len(self.sources))
        self._bucket_bytes = self._spec.staged_bucket_bytes(
            BUCKET_BYTES.get(wire, BUCKET_BYTES["cpu"]), num_sources=len(self.sources)
        )
        self.plan = make_plan(self._tensors, self._bucket_bytes, shards)

    def _shared_gpu_fallbacks(self) -> list[tuple[str, str]]:
        """Returns (mode, backend) candidates for members that share GPUs, best first."""
        if self._spec.backend == HANDLE:
            return []  # an explicit handle backend has no fallback
        is_one_gpu = self._spec.backend == "auto" and len(set(self._devices.values())) == 1
        by_handle = [(self._mode, HANDLE)] if is_one_gpu else []
        return [*by_handle, (HOST_MODE, self._spec.backend)]

    async def _use_path(self, mode: str, backend: str) -> None:
        """Agrees on a plan under another mode and backend."""
        logger.info(
            "trainer and rollouts share GPUs",
            extra={
                "run": self._run_id,
                "devices": str(self._devices),
                "mode": mode,
                "backend": backend,
            },
        )
        self._mode, self._backend = mode, backend
        self._make_plan(next(iter(self._devices.values())))
        await self._agree(self.all())

    def _share_gpus(self) -> bool:
        mode = MODES[self._mode]
        gpus = [gpu for gpu in self._devices.values() if mode.wire_device(gpu) == "cuda"]
        return len(set(gpus)) < len(gpus)

    async def _agree(self, members: Mapping[str, WeightSyncClient]) -> None:
        self._prepared -= members.keys()
        numbers = {name: number for number, name in enumerate(self.sources)}
        answers = await self.call_all(
            {
                name: member.agree_plan(
                    self._tensors,
                    self._bucket_bytes,
                    num_sources=len(self.sources),
                    source=numbers.get(name),
                    mode=self._mode,
                )
                for name, member in members.items()
            }
        )
        self._devices |= {name: answer.device for name, answer in answers.items()}
        plan_hash = self.plan.plan_hash
        hashes = {name: answer.plan_hash for name, answer in answers.items()}
        other_hashes = {name: text[:12] for name, text in hashes.items() if text != plan_hash}
        if other_hashes:
            raise DataLossError(
                f"all members must make the weight plan {plan_hash[:12]} of the controller, but got "
                f"{other_hashes}; install the same release everywhere"
            )

    async def _connect(self, address: str) -> WeightSyncClient:
        # Each call is watched by probes, whose deadlines depend on the phase: pings of gRPC must not end
        # it earlier.
        silence_s = max(self._spec.answer_timeout_s, self._spec.form_timeout_s)
        channel = open_channel(address, "worker", run_id=self._run_id, silence_s=silence_s)
        return WeightSyncClient(await self._stack.enter_async_context(channel))


async def _aborted(member: WeightSyncClient, epoch: int, reason: str, timeout_s: float) -> None:
    await _in_time(lambda: member.abort(epoch, reason, timeout_s=timeout_s), timeout_s)


async def _probe(name: str, member: WeightSyncClient, timeout_s: float) -> None:
    try:
        await _in_time(lambda: member.alive(timeout_s=timeout_s), timeout_s)
    except DeadlineExceededError as error:
        raise UnresponsiveError(name, f"does not answer within {timeout_s:g} s: {error}") from error
    except ServiceError as error:
        raise UnresponsiveError(name, f"does not answer: {error}") from error


async def _in_time(call: Callable[[], Awaitable[_T]], timeout_s: float) -> _T:
    """Awaits a call; repeats it if it timed out while this process itself was late."""
    for _ in range(_MAX_LATE):
        begin = time.monotonic()
        try:
            return await call()
        except DeadlineExceededError:
            if time.monotonic() - begin < 2 * timeout_s:
                raise
    return await call()
