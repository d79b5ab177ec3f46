"""Prometheus collector that reads the runs at each scrape, so that its metrics never lag behind."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.common.runspec.loader import SpecError, parse_spec
from services.common.runspec.run import RunSpec
from services.controller.membership import Worker
from services.controller.metrics import KEPT_S
from services.controller.rules.evaluation import EvaluationState
from services.controller.rules.run_state import RunState
from services.controller.store.records import Run


class RunCollector(Collector):
    """Collects metrics of runs that are active or ended recently.

    Args:
        list_runs: Lists the newest runs; called from the thread that serves metrics.
        now: Returns seconds since the epoch.
    """

    def __init__(
        self,
        list_runs: Callable[[], Sequence[Run]],
        workers: Callable[[str], Sequence[Worker]],
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._list_runs = list_runs
        self._workers = workers
        self._now = now

    def describe(self) -> Iterator[Metric]:
        """Yields names and labels without reading the runs."""
        return iter(_families().values())

    def collect(self) -> Iterator[Metric]:
        families = _families()
        oldest = self._now() - KEPT_S
        runs = [run for run in self._list_runs() if not run.is_terminal or run.update_time > oldest]
        states = Counter(run.state for run in runs)
        for state in RunState:
            families["slipstream_runs"].add_metric([state.value], states[state])
        for run in runs:
            _add_run(families, run)
            if not run.is_terminal:
                _add_workers(families, run.run_id, self._workers(run.run_id))
        yield from families.values()


def _families() -> dict[str, GaugeMetricFamily]:
    described = (
        ("slipstream_runs", "Runs that are active or ended recently, by state.", ["state"]),
        (
            "slipstream_run_info",
            "Name, model and advantage estimator of the run; always 1.",
            ["run", "name", "model", "advantage"],
        ),
        (
            "slipstream_run_state",
            "1 for the run's current state, 0 for all others.",
            ["run", "state"],
        ),
        (
            "slipstream_run_condition",
            "1 for the current status and reason of each condition of the run.",
            ["run", "type", "status", "reason"],
        ),
        ("slipstream_run_target_steps", "Number of steps that the run will train.", ["run"]),
        ("slipstream_run_batch_prompts", "Groups per batch.", ["run"]),
        (
            "slipstream_staleness_limit_versions",
            "Max staleness of trained samples: algorithm.max_staleness.",
            ["run"],
        ),
        (
            "slipstream_run_staleness_versions",
            "Staleness of trained samples: mean and max of recent steps.",
            ["run", "stat"],
        ),
        (
            "slipstream_run_heldout_score",
            "Newest held-out score, by decoding.",
            ["run", "decoding"],
        ),
        (
            "slipstream_run_heldout_set_score",
            "Newest scores of each held-out set.",
            ["run", "set", "score"],
        ),
        (
            "slipstream_run_evaluation_state",
            "1 for the state of the run's newest evaluation, 0 for all others.",
            ["run", "state"],
        ),
        (
            "slipstream_run_workers",
            "Registered workers by role and state.",
            ["run", "role", "state"],
        ),
    )
    return {name: GaugeMetricFamily(name, text, labels=labels) for name, text, labels in described}


def _add_run(families: dict[str, GaugeMetricFamily], run: Run) -> None:
    for state in RunState:
        families["slipstream_run_state"].add_metric([run.run_id, state.value], run.state is state)
    for condition in run.conditions:
        labels = [run.run_id, condition.type, condition.status, condition.reason]
        families["slipstream_run_condition"].add_metric(labels, 1)
    families["slipstream_run_target_steps"].add_metric([run.run_id], run.target_steps)
    with suppress(SpecError):  # a release with other rules stored it; the run is paused
        _add_spec(families, run, _parsed(run.spec_json))
    _add_numbers(families, run, "slipstream_run_staleness_versions", "staleness", ("max", "mean"))
    _add_numbers(families, run, "slipstream_run_heldout_score", "heldout", ("greedy", "sampled"))
    if evaluation := run.summary.get("evaluation"):
        for evaluation_state in EvaluationState:
            labels = [run.run_id, evaluation_state.value]
            is_current = evaluation["state"] == evaluation_state
            families["slipstream_run_evaluation_state"].add_metric(labels, is_current)
    for set_name, scores in (run.summary.get("heldout") or {}).get("sets", {}).items():
        for score, value in scores.items():
            families["slipstream_run_heldout_set_score"].add_metric(
                [run.run_id, set_name, score], value
            )


def _add_spec(families: dict[str, GaugeMetricFamily], run: Run, spec: RunSpec) -> None:
    about = [run.run_id, run.name, spec.model.path, spec.algorithm.advantage]
    families["slipstream_run_info"].add_metric(about, 1)
    for name, value in (
        ("slipstream_run_batch_prompts", spec.trainer.prompts_per_step),
        ("slipstream_staleness_limit_versions", spec.algorithm.max_staleness),
    ):
        families[name].add_metric([run.run_id], value)


def _add_numbers(
    families: dict[str, GaugeMetricFamily], run: Run, name: str, section: str, keys: tuple[str, ...]
) -> None:
    """Adds numbers of the run's summary, which has none before the first step or evaluation."""
    numbers = run.summary.get(section) or {}
    for key in keys:
        if numbers.get(key) is not None:
            families[name].add_metric([run.run_id, key], numbers[key])


def _add_workers(
    families: dict[str, GaugeMetricFamily], run_id: str, workers: Sequence[Worker]
) -> None:
    for (role, state), count in Counter((w.role, w.state) for w in workers).items():
        families["slipstream_run_workers"].add_metric([run_id, role, state], count)


@lru_cache(maxsize=512)
def _parsed(spec_json: str) -> RunSpec:
    """Parses a specification; cached, because each scrape needs the specifications of all runs."""
    return parse_spec(spec_json)
