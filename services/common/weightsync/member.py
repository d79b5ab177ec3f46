"""A member's side of a weight-sync session: what trainer and rollouts do when the controller asks.

    agree_plan -> form -> [prepare -> transfer -> adopt]* ; abort from any point

The live weights of a receiver change in ``adopt`` only, and only to a version whose digest the sender
reported. Calls of an older epoch are refused.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.common.errors import (
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    UnavailableError,
)
from services.common.weightsync.arena import WeightArena, whole_tensors
from services.common.weightsync.endpoints import (
    WeightSink,
    WeightSource,
    on_device,
    pack_weights,
)
from services.common.weightsync.group import KeyValueStore, WeightGroup, form_group
from services.common.weightsync.plan import (
    TensorSpec,
    WeightPlan,
    fsdp_shards,
    make_plan,
    version_digest,
)
from services.common.weightsync.transfer import (
    TransferError,
    Transferred,
    receive_version,
    send_version,
)

logger = logging.getLogger(__name__)

# The transfer keeps its deadline by itself; this much later it is given up from outside.
_MARGIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """One member's view of a transfer."""

    digests: tuple[str, ...]
    """Of each source that took part, in order: one for a sender, all for a receiver."""
    num_bytes: int
    """Bytes sent or received."""
    seconds: float
    """From the order to the verified end."""


class WeightMember:
    """Takes part in weight sessions as sender (with a source) or receiver (with a sink)."""

    def __init__(
        self,
        *,
        source: WeightSource | None = None,
        sink: WeightSink | None = None,
        device: torch.device,
        host: str,
        rendezvous: Callable[[str], KeyValueStore],
        on_adopted: Callable[[int], None] = lambda version: None,
    ) -> None:
        if (source is None) == (sink is None):
            raise ValueError("a weight member has either a source or a sink")
        self._source = source
        self._sink = sink
        self._device = device
        self._host = host
        self._rendezvous = rendezvous
        self._on_adopted = on_adopted
        self._arena: WeightArena | None = None
        self._number: int | None = None
        self._checksums: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._group: WeightGroup | None = None
        self._epoch = 0
        self._staged: tuple[int, str] | None = None
        self._adopted: tuple[int, str] | None = None
        self._stall_s = 0.0

    def describe(self) -> Sequence[TensorSpec]:
        """What this member can send.

        Raises:
            FailedPreconditionError: If it is a receiver.
        """
        if self._source is None:
            raise FailedPreconditionError("only the trainer describes weights; ask the trainer")
        return self._source.weight_specs()

    def agree_plan(
        self,
        tensors: Sequence[TensorSpec],
        bucket_bytes: int,
        *,
        num_sources: int = 1,
        source: int | None = None,
    ) -> str:
        """Make the plan and its arena; returns the plan's hash.

        Args:
            tensors: In sending order.
            bucket_bytes: Most bytes of one collective.
            num_sources: Trainer ranks that send; each holds the rows that FSDP2 gives it.
            source: Number of this member among them; None for a receiver.

        Raises:
            ValueError: If there is no such plan.
        """
        if (source is None) != (self._source is None):
            raise ValueError(
                "a member with a source sends, and only that; the controller mixed them up"
            )
        plan = make_plan(tensors, bucket_bytes, fsdp_shards(tensors, num_sources))
        if self._arena is None or (self._number, self._arena.plan) != (source, plan):
            self._arena = WeightArena(plan, self._device, source=source)
            self._number = source
            self._staged = None
        return plan.plan_hash

    async def form(
        self,
        epoch: int,
        *,
        receiver: int,
        num_receivers: int,
        backend: str,
        scope: str,
        timeout_s: float,
    ) -> None:
        """Join the group of an epoch, leaving an older one.

        Args:
            epoch: Number of the group; higher than any before.
            receiver: Number of this member among the receivers, from 0; ignored for a source.
            num_receivers: Receivers of the group.
            backend: ``gloo`` or ``nccl``.
            scope: Where the members meet.
            timeout_s: Deadline.

        Raises:
            FailedPreconditionError: If a group of this or a newer epoch was formed before, or no plan is
                agreed on.
            UnavailableError: If not all members came in time.
        """
        if self._arena is None:
            raise FailedPreconditionError(
                "no plan is agreed on; agree on one before forming a group"
            )
        if epoch <= self._epoch:
            raise FailedPreconditionError(
                f"epoch must grow: {epoch} was asked, but this member is at {self._epoch}",
                epoch=epoch,
                current=self._epoch,
            )
        self._leave()
        self._epoch = epoch
        try:
            group = await asyncio.to_thread(
                form_group,
                backend,
                self._rendezvous(scope),
                sources=tuple(self._arena.buffers),
                rank=0 if self._source is not None else receiver + 1,
                num_receivers=num_receivers,
                host=self._host,
                device=self._device,
                timeout_s=timeout_s,
            )
        except (RuntimeError, TimeoutError) as error:
            raise UnavailableError(
                f"weight group of epoch {epoch} was not formed within {timeout_s} s: {error}",
                epoch=epoch,
            ) from error
        if epoch != self._epoch:
            group.abort()
            raise FailedPreconditionError(f"epoch {epoch} was aborted while it formed", epoch=epoch)
        self._group = group
        logger.info("weight group formed", extra={"epoch": epoch, "receivers": num_receivers})

    async def prepare(self, epoch: int, version: int, plan_hash: str) -> None:
        """Get ready for a transfer; the trainer copies its weights into the arena here.

        Raises:
            FailedPreconditionError: If epoch or plan are not this member's.
        """
        _, plan = self._member_of(epoch)
        if plan.plan_hash != plan_hash:
            raise FailedPreconditionError(
                f"plan {plan_hash[:12]} was asked, but this member agreed to "
                f"{plan.plan_hash[:12]}; agree again"
            )
        # The version in service may come again: for the sake of a member that joined since.
        if self._adopted is not None and version < self._adopted[0]:
            raise FailedPreconditionError(
                f"weight versions only grow: {version} was announced, but {self._adopted[0]} is in service",
                version=version,
            )
        if self._source is not None and self._arena is not None:
            self._checksums = await asyncio.to_thread(pack_weights, self._source, self._arena)

    async def transfer(self, epoch: int, version: int, timeout_s: float) -> TransferReport:
        """Send or receive a version; a receiver stages it beside the live weights.

        Raises:
            DataLossError: If what arrived is not what was sent.
            DeadlineExceededError: If it took longer than ``timeout_s``.
            UnavailableError: If a member was lost.
        """
        group, _ = self._member_of(epoch)
        assert self._arena is not None
        self._staged = None
        start = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s + _MARGIN_S):
                done = await asyncio.to_thread(self._exchange, group, epoch, version, timeout_s)
        except TransferError as error:
            raise DataLossError(str(error), version=version) from error
        except TimeoutError as error:
            self._leave()
            raise DeadlineExceededError(
                f"transfer of version {version} took longer than {timeout_s} s; the group was ended",
                version=version,
            ) from error
        except RuntimeError as error:
            self._leave()
            raise UnavailableError(
                f"transfer of version {version} lost a member: {error}", version=version
            ) from error
        if self._sink is not None:
            self._staged = (version, version_digest(done.digests))
        return TransferReport(
            digests=done.digests, num_bytes=done.num_bytes, seconds=time.perf_counter() - start
        )

    async def adopt(self, version: int, digest: str) -> float:
        """Put the staged version into service; returns the seconds without a token.

        Raises:
            FailedPreconditionError: If that version is not staged.
            DataLossError: If the staged bytes are not those that the sender reported.
        """
        if self._adopted == (version, digest):
            return self._stall_s
        if self._staged is None or self._staged[0] != version:
            raise FailedPreconditionError(
                f"version {version} is not staged here (staged: {self._staged}); transfer it first"
            )
        if self._staged[1] != digest:
            raise DataLossError(
                f"version {version} arrived with digest {self._staged[1][:12]}, but was sent "
                f"with {digest[:12]}; it is refused",
                version=version,
            )
        assert self._sink is not None and self._arena is not None
        self._stall_s = await self._sink.adopt_weights(version, whole_tensors(self._arena))
        self._adopted = (version, digest)
        self._staged = None
        self._on_adopted(version)
        return self._stall_s

    def abort(self, epoch: int, reason: str) -> None:
        """Give up an epoch. Live weights stay as they are."""
        if epoch < self._epoch:
            return
        self._epoch = epoch
        self._leave()
        logger.warning("weight group aborted", extra={"epoch": epoch, "reason": reason})

    def _exchange(
        self, group: WeightGroup, epoch: int, version: int, timeout_s: float
    ) -> Transferred:
        """Send or receive, on a stream of its own beside whatever else the device does."""
        assert self._arena is not None
        if self._stream is None and self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)
        with on_device(self._device), torch.cuda.stream(self._stream):
            if self._source is None:
                return receive_version(
                    group, self._arena, epoch=epoch, version=version, timeout_s=timeout_s
                )
            if self._checksums is None:
                raise TransferError(f"version {version} was not prepared here; prepare it first")
            return send_version(
                group,
                self._arena,
                self._checksums,
                epoch=epoch,
                version=version,
                timeout_s=timeout_s,
            )

    def _leave(self) -> None:
        group, self._group = self._group, None
        self._staged = None
        if group is not None:
            group.abort()

    def _member_of(self, epoch: int) -> tuple[WeightGroup, WeightPlan]:
        if epoch != self._epoch or self._group is None or self._arena is None:
            raise FailedPreconditionError(
                f"this member is not in a weight group of epoch {epoch} (its epoch is "
                f"{self._epoch}); form it first",
                epoch=epoch,
                current=self._epoch,
            )
        return self._group, self._arena.plan
