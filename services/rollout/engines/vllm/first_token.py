"""Measures the time from an adoption to the first token under the new weights."""

import logging
import time

from services.rollout import metrics

logger = logging.getLogger(__name__)


class FirstToken:
    """Records that time for one engine."""

    def __init__(self) -> None:
        self._since: float | None = None

    def expect(self) -> None:
        """Starts the clock: new weights are in service."""
        self._since = time.monotonic()

    def came(self) -> None:
        """Records the time if these are the first tokens."""
        if self._since is None:
            return
        after_s, self._since = time.monotonic() - self._since, None
        metrics.FIRST_TOKEN_SECONDS.observe(after_s)
        logger.info("first token of a weight version", extra={"after_ms": round(1e3 * after_s, 1)})
