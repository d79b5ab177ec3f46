"""What a run has achieved so far, in numbers: the summary that users read."""

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from services.controller.evaluation import Evaluation
from services.controller.weight_sync import SyncReport

_KEPT = 10_000


class Progress:
    """Collects the numbers of one run.

    Args:
        max_staleness: The bound, shown beside what was measured.
    """

    def __init__(self, max_staleness: int) -> None:
        self._bound = max_staleness
        self._steps = 0
        self._max_staleness = 0
        self._staleness_sum = 0.0
        self._syncs_ms: deque[float] = deque(maxlen=_KEPT)
        self._version = -1
        self._heldout: dict[str, Any] = {"greedy": None, "sampled": None, "weight_version": None}

    def stepped(self, metrics: Mapping[str, float]) -> None:
        """A step was committed."""
        self._steps += 1
        self._max_staleness = max(self._max_staleness, int(metrics.get("staleness_max", 0)))
        self._staleness_sum += metrics.get("staleness_mean", 0.0)

    def synced(self, report: SyncReport) -> None:
        """A version was published."""
        self._version = report.version
        self._syncs_ms.append(report.total_s * 1000)

    def evaluated(self, evaluation: Evaluation) -> None:
        """A version was evaluated."""
        if evaluation.status in ("ok", "timeout"):
            self._heldout = {
                "greedy": evaluation.greedy,
                "sampled": evaluation.sampled,
                "weight_version": evaluation.version,
                "status": evaluation.status,
            }

    def summary(self, prompts: Mapping[str, int], reasons: Mapping[str, int]) -> dict[str, Any]:
        """All numbers.

        Args:
            prompts: Groups by state, from the ledger.
            reasons: Dropped and quarantined groups by reason.
        """
        ended = ("consumed", "dropped", "quarantined")
        return {
            "steps": self._steps,
            "heldout": self._heldout,
            "staleness": {
                "max": self._max_staleness,
                "mean": self._staleness_sum / max(self._steps, 1),
                "bound": self._bound,
            },
            "prompts": {
                "issued": prompts["issued"],
                **{state: prompts[state] for state in ended},
                "outstanding": prompts["issued"] - sum(prompts[state] for state in ended),
                "reasons": dict(reasons),
            },
            "weight_version": self._version,
            "sync_ms": {"p50": self._percentile(50), "p95": self._percentile(95)},
        }

    def _percentile(self, percent: int) -> float | None:
        if not self._syncs_ms:
            return None
        if len(self._syncs_ms) == 1:
            return self._syncs_ms[0]
        return statistics.quantiles(self._syncs_ms, n=100, method="inclusive")[percent - 1]
