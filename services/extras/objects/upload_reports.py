"""Reports of a worker on the uploads of its checkpoints: events, activity, gauges and metrics."""

import threading
from dataclasses import dataclass, field

from services.common.stores import size_text
from services.extras.objects.transfers import Outage
from services.trainer import metrics
from services.wire.controller import WorkerSession


@dataclass(frozen=True, slots=True)
class UploadStatus:
    """State of the uploads of one process."""

    step: int = 0
    """Step whose checkpoint is being uploaded; 0 if none is."""
    done_bytes: int = 0
    """Bytes of that checkpoint that the store has."""
    total_bytes: int = 0
    """Size of that checkpoint."""
    num_waiting: int = 0
    """Checkpoints that wait for their upload, besides the current one."""
    stored_step: int = 0
    """Newest step that this process knows to be complete in the store."""
    failing_s: float = 0.0
    """Seconds since the upload first failed; 0 if it does not fail."""
    cause: str = ""
    """First cause of that failure."""


@dataclass(slots=True)
class UploadReports:
    """Reports each upload once, whenever it is asked; threads add uploads, one thread reports.

    Args:
        url: URL of the checkpoints.
    """

    url: str
    _uploads: list[tuple[int, str]] = field(default_factory=list, init=False)
    """``(step, upload)`` of the checkpoints in the store that are not reported."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _outage: Outage = field(default_factory=Outage, init=False)
    _last_line: str = field(default="", init=False)

    def add(self, *uploads: tuple[int, str]) -> None:
        """Adds checkpoints whose manifest is in the store.

        Args:
            uploads: Step and name of each upload, by which the run's record leaves out what it has already.
        """
        with self._lock:
            self._uploads += uploads

    def report(self, session: WorkerSession, status: UploadStatus) -> None:
        """Reports the state, and what happened since the last call."""
        self._report_failure(session, status)
        with self._lock:
            uploads, self._uploads = self._uploads, []
        for step, upload in uploads:
            message = f"uploaded step {step} to {self.url}"
            session.report_event("CheckpointUploaded", message, step=step, key=upload)
        metrics.UPLOAD_BYTES.labels(session.run_id, "uploaded").set(status.done_bytes)
        metrics.UPLOAD_BYTES.labels(session.run_id, "all").set(status.total_bytes)
        metrics.UPLOAD_FAILING.labels(session.run_id).set(status.failing_s)
        metrics.UPLOADED_STEP.labels(session.run_id).set(status.stored_step)
        line = activity(status)
        # Other activities, such as a save, keep their line while nothing is uploaded.
        session.report(
            activity=line if line != self._last_line else None,
            gauges={
                "checkpoint_upload_bytes": status.done_bytes,
                "checkpoint_upload_total_bytes": status.total_bytes,
                "checkpoint_uploaded_step": status.stored_step,
                "checkpoint_upload_failing_s": status.failing_s,
            },
        )
        self._last_line = line

    def _report_failure(self, session: WorkerSession, status: UploadStatus) -> None:
        match self._outage.changed(status.failing_s):
            case "failing":
                message = (
                    f"{activity(status)}; training continues, and the checkpoint stays on this host"
                )
                session.report_event("CheckpointUploadFailing", message, step=status.step)
            case "resumed":
                session.report_event(
                    "CheckpointUploadResumed", f"uploads checkpoints to {self.url} again"
                )


def activity(status: UploadStatus) -> str:
    """Returns one line about the present upload; empty if there is none."""
    if not status.step:
        return ""
    if status.cause:
        since = f"for {status.failing_s:.0f} s"
        return f"cannot upload the checkpoint of step {status.step} {since}: {status.cause}"
    size = f"{size_text(status.done_bytes)} of {size_text(status.total_bytes)}"
    waiting = f", {status.num_waiting} more wait" if status.num_waiting else ""
    return f"uploading the checkpoint of step {status.step}: {size}{waiting}"
