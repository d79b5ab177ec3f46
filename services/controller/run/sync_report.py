"""What a published weight version took."""

from dataclasses import dataclass

from services.controller import metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One published version; of one that nobody receives, no more than its number."""

    version: int
    digest: str = ""
    num_bytes: int = 0
    """On the wire, from all sources."""
    copy_s: float = 0.0
    """Until the trainer had copied its weights and scored the canary: what its next step waits for."""
    prepare_s: float = 0.0
    """Until everybody was ready, the copy included."""
    transfer_s: float = 0.0
    """Until every rollout had verified what it received."""
    adopt_s: float = 0.0
    """Until every rollout served the version."""
    check_s: float = 0.0
    """Until every rollout had scored the canary like the trainer."""
    stall_s: float = 0.0
    """Longest time in which a rollout produced no token."""
    receivers: tuple[str, ...] = ()
    """Who serves the version now."""
    lost: tuple[str, ...] = ()
    """Rollouts that were lost on the way; they do not serve the version."""

    @property
    def total_s(self) -> float:
        """From the finished step to every rollout serving its weights."""
        return self.prepare_s + self.transfer_s + self.adopt_s


def observe(run: str, report: SyncReport) -> None:
    """Record a published version."""
    phases = {
        "prepare": report.prepare_s,
        "transfer": report.transfer_s,
        "adopt": report.adopt_s,
        "check": report.check_s,
        "total": report.total_s,
    }
    for phase, seconds in phases.items():
        metrics.WEIGHT_SYNC_SECONDS.labels(run, phase).observe(seconds)
    metrics.WEIGHT_SYNC_BYTES.labels(run).inc(report.num_bytes)
    metrics.WEIGHT_SYNCS.labels(run, "ok").inc()
