"""Numbers that summarize the progress of a run for users."""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from services.controller.rules.evaluation import (
    Evaluation,
    EvaluationState,
    StartedEvaluation,
)
from services.controller.rules.learning import RewardHistory
from services.controller.rules.ledger import Ledger
from services.controller.run.dispatch.rollout_pool import RolloutPool
from services.controller.run.weights.session import SyncReport
from services.controller.store.ledgers import StepMetrics

# Max newest weight syncs from which the summary computes percentiles: each event sorts them.
_MAX_SYNCS = 1000
# Max rollouts that the event of a step lists individually.
_MAX_NAMED_ROLLOUTS = 32


class Progress:
    """Collects the summary of one run.

    Args:
        first_step: Step of the checkpoint that the run starts from.
    """

    def __init__(self, max_staleness: int, *, first_step: int = 0) -> None:
        self._bound = max_staleness
        self._steps = self._first_step = first_step
        self._max_staleness = 0
        self._staleness_sum = 0.0
        self._syncs_ms: deque[float] = deque(maxlen=_MAX_SYNCS)
        self._sync: dict[str, float | str] = {}
        self._version = -1
        self._heldout: dict[str, Any] = {"greedy": None, "sampled": None, "weight_version": None}
        self._evaluation: dict[str, Any] = {}
        self._advice: Mapping[str, str] = {}
        self._rewards = RewardHistory()
        self._reward_drop: dict[str, Any] = {}
        self.skipped_since: int | None = None
        """First of the newest consecutive steps that changed no weights; None if the last one did."""
        self.nothing_learned: Mapping[str, str] = {}
        """``reason`` and ``message`` if the newest steps trained nothing."""
        self.best: Mapping[str, Any] | None = None
        """``step``, ``weight_version`` and ``score`` of the saved version with the highest held-out score."""
        self._best_before: Mapping[str, Any] | None = None

    @property
    def num_steps(self) -> int:
        """Committed steps, which include those before the checkpoint that the run starts from."""
        return self._steps

    def restore(
        self,
        summary: Mapping[str, Any],
        *,
        steps: int,
        syncs_ms: Iterable[float],
        step_metrics: Iterable[StepMetrics] = (),
    ) -> None:
        """Restores the numbers from an earlier summary.

        Args:
            summary: Result of :meth:`summary`; may be empty.
            steps: Trained steps: fewer than in the summary if the run was rewound.
            syncs_ms: Latencies of the weight syncs so far, in milliseconds.
            step_metrics: Metrics of the steps in :meth:`RewardHistory.sampled_steps`.
        """
        for record in step_metrics:
            self._rewards.add(record.step, record.metrics)
        self._update_drop()
        self._syncs_ms.extend(syncs_ms)
        self._steps = steps
        if not summary:
            return
        self._version = summary["weight_version"]
        self._max_staleness = summary["staleness"]["max"]
        self._staleness_sum = summary["staleness"]["mean"] * (steps - self._first_step)
        self._heldout = dict(summary["heldout"])
        self._evaluation = dict(summary.get("evaluation", {}))
        if self._evaluation.get("state") == EvaluationState.RUNNING:
            self._evaluation["state"] = EvaluationState.INTERRUPTED
        self._advice = summary.get("advice", {})
        self.nothing_learned = summary.get("nothing_learned", {})
        since = summary.get("skipped_since")
        self.skipped_since = since if since is not None and since <= steps else None
        best = summary.get("best")
        # Steps after a rewind's target are trained, and saved, again.
        self.best = best if best is not None and best["step"] <= steps else None

    def record_step(self, metrics: Mapping[str, float], *, is_skipped: bool = False) -> None:
        """Records a committed step.

        Args:
            is_skipped: True if the step did not change the weights of a model that trains.
        """
        self._steps += 1
        if not is_skipped:
            self.skipped_since = None
        elif self.skipped_since is None:
            self.skipped_since = self._steps
        self._rewards.add(self._steps, metrics)
        self._update_drop()
        self._max_staleness = max(self._max_staleness, int(metrics.get("staleness_max", 0)))
        self._staleness_sum += metrics.get("staleness_mean", 0.0)

    def record_sync(self, report: SyncReport) -> None:
        self._version = report.version
        self._syncs_ms.append(report.total_s * 1000)
        self._sync = {name: ms for name, ms in sync_facts(report).items() if name.endswith("_ms")}

    def take_sync(self) -> dict[str, float | str]:
        """Returns and resets the times of the newest weight sync, in milliseconds."""
        sync, self._sync = self._sync, {}
        return sync

    def record_evaluation(self, evaluation: StartedEvaluation | Evaluation) -> None:
        """Records the start or the end of an evaluation."""
        state = evaluation.status if isinstance(evaluation, Evaluation) else EvaluationState.RUNNING
        self._evaluation = {
            "weight_version": evaluation.version,
            "step": evaluation.step,
            "reason": evaluation.reason,
            "state": state,
        }
        if isinstance(evaluation, Evaluation) and state is not EvaluationState.MISSED:
            self._heldout = {
                "greedy": evaluation.greedy,
                "sampled": evaluation.sampled,
                "weight_version": evaluation.version,
                "status": evaluation.status,
                "sets": evaluation.by_set,
            }

    def record_score(self, score: float, *, step: int, version: int) -> None:
        """Records the score of a saved version; the first of equal scores stays the best."""
        if self.best is None or score > self.best["score"]:
            self._best_before = self.best
            self.best = {"step": step, "weight_version": version, "score": score}

    def forget_score(self, step: int) -> None:
        """Restores the best version before ``step``, whose checkpoint could not be saved."""
        if self.best is not None and self.best["step"] == step:
            self.best = self._best_before

    def record_advice(self, advice: Mapping[str, str]) -> None:
        self._advice = advice

    def summary(self, ledger: Ledger) -> dict[str, Any]:
        """Returns all numbers, including those of the ledger."""
        prompts = ledger.counts()
        end_states = ("consumed", "dropped", "quarantined")
        return {
            "steps": self._steps,
            "heldout": self._heldout,
            "evaluation": self._evaluation,
            "staleness": {
                "max": self._max_staleness,
                "mean": self._staleness_sum / max(self._steps - self._first_step, 1),
                "bound": self._bound,
            },
            "prompts": {
                "issued": prompts["issued"],
                **{state: prompts[state] for state in end_states},
                "outstanding": prompts["issued"] - sum(prompts[state] for state in end_states),
                "reasons": dict(ledger.reasons()),
            },
            "weight_version": self._version,
            "advice": self._advice,
            "nothing_learned": self.nothing_learned,
            "skipped_since": self.skipped_since,
            "reward_drop": self._reward_drop,
            "best": self.best,
            "sync_ms": {"p50": self._percentile(50), "p95": self._percentile(95)},
        }

    def _update_drop(self) -> None:
        drop = self._rewards.drop()
        self._reward_drop = {} if drop is None else asdict(drop)

    def _percentile(self, percent: int) -> float | None:
        if not self._syncs_ms:
            return None
        if len(self._syncs_ms) == 1:
            return self._syncs_ms[0]
        return statistics.quantiles(self._syncs_ms, n=100, method="inclusive")[percent - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUse:
    """Activity of the rollouts during one step."""

    numbers: dict[str, float]
    idle_s: dict[str, float]
    """Idle seconds by rollout; only the first ones by name if there are many."""


class StepMeter:
    """Measures the activity of the rollouts between two steps."""

    def __init__(self) -> None:
        self._idle_s: dict[str, float] = {}
        self._tokens = 0.0

    def measure(self, rollout_pool: RolloutPool, seconds: float) -> StepUse:
        """Returns the activity of the rollouts in a step that took ``seconds``."""
        totals, tokens = rollout_pool.idle_seconds(), rollout_pool.tokens_total()
        # Limits the differences: a new rollout was idle before it joined, and a gauge may be some seconds
        # old.
        idle_s = {
            name: min(max(total - self._idle_s.get(name, total), 0.0), seconds)
            for name, total in totals.items()
        }
        numbers = {
            "seconds": seconds,
            "rollout_idle_s": sum(idle_s.values()) / max(len(idle_s), 1),
            "generated_tokens_per_s": max(tokens - self._tokens, 0.0) / seconds,
            **rollout_pool.decode_times(),
            **rollout_pool.acceptance_length(),
        }
        self._idle_s, self._tokens = totals, tokens
        rows = {name: round(idle_s[name], 3) for name in sorted(idle_s)[:_MAX_NAMED_ROLLOUTS]}
        return StepUse(numbers=numbers, idle_s=rows)


def sync_facts(report: SyncReport) -> dict[str, float | str]:
    """Returns the facts of a published version, as data of its event."""
    return {
        "version": report.version,
        "sync_ms": report.total_s * 1000,
        "copy_ms": report.copy_s * 1000,
        "prepare_ms": report.prepare_s * 1000,
        "transfer_ms": report.transfer_s * 1000,
        "adopt_ms": report.adopt_s * 1000,
        "stall_ms": report.stall_s * 1000,
        "size_bytes": report.num_bytes,
        "digest": report.digest,
        **({"late": ", ".join(report.late)} if report.late else {}),
    }
