"""How long after its weights an engine's first token comes."""

import logging
import time

from services.rollout import metrics

logger = logging.getLogger(__name__)


class FirstToken:
    """Watches one engine."""

    def __init__(self) -> None:
        self._since: float | None = None

    def expect(self) -> None:
        """Weights are in service."""
        self._since = time.monotonic()

    def came(self) -> None:
        """There are tokens."""
        if self._since is None:
            return
        after_s, self._since = time.monotonic() - self._since, None
        metrics.FIRST_TOKEN_SECONDS.observe(after_s)
        logger.info("first token of a version", extra={"after_ms": round(1e3 * after_s, 1)})
