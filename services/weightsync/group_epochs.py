"""Current weight group of a member: one per epoch, and epochs only grow."""

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from services.common.errors import FailedPreconditionError, UnavailableError
from services.weightsync.checksum import write_checksum
from services.weightsync.endpoints import OwnThread, on_device
from services.weightsync.group import KeyValueStore, RankAssignment, WeightGroup, form_group
from services.weightsync.plan import BUCKET_ALIGNMENT

logger = logging.getLogger(__name__)


class Epochs:
    """Joins and leaves the successive weight groups of a member.

    Args:
        device: Device of the member's weights.
        host: Address of this host, as the other members reach it.
        rendezvous: Returns the store of a scope, in which members meet.
        folder: Folder for the files of a source.
    """

    def __init__(
        self,
        device: torch.device,
        host: str,
        rendezvous: Callable[[str], KeyValueStore],
        folder: Path,
    ) -> None:
        self._device = device
        self._host = host
        self._rendezvous = rendezvous
        self._folder = folder
        self._group: WeightGroup | None = None
        self._epoch = 0
        self.thread = OwnThread()
        """Thread for work that may block with the group; replaced after each group."""

    def group(self, epoch: int) -> WeightGroup:
        """Returns the group of an epoch.

        Raises:
            FailedPreconditionError: If this member is in no group of that epoch.
        """
        if epoch != self._epoch or self._group is None:
            raise FailedPreconditionError(
                f"this member has no weight group of epoch {epoch} (its epoch is "
                f"{self._epoch}); form the group first",
                epoch=epoch,
                current=self._epoch,
            )
        return self._group

    def holds(self, group: WeightGroup) -> bool:
        """Returns whether a group is still the current one."""
        return self._group is group

    async def form(
        self,
        epoch: int,
        seat: RankAssignment,
        *,
        backend: str,
        device: torch.device,
        scope: str,
        timeout_s: float,
    ) -> None:
        """Joins the group of an epoch; the caller has already left an older one.

        Args:
            epoch: Number of the group; higher than any before.
            seat: This member's rank and channels.
            backend: One of ``TRANSPORTS``.
            device: Device of the transferred tensors.
            scope: Scope of the store in which the members meet.
            timeout_s: Deadline.

        Raises:
            FailedPreconditionError: If a group of this or a newer epoch was formed or aborted
                before, or the backend cannot connect the members.
            UnavailableError: If not all members joined in time.
        """
        if epoch <= self._epoch:
            raise FailedPreconditionError(
                f"epoch must be greater than {self._epoch}, got {epoch}",
                epoch=epoch,
                current=self._epoch,
            )
        self._epoch = epoch
        values = self._rendezvous(scope)

        def join() -> WeightGroup:
            with on_device(self._device):
                # Compiles the GPU kernel, which would otherwise delay the first transfer.
                write_checksum(
                    torch.zeros(BUCKET_ALIGNMENT, dtype=torch.uint8, device=device),
                    torch.zeros(2, dtype=torch.int64, device=device),
                )
                return form_group(
                    backend,
                    values,
                    seat,
                    host=self._host,
                    device=device,
                    timeout_s=timeout_s,
                    folder=self._folder,
                )

        try:
            async with asyncio.timeout(timeout_s):
                group = await self.thread.run(join)
        except (RuntimeError, TimeoutError) as error:
            raise UnavailableError(
                f"weight group of epoch {epoch} was not formed within {timeout_s} s: {error}",
                epoch=epoch,
            ) from error
        if epoch != self._epoch:
            _end(group)
            raise FailedPreconditionError(
                f"epoch {epoch} was aborted while the group was formed", epoch=epoch
            )
        self._group = group
        logger.info(
            "weight group formed",
            extra={"epoch": epoch, "receivers": seat.num_receivers, "backend": backend},
        )

    def leave(self, epoch: int | None = None) -> bool:
        """Ends the group of this epoch, or of all up to ``epoch``; returns whether there was one.

        Ending takes NCCL half a second and Gloo up to a deadline, so it continues in a thread.
        """
        if epoch is not None:
            if epoch < self._epoch:
                return False
            self._epoch = epoch
        self.thread.leave()
        self.thread = OwnThread()
        group, self._group = self._group, None
        if group is None:
            return False
        _end(group)
        return True


def _end(group: WeightGroup) -> None:
    threading.Thread(target=group.abort, name="weights-abort", daemon=True).start()
