"""Limits of the data plane for one run."""

from pydantic import Field

from services.common.spec.base import SpecPart


class TransferQueueSpec(SpecPart):
    """Quota and retention of a run's samples."""

    quota_bytes: int = Field(4 << 30, ge=1 << 20)
    """Bytes that unreleased samples of the run may take; a put beyond it waits. A batch of the longest
    responses must fit."""
    put_timeout_s: float = Field(300.0, gt=0)
    """Longest wait of a producer for room before it fails with the reason."""
