"""The rollout's end of the transport ``servers``: forms groups of the trainer and the servers' workers.

No bytes of weights pass here. The rollout orders the trainer, in the store of the weight group, to open a
communicator, and the workers, over the servers' HTTP interface, to join it and to receive. Before they are
connected, workers use the store through the rollout, so that they need no credentials of the run.
"""

import asyncio
import itertools
import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ClassVar, Final, Optional
from urllib.parse import urlsplit

import torch
from torch import Tensor

from services.common.runspec.weight_modes import HANDLE, transport_of
from services.common.task_group import gather_in_group, uninterrupted
from services.extras.fleets.client import ServerAwayError, ServerRefusedError
from services.extras.fleets.direct.messages import (
    ADD,
    DONE,
    FAILED,
    FORM,
    GET,
    PING,
    SET,
    VALUE,
    Message,
    decoded,
    encoded,
    plan_message,
    receive_message,
)
from services.extras.fleets.direct.source import (
    DEVICE_KEY,
    FORMED_KEY,
    ORDER_KEY,
    STATEMENT_KEY,
    STORE_OF_GROUP,
    waited,
)
from services.extras.fleets.direct.weights import DirectFleet, DirectServer, DirectWeights
from services.weightsync.group import RankAssignment, Work
from services.weightsync.transfer import HEADER_BYTES, TransferRequest, check_statement
from services.weightsync.weight_plan import WeightPlan

logger = logging.getLogger(__name__)

_LONGEST_FORM_S: Final = 40.0
"""Longest time in which the workers of a group connect; one that does not loses its session. The first group
of a process compiles a kernel and starts NCCL."""
_POLL_S: Final = 2.0
"""Longest time that a server's answer waits for a message of its workers."""
_POLL_OF_STORE_S: Final = 0.02
"""The same while a worker waits for a value of the store."""
_PING_S: Final = 5.0
"""Longest time until a worker's process answers."""
_MAX_TRIES: Final = 3
_REPORT_S: Final = 1.0
"""Time in which workers report a transfer that has missed its deadline."""
_REASON_S: Final = 0.5
"""Longest wait for the trainer's reason, once a server has failed."""

Member = tuple[DirectServer, str, int]
"""A server, its session, and the number of its workers."""


class MemberFailedError(RuntimeError):
    """A server's workers did not do a job."""


class _ReportedError(MemberFailedError):
    """A server's worker reported that a job failed: its process lives, and takes further jobs."""


class _MemberLostError(RuntimeError):
    """A server has left its group, so that another one is formed."""


class GroupRelay:
    """Orders of the rollout in one epoch of the controller.

    Args:
        num_sources: Trainer ranks that send, each with a channel.
        timeout_s: Time-out to form a group.
    """

    fleet: ClassVar[DirectFleet | None] = None
    """The servers of this process's rollout."""
    _newest: ClassVar[Optional["GroupRelay"]] = None
    _jobs: ClassVar[Iterator[int]] = itertools.count()
    """Numbers of jobs, in all epochs: a server's workers answer those of an epoch that has ended, too."""
    _inboxes: ClassVar[dict[int, list[tuple[int, Message]]]] = {}
    """Messages of workers by running job: each request brings those for all jobs with its server."""

    def __init__(self, num_sources: int, *, timeout_s: float) -> None:
        self._num_sources = num_sources
        self._timeout_s = min(timeout_s, _LONGEST_FORM_S)
        self.stores: list[Any] = []
        """Store of each channel."""
        self._groups, self._orders = itertools.count(), itertools.count()
        self._num_unsent = 0
        self._members: list[Member] | None = None
        """Members of the newest group; None before the first one."""
        self._forming = asyncio.Lock()
        self._repeating: set[str] = set()
        """Addresses of the servers to which the trainer sends a version again."""
        self._plan: WeightPlan | None = None
        self.is_open = True
        """False once the controller has ended the epoch."""
        self.last_request: TransferRequest | None = None

    @classmethod
    def of_channel(
        cls, store: Any, assignment: RankAssignment, *, timeout_s: float
    ) -> "RelayedChannel":
        """Returns the rollout's end of a channel; the channels of an epoch are opened one after the other."""
        relay = cls._newest
        if relay is None or not relay.is_open or relay.is_whole:
            relay = cls._newest = cls(assignment.num_sources, timeout_s=timeout_s)
        relay.stores.append(store)
        return RelayedChannel(relay)

    @property
    def is_whole(self) -> bool:
        """True if all channels are open."""
        return len(self.stores) == self._num_sources

    @classmethod
    def newest(cls) -> "GroupRelay":
        """Returns the relay of the newest epoch.

        Raises:
            RuntimeError: If no epoch is open.
        """
        relay = cls._newest
        if relay is None or not relay.is_open:
            raise RuntimeError("the weight group has ended")
        return relay

    async def form(self, plan: WeightPlan) -> None:
        """Forms a group of all attached servers, unless the newest group has just these.

        Raises:
            RuntimeError: If the trainer does not open the group, or servers fail again and again.
        """
        self._plan = plan
        async with self._forming:
            for _ in range(_MAX_TRIES):
                servers = self._servers()
                sessions = {(server.address, server.session) for server in servers}
                if self._members is not None and sessions == {
                    (server.address, session) for server, session, _ in self._members
                }:
                    return
                self._members = None
                members = await self._opened(servers)
                if await self._connected(members):
                    self._members = members
                    return
        raise RuntimeError(
            f"servers failed {_MAX_TRIES} times in turn while they joined the weight group"
        )

    async def transfer(
        self, plan: WeightPlan, request: TransferRequest
    ) -> tuple[tuple[str, ...], list[tuple[DirectServer, str]]]:
        """Sends a version to the members of the group.

        Returns:
            Digest of each source, and the servers that have received the version, each with its session.

        Raises:
            RuntimeError: If a server failed: the transfer of the others has no certain end either.
        """
        members = self._members
        if members is None:
            raise RuntimeError("no group was formed for this transfer")
        if not members:
            return await self._stated(plan, request), []
        message = receive_message(request)
        try:
            answers = await gather_in_group(
                [
                    self._received(member, message, request.timeout_s + _REPORT_S)
                    for member in members
                ]
            )
        except _MemberLostError:
            self._members = None
            raise
        digests = {tuple(worker.get("digests", ())) for server in answers for worker in server}
        if len(digests) != 1:
            raise RuntimeError(f"servers received different versions: {sorted(digests)}")
        return digests.pop(), [(server, session) for server, session, _ in members]

    async def repeat(self, server: DirectServer, weights: DirectWeights) -> None:
        """Makes the trainer send a version again, to one server.

        Raises:
            ServerAwayError: If the server or the trainer does not do it.
        """
        request, plan = self.last_request, self._plan
        if (
            not self.is_open
            or request is None
            or plan is None
            or request.version != weights.version
        ):
            raise ServerAwayError(f"{server.address} waits for the next weight version")
        self._repeating.add(server.address)
        try:
            async with asyncio.timeout(2 * self._timeout_s + request.timeout_s):
                members = await self._opened([server])
                if not members:
                    raise ServerAwayError(f"{server.address} was lost before it received weights")
                answers = await self._connected(members, again=request)
        except TimeoutError as error:
            raise ServerAwayError(
                f"{server.address} did not receive version {request.version} in time"
            ) from error
        except RuntimeError as error:
            raise ServerAwayError(f"{server.address} received no weights: {error}") from error
        finally:
            self._repeating.discard(server.address)
        if not answers or answers[0].get("digest") != weights.digest:
            raise ServerAwayError(
                f"{server.address} received another version than {weights.version}"
            )

    def end(self) -> None:
        """Notes that the controller has ended the epoch."""
        self.is_open = False

    def _servers(self) -> list[DirectServer]:
        """Returns the servers that can join a group now."""
        if self.fleet is None:
            raise RuntimeError("this rollout is attached to no servers")
        return [
            server
            for server in self.fleet.attached
            if isinstance(server, DirectServer) and server.address not in self._repeating
        ]

    async def _opened(self, servers: Sequence[DirectServer]) -> list[Member]:
        """Starts the members of servers; those that have none are lost."""

        async def open_one(server: DirectServer) -> Member | None:
            session = server.session
            try:
                await server.open_group()
                member = server, session, len(server.worker_devices)
                await self._run(member, {"kind": PING}, _PING_S)
            except (MemberFailedError, ServerAwayError, ServerRefusedError) as error:
                self._lose(server, session, str(error))
                return None
            return member

        members = await gather_in_group([open_one(server) for server in servers])
        return [member for member in members if member is not None]

    async def _connected(
        self, members: Sequence[Member], *, again: TransferRequest | None = None
    ) -> Any:
        """Connects servers with the trainer.

        Args:
            again: Order of the version that the trainer sends at once, to these servers only.

        Returns:
            The answers of all workers; False if servers were lost.

        Raises:
            RuntimeError: If the trainer failed.
        """
        assert self._plan is not None
        group = next(self._groups)
        backend = await self._backend(
            [d for server, _, _ in members for d in server.worker_devices]
        )
        num_workers = sum(count for _, _, count in members)
        order = {
            "group": group,
            "backend": backend,
            "workers": num_workers,
            "again": again is not None,
            "timeout_s": again.timeout_s if again is not None else 0.0,
        }
        # The source follows the orders one after the other: none may be missing.
        await uninterrupted(self._give_order(json.dumps(order)))
        message = {
            "kind": FORM,
            "plan": plan_message(self._plan),
            "backend": backend,
            "workers": num_workers,
            "timeout_s": self._timeout_s,
        }
        first = [1 + sum(count for _, _, count in members[:i]) for i in range(len(members))]
        jobs = [
            self._joined(member, {**message, "rank": rank}, group, again)
            for member, rank in zip(members, first, strict=True)
        ]
        try:
            answers = await gather_in_group(jobs)
        except _MemberLostError:
            return False
        for store in self.stores:
            why = await asyncio.to_thread(store.get, FORMED_KEY.format(group))
            if why:
                raise RuntimeError(f"the trainer did not open the weight group: {why.decode()}")
        return [worker for server in answers for worker in server] or True

    async def _give_order(self, order: str) -> None:
        number = next(self._orders)
        for store in self.stores:
            await asyncio.to_thread(store.set, ORDER_KEY.format(number), order)

    async def _joined(
        self, member: Member, message: Message, group: int, again: TransferRequest | None
    ) -> list[Message]:
        """Makes a server's workers join a group, and receive a repeated version.

        Raises:
            _MemberLostError: If they do not: the fleet has lost the server.
        """
        server, session, _ = member
        try:
            answers = await self._run(member, message, self._timeout_s, group=group)
            if again is not None:
                answers = await self._run(member, receive_message(again), again.timeout_s)
        except (MemberFailedError, ServerAwayError, ServerRefusedError) as error:
            reason = await self._reason_of_trainer(group)
            self._lose(server, session, f"it joined no weight group: {error}{reason}")
            raise _MemberLostError(server.address) from error
        return answers

    async def _reason_of_trainer(self, group: int) -> str:
        """Returns the trainer's reason why a group was not formed, for a message; empty without one."""
        for store in self.stores:
            with suppress(Exception):  # the message is about a server
                why = await asyncio.to_thread(waited, store, FORMED_KEY.format(group), _REASON_S)
                if why:
                    return f"; the trainer: {why.decode()}"
        return ""

    async def _received(self, member: Member, message: Message, timeout_s: float) -> list[Message]:
        """Makes a server's workers receive a version.

        Raises:
            _MemberLostError: If they do not.
        """
        server, session, _ = member
        try:
            return await self._run(member, message, timeout_s)
        except (MemberFailedError, ServerAwayError, ServerRefusedError) as error:
            # A trainer that fails must not end what the servers serve: they join the next group as they are.
            if self.is_open and not isinstance(error, _ReportedError):
                # It attaches again, with new members, and receives the version then.
                why = f"it did not receive version {message['version']}: {error}"
                self._lose(server, session, why)
            raise _MemberLostError(str(error)) from error

    async def _run(
        self, member: Member, message: Message, timeout_s: float, *, group: int = -1
    ) -> list[Message]:
        """Gives all workers of a server a job; passes on their operations of the store until it is done.

        Args:
            message: The job; with a rank, that of the first worker.
            group: Number of the group whose store the workers use.

        Raises:
            MemberFailedError: If a worker failed, or did not finish in time.
            ServerAwayError: If the server does not answer.
        """
        server, session, num_workers = member
        job = next(self._jobs)
        messages: list[tuple[int, Message]] = []
        for worker in range(num_workers):
            with_rank = {"rank": message["rank"] + worker} if "rank" in message else {}
            host = {"host": urlsplit(server.address).hostname}
            messages.append((worker, {**message, **host, **with_rank, "job": job}))
        answers: dict[int, Message] = {}
        questions: list[_Question] = []
        inbox = self._inboxes[job] = []
        try:
            async with asyncio.timeout(timeout_s):
                while len(answers) < num_workers:
                    if server.session != session:
                        raise MemberFailedError(f"the session with {server.address} has ended")
                    wait_s = _POLL_OF_STORE_S if questions else _POLL_S
                    for worker, answer in await server.exchange(messages, wait_s=wait_s):
                        # A job that was given up has no inbox, and its workers get no answer.
                        self._inboxes.get(answer["job"], []).append((worker, answer))
                    arrived = [*inbox]
                    inbox.clear()
                    for worker, answer in arrived:
                        if answer["kind"] not in (DONE, FAILED):
                            questions.append(_Question(worker, answer, self.stores, group))
                        else:
                            _check(server, answer)
                            answers[worker] = answer
                    messages = [(q.worker, q.future.result()) for q in questions if q.future.done()]
                    questions = [q for q in questions if not q.future.done()]
        except TimeoutError as error:
            raise MemberFailedError(
                f"{server.address} did not {message['kind']} within {timeout_s:.1f} s"
            ) from error
        finally:
            del self._inboxes[job]
        return [answers[worker] for worker in sorted(answers)]

    async def _backend(self, devices: Sequence[str]) -> str:
        """Returns the transport between the trainer's ranks and workers.

        Raises:
            RuntimeError: If none connects them.
        """
        stores = self.stores
        values = [await asyncio.to_thread(store.get, DEVICE_KEY) for store in stores]
        sources = [value.decode() for value in values]
        members = [*sources, *devices]
        kinds = {device.partition(":")[0] for device in members}
        if kinds == {"cpu"}:
            return transport_of("cpu")
        if kinds == {"cuda"} and len(set(members)) == len(members):
            return transport_of("cuda")
        if len(set(members)) == 1:
            return HANDLE
        raise RuntimeError(
            "weight_sync.mode servers needs the trainer and the servers each on GPUs of their own, all on "
            f"one GPU, or all on CPUs, but the trainer has {sources} and servers have {list(devices)}; set "
            "weight_sync.mode to cpu_async"
        )

    async def _stated(self, plan: WeightPlan, request: TransferRequest) -> tuple[str, ...]:
        """Returns the digest of each source for a version that no server received."""
        number, self._num_unsent = self._num_unsent, self._num_unsent + 1
        digests = []
        for source, store in enumerate(self.stores):
            text = await asyncio.to_thread(store.get, STATEMENT_KEY.format(number))
            stated = torch.frombuffer(bytearray(bytes.fromhex(text.decode())), dtype=torch.uint8)
            computed: Tensor = stated[HEADER_BYTES:].clone().view(torch.int64).view(-1, 2)
            digests.append(check_statement(stated, computed, plan, request, source=source))
        return tuple(digests)

    def _lose(self, server: DirectServer, session: str, why: str) -> None:
        if self.fleet is not None and server.session == session:
            self.fleet.lose(server, why)


class _Question:
    """An operation of a worker's store, on that of the run's controller; executed in a thread."""

    def __init__(self, worker: int, question: Message, stores: Sequence[Any], group: int) -> None:
        self.worker = worker
        self._question = question
        self._stores = stores
        self._group = group
        self.future: Future[Message] = Future()
        threading.Thread(target=self._execute, name="weights-store", daemon=True).start()

    def _execute(self) -> None:
        answer: Message = {"kind": VALUE, "request": self._question.get("request", -1)}
        try:
            answer["value"] = encoded(self._value())
        except Exception as error:  # noqa: BLE001 -- the worker reports it
            answer["error"] = f"{type(error).__name__}: {error}"
        self.future.set_result(answer)

    def _value(self) -> bytes:
        question = self._question
        channel, _, key = str(question["key"]).partition("/")
        store = self._stores[int(channel.removeprefix("source"))]
        key = f"{STORE_OF_GROUP.format(self._group)}/{key}"
        if question["kind"] == SET:
            store.set(key, decoded(question["value"]))
            return b""
        if question["kind"] == ADD:
            return str(store.add(key, int(question["amount"]))).encode()
        if question["kind"] == GET:
            value: bytes = store.get(key)
            return value
        raise ValueError(f"{question['kind']!r} is no operation of a store")


def _check(server: DirectServer, answer: Mapping[str, Any]) -> None:
    if answer["kind"] == FAILED:
        raise _ReportedError(f"{server.address}: {answer['why']}")


class RelayedChannel:
    """The rollout's end of a channel, with the process-group methods that ``Channel`` uses."""

    def __init__(self, relay: GroupRelay) -> None:
        self._relay = relay

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Work:
        """Does nothing: the workers of the servers receive."""
        return _Done()

    def abort(self) -> None:
        """Ends the epoch; what servers receive fails with the trainer's end."""
        self._relay.end()


class _Done:
    """A broadcast in which this process has no part."""

    def wait(self) -> bool:
        """Returns at once."""
        return True
