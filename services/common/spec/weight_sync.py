"""How new weights reach the rollouts."""

from typing import Literal

from pydantic import Field

from services.common.spec.base import SpecPart


class WeightSyncSpec(SpecPart):
    """Transport, buckets and deadlines of the weight plane."""

    backend: Literal["auto", "nccl", "gloo", "handle"] = "auto"
    """Transport; ``auto`` takes NCCL when every member has a GPU of its own, and Gloo when none has.
    ``handle``: through memory that the trainer lends, of the GPU that all members share, or of their host if
    weights are sent from there; ``auto`` takes it where all members share one GPU."""
    mode: Literal["shadow", "inplace", "cpu_async", "delta"] = "shadow"
    """How weights travel. ``shadow``: into a second copy while generation goes on. ``inplace``: straight into
    the live weights under a pause, where there is no memory for a second copy. ``cpu_async``: through host
    memory and Gloo, where members share no NCCL. ``delta``: only what changed, for slow links."""
    senders: Literal["ranks", "leader"] = "ranks"
    """Who sends. ``ranks``: every trainer rank its own rows. ``leader``: rank 0, after a gather; that is also
    how merged adapters and tensors divided by columns are sent."""
    bucket_bytes: int | None = Field(None, ge=1 << 16)
    """Bytes sent by one collective. Default: 512 MiB over NCCL, 64 MiB over Gloo, where a bucket is also the
    unit in which a stopped member is noticed."""
    publish_every: int = Field(1, ge=1)
    """Trainer steps between two published versions."""
    form_timeout_s: float = Field(60.0, gt=0)
    """Deadline for building the group."""
    transfer_timeout_s: float | None = Field(None, gt=0)
    """Deadline of one transfer, verification included. Default: 1.5 s and the time that the bytes take on a
    slow wire (100 MB/s over Gloo, 5 GB/s over NCCL). A member that is gone is noticed earlier."""
    answer_timeout_s: float = Field(1.0, gt=0)
    """A member that gives no sign of life for so long is lost. Longer where hosts are overloaded; a stopped
    rollout holds up the others for about three times as long."""
    adopt_timeout_s: float = Field(60.0, gt=0)
    """A rollout that has not put a received version into service by then is replaced. Without
    ``rollout.partial_rollout`` it finishes its running responses first, for as long as that takes."""
