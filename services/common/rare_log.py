"""Log lines that a stranger can cause: one a minute of each kind, however often it happens."""

import logging
import time
from collections.abc import Callable

PERIOD_S = 60.0


class RareLog:
    """Warns at most once a minute for each message.

    Args:
        logger: Gets the lines.
        now: Monotonic seconds.
    """

    def __init__(self, logger: logging.Logger, now: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._now = now
        self._told: dict[str, float] = {}
        self._num_untold: dict[str, int] = {}

    def warning(self, message: str, **facts: object) -> None:
        """Tell it, with how often it happened untold since the last time.

        Args:
            message: The same text for the same thing; one line a minute of each.
            facts: What varies.
        """
        now = self._now()
        if now - self._told.get(message, -PERIOD_S) < PERIOD_S:
            self._num_untold[message] = self._num_untold.get(message, 0) + 1
            return
        self._told[message] = now
        self._logger.warning(message, extra={**facts, "untold": self._num_untold.pop(message, 0)})
