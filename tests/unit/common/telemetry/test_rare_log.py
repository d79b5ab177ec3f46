"""Tests of the rate limit on log lines that unauthenticated callers can cause."""

import logging

import pytest

from services.common.telemetry.logging import RareLog


def test_a_message_is_logged_once_a_minute_with_its_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    log = RareLog(logging.getLogger("doors"), lambda: now)
    for _ in range(1000):
        log.warning("refused", peer="a")
    log.warning("something else")
    now = 61.0
    log.warning("refused", peer="b")
    logged = [(line.message, line.untold) for line in caplog.records]  # type: ignore[attr-defined]
    assert logged == [("refused", 0), ("something else", 0), ("refused", 999)]
