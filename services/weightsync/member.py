"""Member of a weight group: executes a weight session's phases in trainer and rollouts for the controller.

    agree_plan -> form_group -> [prepare -> transfer -> adopt -> check]* ; abort from any phase

A receiver's live weights change only in ``adopt``, and only to a version whose digest the sources
reported; it is ready only after ``check``. Calls with an older epoch are rejected.
"""

import asyncio
import logging
import math
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from prometheus_client import Counter, Gauge, Histogram

from services.common.callables import load_callable
from services.common.errors import (
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    UnavailableError,
)
from services.common.runspec.weight_modes import weight_mode
from services.common.telemetry.metrics import SYNC, Phases
from services.weightsync.canary import Canary, difference
from services.weightsync.endpoints import OwnThread, WeightSink, WeightSource, on_device
from services.weightsync.group import Epochs, KeyValueStore, RankAssignment, WeightGroup
from services.weightsync.modes.base import PeerSender, Receiver, Sender
from services.weightsync.shared_buffers import gpu_of
from services.weightsync.transfer import TransferError, Transferred, TransferRequest
from services.weightsync.weight_plan import TensorSpec, make_plan, row_shards, version_digest

# Part of the error message of a Gloo collective that missed its deadline.
_GLOO_LATE = "Timed out waiting"

MEMBER_SECONDS = Histogram(
    "slipstream_weight_sync_member_duration_seconds",
    "Time of a weight sync in one member, by phase.",
    ["phase"],
    buckets=SYNC,
)
MEMBER_BYTES = Counter(
    "slipstream_weight_sync_member_bytes_total", "Bytes of weights that a member sent or received."
)
SUPERSEDED = Counter(
    "slipstream_weight_sync_superseded_total",
    "Versions that a newer one replaced between their transfer and their adoption.",
)
REJECTED = Counter(
    "slipstream_weight_sync_rejected_total",
    "Versions that a rollout rejected, by the failed check.",
    ["reason"],
)
CANARY_DIFFERENCE = Gauge(
    "slipstream_weight_sync_canary_difference_nats",
    "Mean absolute difference of the canary's logprobs between trainer and rollout.",
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """Report of one member about a transfer."""

    digests: tuple[str, ...]
    """Digest of each source that took part, in order: one for a sender, all for a receiver."""
    num_bytes: int
    """Bytes sent or received."""
    seconds: float
    """Time from the request to the verified end."""
    manifest: str = ""
    """Digest of the manifest that a source wrote to a store; otherwise empty."""


def explained(error: BaseException, request: TransferRequest) -> BaseException:
    """Converts the error of a failed transfer to the error that the controller receives."""
    match error:
        case TransferError():
            REJECTED.labels("checksum").inc()
            return DataLossError(str(error), version=request.version)
        case TimeoutError():
            return DeadlineExceededError(
                f"the transfer of version {request.version} took longer than {request.timeout_s} s",
                version=request.version,
            )
        case RuntimeError() if _GLOO_LATE in str(error):
            return DeadlineExceededError(
                f"the transfer of version {request.version} is too slow for its deadline, or a link between "
                f"members is interrupted: {error}",
                version=request.version,
            )
        case RuntimeError():
            return UnavailableError(
                f"the transfer of version {request.version} lost a member: {error}",
                version=request.version,
            )
    return error


class WeightMember:
    """Takes part in weight sessions as sender (with a source) or receiver (with a sink).

    Args:
        source: The weights to send; None for a receiver.
        sink: Receives the weights; None for a sender.
        peers: Other devices of a receiver's engine, which hold parts of the received weights.
        host: Address of this host, as the other members reach it.
        rendezvous: Returns the store of a scope, in which members meet.
        on_ready: Called with each version that is in service, verified and checked.
        folder: Folder for a sender's files: the run's own, which its receivers see under the same
            path; None for the folder of temporary files.
    """

    def __init__(
        self,
        *,
        source: WeightSource | None = None,
        sink: WeightSink | None = None,
        device: torch.device,
        peers: Sequence[torch.device] = (),
        host: str,
        rendezvous: Callable[[str], KeyValueStore],
        on_ready: Callable[[int], None] = lambda version: None,
        folder: Path | None = None,
    ) -> None:
        if (source is None) == (sink is None):
            raise ValueError("a weight member needs either a source or a sink")
        self._source = source
        self._sink = sink
        self._device = device
        self._peers = tuple(peers)
        self._on_ready = on_ready
        self._scorer = OwnThread()
        self._epochs = Epochs(device, host, rendezvous, folder or Path(tempfile.gettempdir()))
        self._agreed: tuple[str, int | None, str] | None = None
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._peer_sender: PeerSender | None = None
        self._stream: torch.cuda.Stream | None = None
        # A thread that an abort abandoned must end before the next one uses the buffers.
        self._buffers = threading.Lock()
        # A version that is being adopted must not be overwritten.
        self._adopting = asyncio.Lock()
        self._staged: tuple[int, str] | None = None
        self._adopted: tuple[int, str] | None = None
        self._stall_s = 0.0
        self.source_addresses: Sequence[str] = ()
        """``host:port`` of all trainer ranks that send, if this is the first of several."""

    @property
    def device_name(self) -> str:
        """Device of this member's weights: ``cpu``, or ``cuda:`` and the GPU's UUID."""
        if self._device.type == "cpu":
            return "cpu"
        return gpu_of(self._device)

    def describe(self) -> Sequence[TensorSpec]:
        """Returns the tensors that this member can send.

        Raises:
            FailedPreconditionError: If it is a receiver.
        """
        if self._source is None:
            raise FailedPreconditionError(
                "only the trainer describes weights; send the request to the trainer"
            )
        return self._source.weight_specs()

    def agree_plan(
        self,
        tensors: Sequence[TensorSpec],
        bucket_bytes: int,
        *,
        num_sources: int = 1,
        source: int | None = None,
        mode: str = "shadow",
    ) -> str:
        """Builds the plan and its buffers; returns the plan's hash.

        Args:
            tensors: Tensors in sending order.
            bucket_bytes: Max bytes of one collective.
            num_sources: Number of trainer ranks that send; the holders of a tensor among them each have
                ``ceil(rows / holders)`` of its rows.
            source: Number of this member among them; None for a receiver.

        Raises:
            ValueError: If there is no such plan, or this member cannot take part in it.
        """
        plan = make_plan(tensors, bucket_bytes, row_shards(tensors, num_sources))
        agreed = (plan.plan_hash, source, mode)
        if self._agreed == agreed:
            return plan.plan_hash
        kind = weight_mode(mode)
        self._sender = self._receiver = self._staged = self._agreed = None
        if self._source is not None and source is not None:
            self._sender = load_callable(kind.sender)(plan, self._device, source)
        elif self._sink is not None and source is None:
            devices = (self._device, *self._peers)
            self._receiver = load_callable(kind.receiver)(plan, devices, self._sink)
        else:
            raise ValueError(
                "a member with a source only sends, and a member with a sink only receives"
            )
        self._agreed = agreed
        return plan.plan_hash

    async def form_group(
        self,
        epoch: int,
        *,
        receiver: int,
        num_receivers: int,
        backend: str,
        scope: str,
        timeout_s: float,
        url: str = "",
    ) -> None:
        """Joins the group of an epoch after leaving an older one; see :meth:`Epochs.join_group`.

        Args:
            epoch: Number of the group; higher than any before.
            receiver: Number of this member among the receivers, from 0; -1 for a source, and for a
                rollout that sends its weights to joining ones. Ignored for a trainer rank.
            scope: Scope of the store in which the members meet.
            url: Folder of the run's stored versions, or its URL; empty for members that meet.

        Raises:
            FailedPreconditionError: If a rollout should send, but has not kept the received
                weights.
        """
        side = self._side()
        assert self._agreed is not None
        _, source, mode = self._agreed
        num_sources = len(side.plan.sources)
        peer_sender = self._receiver if source is None and receiver < 0 else None
        if peer_sender is not None and not isinstance(peer_sender, PeerSender):
            raise FailedPreconditionError("this rollout has no weights to send to a peer")
        if peer_sender is not None:
            source = 0
        assignment = RankAssignment(
            sources=range(num_sources) if source is None else (source,),
            num_sources=num_sources,
            rank=receiver + 1 if source is None else 0,
            num_receivers=num_receivers,
        )
        await self._leave_group(keeps=peer_sender is not None)
        self._peer_sender = peer_sender
        await self._epochs.join_group(
            epoch,
            assignment,
            backend=backend,
            device=torch.device("cpu") if weight_mode(mode).through_host else self._device,
            scope=scope,
            timeout_s=timeout_s,
            url=url,
        )

    async def prepare(self, epoch: int, version: int, plan_hash: str) -> int:
        """Prepares for a transfer; the trainer packs its weights here.

        Returns:
            The version whose bytes are still held, so that only changes need to be sent; -1 for none.

        Raises:
            FailedPreconditionError: If epoch or plan are not this member's, or the version is older
                than the one in service.
        """
        self._epochs.group(epoch)
        side = self._side()
        if side.plan.plan_hash != plan_hash:
            raise FailedPreconditionError(
                f"expected plan {side.plan.plan_hash[:12]}, got "
                f"{plan_hash[:12]}; agree on a plan again"
            )
        # The live version may be sent again, for a member that joined since.
        if self._adopted is not None and version < self._adopted[0]:
            raise FailedPreconditionError(
                f"a weight version must be greater than the version in service ({self._adopted[0]}), got "
                f"{version}",
                version=version,
            )
        with MEMBER_SECONDS.labels("prepare").time():
            if self._receiver is not None:
                await self._receiver.prepare()
            else:
                await self._epochs.thread.run(lambda: self._pack(version))
        return side.held_version

    async def transfer(self, request: TransferRequest) -> TransferReport:
        """Sends or receives a version; a receiver stages it next to the live weights.

        Raises:
            DataLossError: If the received bytes differ from the sent ones.
            DeadlineExceededError: If it exceeds the deadline of ``request``.
            UnavailableError: If a member was lost.
        """
        group = self._epochs.group(request.epoch)
        if self._staged is not None:
            SUPERSEDED.inc()
            self._staged = None
        start = time.perf_counter()
        phases = Phases(MEMBER_SECONDS)
        async with self._adopting:
            try:
                async with asyncio.timeout(request.timeout_s):
                    phases.end_phase("turn")
                    transferred, manifest = await self._epochs.thread.run(
                        lambda: self._exchange(group, request, phases)
                    )
                    phases.end_phase("reply")
            except BaseException as error:
                if self._epochs.holds(group):  # a newer group may have been formed meanwhile
                    await self._leave_group()
                raise explained(error, request) from error
        if not self._epochs.holds(group):
            raise UnavailableError(f"epoch {request.epoch} was aborted during its transfer")
        seconds = time.perf_counter() - start
        MEMBER_SECONDS.labels("transfer").observe(seconds)
        logger.debug(
            "weights transferred", extra={"version": request.version, **phases.milliseconds()}
        )
        MEMBER_BYTES.inc(transferred.num_bytes)
        if self._sink is not None and self._peer_sender is None:
            self._staged = (request.version, version_digest(transferred.digests))
        return TransferReport(
            digests=transferred.digests,
            num_bytes=transferred.num_bytes,
            seconds=seconds,
            manifest=manifest,
        )

    async def retain(self, epoch: int, names: Collection[str], *, timeout_s: float) -> None:
        """Deletes all versions but some from the store of this source.

        Raises:
            DeadlineExceededError: If it takes longer than ``timeout_s``.
            ServiceError: If the store fails.
        """
        group = self._epochs.group(epoch)
        try:
            async with asyncio.timeout(timeout_s):
                await self._epochs.thread.run(lambda: group.retain(names))
        except TimeoutError as error:
            if self._epochs.holds(group):
                await self._leave_group()
            raise DeadlineExceededError(
                f"old weight versions were not deleted from the store within {timeout_s:.0f} s"
            ) from error

    async def adopt(self, version: int, digest: str) -> float:
        """Puts the staged version into service; returns the seconds without a token.

        Raises:
            FailedPreconditionError: If that version is not staged.
            DataLossError: If the staged bytes differ from those that the sources reported.
        """
        async with self._adopting:
            if self._adopted == (version, digest) and self._staged is None:
                return self._stall_s
            if self._staged is None or self._staged[0] != version or self._receiver is None:
                raise FailedPreconditionError(
                    f"version {version} is not staged here (staged: {self._staged}); transfer it first"
                )
            if self._staged[1] != digest:
                REJECTED.labels("digest").inc()
                raise DataLossError(
                    f"version {version} is rejected: its digest is {self._staged[1][:12]}, expected "
                    f"{digest[:12]}",
                    version=version,
                )
            with MEMBER_SECONDS.labels("adopt").time():
                self._stall_s = await self._receiver.adopt(version)
            self._adopted = (version, digest)
            self._staged = None
        return self._stall_s

    async def score(self) -> Canary:
        """Scores the canary under the sent weights.

        Raises:
            FailedPreconditionError: If this member is a receiver.
        """
        if self._source is None:
            raise FailedPreconditionError(
                "only the trainer scores the canary; send the request to the trainer"
            )
        # A separate thread, because a transfer of the same weights may occupy the group's thread.
        return await self._scorer.run(self._source.score_canary)

    async def check(self, version: int, canary: Canary, tolerance: float) -> float:
        """Compares the live weights with the trainer's by the canary; reports readiness if they agree.

        Returns:
            The mean absolute difference of the logprobs.

        Raises:
            FailedPreconditionError: If the version is not in service.
            DataLossError: If they differ by more than ``tolerance``; nothing is served until an
                adoption.
        """
        if self._sink is None or self._adopted is None or self._adopted[0] != version:
            raise FailedPreconditionError(
                f"version {version} is not in service here; adopt it first"
            )
        scored = await self._sink.score(canary.token_ids)
        distance = difference(canary.logprobs, scored) if scored else 0.0
        CANARY_DIFFERENCE.set(distance)
        if distance > tolerance:
            REJECTED.labels("canary").inc()
            if all(map(math.isfinite, canary.logprobs)):
                cause = "weights were written to wrong positions"
            else:
                cause = (
                    "the trainer's are not finite, so training has diverged: lower "
                    "trainer.optimizer.learning_rate"
                )
            message = (
                f"under version {version} the canary's logprobs differ from the trainer's by {distance:.3g} "
                f"on average, more than {tolerance:.3g}; {cause}"
            )
            self._adopted = None
            await self._sink.refuse_weights(message)
            raise DataLossError(message, version=version)
        self._on_ready(version)
        return distance

    async def abort(self, epoch: int, reason: str) -> None:
        """Aborts an epoch. Live weights stay unchanged."""
        if await self._leave_group(epoch):
            logger.warning("weight group aborted", extra={"epoch": epoch, "reason": reason})

    def _pack(self, version: int) -> None:
        assert self._sender is not None and self._source is not None
        with self._buffers:
            self._sender.pack(self._source, version)

    def _exchange(
        self, group: WeightGroup, request: TransferRequest, phases: Phases
    ) -> tuple[Transferred, str]:
        """Sends or receives on a separate stream, concurrently with other work of the device.

        Returns:
            The result, and the digest of the manifest that a source wrote to a store.
        """
        manifest = ""
        phases.end_phase("thread")
        if self._stream is None and self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device, priority=-1)
        with self._buffers, on_device(self._device), torch.cuda.stream(self._stream):
            group.begin(request.stored, request.manifests)
            if (sender := self._sender or self._peer_sender) is not None:
                transferred = sender.send(group, request)
                manifest = group.commit()
            else:
                assert self._receiver is not None
                transferred = self._receiver.receive(group, request)
        phases.end_phase("wire")
        return transferred, manifest

    async def _leave_group(self, epoch: int | None = None, *, keeps: bool = False) -> bool:
        """Leaves the group and, unless ``keeps``, drops received weights; returns True if it had a group."""
        had_group = self._epochs.leave_group(epoch)
        self._staged = None
        if had_group and self._receiver is not None and not keeps:
            await self._receiver.give_up()
        return had_group

    def _side(self) -> Sender | Receiver:
        side = self._sender or self._receiver
        if side is None:
            raise FailedPreconditionError(
                "no plan is agreed on; agree on one before forming a group"
            )
        return side
