"""Tests that the latency of an engine's first token under new weights is reported once per update."""

import logging

import pytest

from services.extras.external_engine.engine import FirstToken
from services.rollout import metrics


def num_observed() -> float:
    (histogram,) = metrics.FIRST_TOKEN_SECONDS.collect()
    return next(sample.value for sample in histogram.samples if sample.name.endswith("_count"))


def test_the_first_token_of_each_update_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    first, before = FirstToken(), num_observed()
    first.record()  # no update precedes tokens of the random weights
    for _ in range(2):
        first.start()
        first.record()
        first.record()
    assert num_observed() == before + 2
    assert [vars(record)["after_ms"] >= 0 for record in caplog.records] == [True, True]
