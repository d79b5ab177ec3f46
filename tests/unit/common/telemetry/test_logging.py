"""Tests that logs mask tokens in every part of a record and escape control characters."""

import io
import logging
import sys

import pytest

from services.common.security.credentials import issue_token
from services.common.telemetry.logging import configure

CANARIES = [
    "slp_" + "a" * 40,
    issue_token(b"k" * 32, "run_0123"),
    "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhbm4ifQ.c2lnbmF0dXJl",
]


@pytest.fixture(params=["text", "json"])
def formatted(request, monkeypatch):
    """Returns a function that formats a record as a configured process does."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    root.handlers = []
    configure(log_format=request.param, service="test")
    (handler,) = root.handlers
    root.handlers = before
    root.setLevel(level)

    def format_record(message: str, *arguments: object, **extra: object) -> str:
        record = logging.LogRecord("a", logging.INFO, "f", 1, message, arguments, sys.exc_info())
        vars(record).update(extra)
        return handler.format(record)

    return format_record


@pytest.mark.parametrize("canary", CANARIES)
def test_tokens_are_masked(formatted, canary):
    lines = [
        formatted("sent Authorization: Bearer %s", canary),
        formatted("headers", headers={"authorization": f"Bearer {canary}"}),
    ]
    try:
        raise ValueError(f"Bearer {canary}")
    except ValueError:
        lines.append(formatted("refused"))
    for line in lines:
        assert "***" in line
        assert canary not in line


def test_other_lines_stay_as_they_are(formatted):
    line = formatted("run_0123 trained step 3 of sleep_8hours", token_count=5)
    assert "run_0123 trained step 3 of sleep_8hours" in line
    assert "***" not in line


def test_what_a_caller_chose_does_not_control_a_terminal_or_begin_a_line(formatted):
    line = formatted("refused %s", "\x1b[31m", path="/v1/\n12:00:00 ERROR invented\x1b]0;title\x07")
    assert line.replace("\nNoneType: None", "").isprintable()
    assert "invented" in line


def test_a_traceback_keeps_its_lines(formatted):
    try:
        raise ValueError("\x1b[31m")
    except ValueError:
        line = formatted("failed")
    assert "\x1b" not in line
    assert "Traceback" in line
