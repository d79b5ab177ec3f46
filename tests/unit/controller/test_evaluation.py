"""Scores of an evaluation, per data source."""

import asyncio
from types import SimpleNamespace

import pytest

from services.common.spec.loader import parse_spec
from services.controller.run.evaluation import Evaluator, _evaluation, _Scores
from tests.unit.controller.rest import SPEC


def scores(*samples):
    found = _Scores()
    for group_id, reward, is_greedy in samples:
        found.add(group_id, reward, is_greedy=is_greedy)
    return found


def test_scores_are_means_over_prompts_of_each_source():
    math = scores(
        *[("v0", 1.0, True), ("v0", 1.0, False), ("v0", 0.0, False), ("v0", 1.0, False)],
        *[("v1", 0.0, True), ("v1", 0.0, False), ("v1", 0.0, False), ("v1", 1.0, False)],
    )
    code = scores(("v2", 0.5, True))
    result = _evaluation(3, "periodic", "ok", {"math": math, "code": code}, 1.0)
    assert result.by_source["math"] == pytest.approx(
        {"greedy": 0.5, "sampled": 0.5, "best": 1.0, "maj": 0.5}
    )
    assert result.by_source["code"] == {"greedy": 0.5}
    assert (result.num_samples, result.sampled) == (9, 0.5)


def test_of_equally_frequent_rewards_the_least_counts():
    tied = scores(("v0", 0.0, False), ("v0", 1.0, False))
    assert _evaluation(1, "final", "ok", {"one": tied}, 1.0).by_source["one"]["maj"] == 0.0


def test_an_evaluation_without_samples_has_no_scores():
    result = _evaluation(1, "final", "timeout", {}, 1.0)
    assert (result.greedy, result.sampled, result.by_source) == (None, None, {})


class NoSamples:
    """A transferqueue that gets nothing."""

    async def release(self, partition, keys):
        assert keys == []


class Silent:
    """Rollouts that take groups and bring nothing."""

    def __init__(self):
        self.started, self.cancelled = 0, 0

    def choose(self, group_id):
        return "rollout-0", 4

    def assigned(self, worker_id):
        """Loads do not matter here."""

    finished = assigned

    async def start(self, by_worker):
        self.started += sum(map(len, by_worker.values()))

    async def cancel(self, group_ids):
        self.cancelled += len(group_ids)


def evaluator_of(pin, results):
    rollouts = Silent()
    parts = SimpleNamespace(
        num_heldout_rows=3, attempt=1, replicas=rollouts, weights=SimpleNamespace(pin=pin)
    )
    spec = parse_spec({**SPEC, "validation": {"timeout_s": 0.05, "every": 2}})

    async def on_result(result):
        results.append(result)

    evaluator = Evaluator(spec, "run_1", parts, queue=NoSamples(), on_result=on_result)
    return evaluator, rollouts


@pytest.mark.parametrize("is_pinned", [True, False])
async def test_an_evaluation_that_takes_too_long_is_reported_and_gives_everything_back(is_pinned):
    pin, results = asyncio.Lock(), []
    evaluator, rollouts = evaluator_of(pin, results)
    if is_pinned:
        await pin.acquire()
    running = asyncio.ensure_future(evaluator.run())
    await evaluator.published(4, step=4)
    await evaluator.idle()
    running.cancel()
    assert [(result.version, result.status, result.num_samples) for result in results] == [
        (4, "timeout", 0)
    ]
    assert pin.locked() == is_pinned
    assert (rollouts.started, rollouts.cancelled) == ((0, 0) if is_pinned else (3, 3))


async def test_versions_between_the_periodic_ones_are_not_evaluated():
    results = []
    evaluator, _ = evaluator_of(asyncio.Lock(), results)
    await evaluator.published(3, step=3)
    assert not evaluator.is_busy
