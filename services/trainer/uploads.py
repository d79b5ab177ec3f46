"""Reports a trainer's uploads to the object store: metrics, gauges, and what it does now."""

import asyncio
from typing import Final

from services.common.quantities import size_text
from services.common.stores import UploadStatus
from services.trainer import metrics
from services.trainer.ranks.leader import Leader
from services.wire.controller import UPLOAD_FAILING_GAUGE, UPLOADED_STEP_GAUGE, WorkerSession

_EVERY_S: Final = 1.0


async def report_uploads(leader: Leader, session: WorkerSession, run_id: str) -> None:
    """Reports until it is cancelled; returns at once if the run has no object store."""
    last_line = ""
    while (status := leader.upload_status()) is not None:
        metrics.observe_uploads(run_id, status)
        line = described(status)
        # Other activities, such as a save, keep their line while nothing is uploaded.
        session.report(
            activity=line if line != last_line else None,
            gauges={
                "checkpoint_upload_bytes": status.done_bytes,
                "checkpoint_upload_total_bytes": status.total_bytes,
                UPLOADED_STEP_GAUGE: status.stored_step,
                UPLOAD_FAILING_GAUGE: status.failing_s,
            },
        )
        last_line = line
        await asyncio.sleep(_EVERY_S)


def described(status: UploadStatus) -> str:
    """Returns one line about the present upload; empty if there is none."""
    if not status.step:
        return ""
    if status.cause:
        since = f"for {status.failing_s:.0f} s"
        return f"cannot upload the checkpoint of step {status.step} {since}: {status.cause}"
    size = f"{size_text(status.done_bytes)} of {size_text(status.total_bytes)}"
    waiting = f", {status.num_waiting} more wait" if status.num_waiting else ""
    return f"uploading the checkpoint of step {status.step}: {size}{waiting}"
