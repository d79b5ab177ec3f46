"""Tests of RunCollector, which exports metrics of runs to Prometheus."""

import asyncio
from types import SimpleNamespace

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from services.common.runspec.loader import canonical_json
from services.controller import metrics
from services.controller.manager.run_collector import RunCollector
from services.controller.rules.evaluation import EvaluationState
from services.controller.rules.run_state import RunState
from tests.helpers import rest
from tests.helpers.specs import spec_with

NOW = 10_000.0
SPEC = canonical_json(
    spec_with(
        name="demo",
        data={"train": {"source": "python", "path": "sort4.py:train"}},
        algorithm={"max_staleness": 2},
        trainer={"steps": 50, "prompts_per_step": 32},
    )
)


def run(run_id: str, state: RunState, *, updated: float = NOW) -> SimpleNamespace:
    return SimpleNamespace(
        run_id=run_id,
        name="demo",
        spec_json=SPEC,
        target_steps=50,
        state=state,
        is_terminal=state in (RunState.SUCCEEDED, RunState.FAILED),
        update_time=updated,
        conditions=(SimpleNamespace(type="Progressing", status="False", reason="WaitsForGroups"),),
        summary={
            "staleness": {"max": 1, "mean": 0.5},
            "heldout": {"greedy": 0.7, "sampled": None, "sets": {"math": {"pass@2": 0.25}}},
            "evaluation": {"weight_version": 4, "step": 4, "reason": "final", "state": "running"},
        },
    )


def exposed(*runs: SimpleNamespace) -> str:
    workers = [
        SimpleNamespace(role="rollout", state="ready"),
        SimpleNamespace(role="rollout", state="ready"),
        SimpleNamespace(role="trainer", state="loading"),
    ]
    registry = CollectorRegistry()
    registry.register(
        RunCollector(lambda: runs, lambda run_id: workers, now=lambda: NOW)  # type: ignore[arg-type,return-value]
    )
    return generate_latest(registry).decode()


def test_an_active_run_shows_its_state_bounds_and_workers() -> None:
    text = exposed(run("r1", RunState.RUNNING))
    assert 'slipstream_runs{state="RUNNING"} 1.0' in text
    assert 'slipstream_runs{state="FAILED"} 0.0' in text
    assert 'slipstream_run_state{run="r1",state="RUNNING"} 1.0' in text
    assert 'slipstream_run_state{run="r1",state="FAILED"} 0.0' in text
    condition = 'reason="WaitsForGroups",run="r1",status="False",type="Progressing"'
    assert f"slipstream_run_condition{{{condition}}} 1.0" in text
    assert 'slipstream_run_target_steps{run="r1"} 50.0' in text
    assert 'slipstream_staleness_limit_versions{run="r1"} 2.0' in text
    assert 'slipstream_run_staleness_versions{run="r1",stat="mean"} 0.5' in text
    assert 'slipstream_run_workers{role="rollout",run="r1",state="ready"} 2.0' in text


def test_a_score_that_is_not_known_is_not_shown() -> None:
    text = exposed(run("r1", RunState.RUNNING))
    assert 'slipstream_run_heldout_score{decoding="greedy",run="r1"} 0.7' in text
    assert 'slipstream_run_heldout_set_score{run="r1",score="pass@2",set="math"} 0.25' in text
    assert 'decoding="sampled"' not in text


def test_the_newest_evaluation_has_one_state() -> None:
    text = exposed(run("r1", RunState.RUNNING))
    assert 'slipstream_run_evaluation_state{run="r1",state="running"} 1.0' in text
    others = set(EvaluationState) - {EvaluationState.RUNNING}
    for state in others:
        assert f'slipstream_run_evaluation_state{{run="r1",state="{state}"}} 0.0' in text


def test_an_ended_run_stays_for_a_while_without_workers_then_goes() -> None:
    late, ended_run = run("r2", RunState.FAILED), run("r3", RunState.FAILED, updated=NOW - 3600)
    text = exposed(late, ended_run)
    assert 'slipstream_run_state{run="r2",state="FAILED"} 1.0' in text
    assert "slipstream_run_workers{" not in text
    assert '"r3"' not in text


def series_of(run):
    return {
        sample.name
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.labels.get("run") == run
    }


def test_all_series_of_a_run_are_forgotten_and_no_others():
    for run in ("run_a", "run_b"):
        metrics.observe_step(run, 1, {"ready": 2})
        metrics.observe_staleness(run, {"1": 2})
        metrics.observe_group(run, 1, 2)
        metrics.observe_dispatch(run, 1, 0.1)
        metrics.WEIGHT_SYNC_SECONDS.labels(run, "transfer").observe(1.0)
        metrics.WEIGHT_SYNC_BYTES.labels(run).inc()
        metrics.WEIGHT_SYNCS.labels(run, "ok").inc()
        metrics.SKIPPED_PROMPTS.labels(run, "solved").set(1)
    of_runs = {
        metric
        for metric in vars(metrics).values()
        if isinstance(metric, MetricWrapperBase) and "run" in metric._labelnames
    }
    assert of_runs == {*metrics._OF_RUNS}
    assert series_of("run_a")
    series = series_of("run_b")
    metrics.forget_run("run_a")
    assert not series_of("run_a")
    assert series_of("run_b") == series
    metrics.forget_run("run_b")


async def test_the_series_of_a_run_go_some_time_after_its_end(manager, api, monkeypatch):
    monkeypatch.setattr(metrics, "KEPT_S", 0.0)
    run_id = (await api.post("/v1/runs", json=rest.SPEC)).json()["id"]
    metrics.observe_group(run_id, 1, 2)
    await api.post(f"/v1/runs/{run_id}/cancel")
    async with asyncio.timeout(20):
        while series_of(run_id):  # noqa: ASYNC110 -- the removal of series has no event
            await asyncio.sleep(0.01)
