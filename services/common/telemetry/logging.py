"""Configures log lines for people or machines, with the fields of the process in each."""

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from typing import Literal

from services.common.telemetry import tracing

# API tokens, run tokens, and other bearer credentials.
_SECRET = re.compile(r"\b(slp_|slr_|[Bb]earer )[\w.~+/=-]{8,}")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {
    *("message", "asctime", "taskName", "color_message")
}
# Callers choose parts of log messages, and a terminal would interpret control characters in them.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_CONTROL_IN_LINES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def configure(
    *, level: str = "INFO", log_format: Literal["text", "json"] = "text", **fields: object
) -> None:
    """Sends all log records to standard error.

    Args:
        log_format: ``text`` for people, ``json`` for machines.
        fields: Attributes of this process that each line has, such as ``service`` and ``run``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(fields) if log_format == "json" else _TextFormatter(fields))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def _extras(record: logging.LogRecord) -> dict[str, object]:
    extras = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    if (trace := tracing.current()) is not None:
        extras["trace_id"] = trace.trace_id
    return extras


class _TextFormatter(logging.Formatter):
    def __init__(self, fields: dict[str, object]) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
        self._prefix = " ".join(str(value) for value in fields.values())

    def format(self, record: logging.LogRecord) -> str:
        extras = " ".join(
            f"{key}={_escaped(str(value), _CONTROL)}" for key, value in _extras(record).items()
        )
        line = " ".join(
            segment for segment in (self._prefix, super().format(record), extras) if segment
        )
        return _escaped(_without_secrets(line), _CONTROL_IN_LINES)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object."""

    def __init__(self, fields: dict[str, object]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
            **_extras(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _without_secrets(json.dumps(line, default=str))


def _escaped(text: str, control: re.Pattern[str]) -> str:
    return control.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _without_secrets(line: str) -> str:
    return _SECRET.sub(r"\1***", line)


PERIOD_S = 60.0


class RareLog:
    """Logs each message at most once a minute."""

    def __init__(self, logger: logging.Logger, now: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._now = now
        self._logged_at: dict[str, float] = {}
        self._num_untold: dict[str, int] = {}

    def warning(self, message: str, **facts: object) -> None:
        """Logs a warning with the number of suppressed ones since the last line.

        Args:
            message: Constant text that identifies the warning; one line a minute of each.
        """
        now = self._now()
        if now - self._logged_at.get(message, -PERIOD_S) < PERIOD_S:
            self._num_untold[message] = self._num_untold.get(message, 0) + 1
            return
        self._logged_at[message] = now
        self._logger.warning(message, extra={**facts, "untold": self._num_untold.pop(message, 0)})
