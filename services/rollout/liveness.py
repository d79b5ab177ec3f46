"""Liveness from progress: an engine that accepts work but makes no token is dead."""

from services.rollout.engines.base import EngineStats


class EngineStalledError(RuntimeError):
    """The engine holds requests and makes no token; only a restart helps."""


class ProgressWatch:
    """Looks at an engine's gauges from time to time.

    Args:
        deadline_s: Longest time without a token while requests run.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._tokens_total = -1
        self._weight_version = -1
        self._since = 0.0

    def check(self, stats: EngineStats, *, now: float) -> None:
        """Compare with the last look.

        Args:
            stats: The engine's gauges.
            now: Monotonic seconds.

        Raises:
            EngineStalledError: If requests run and nothing has moved for longer than the deadline.
        """
        seen = (stats.tokens_total, stats.weight_version)
        if stats.num_running == 0 or seen != (self._tokens_total, self._weight_version):
            self._tokens_total, self._weight_version = seen
            self._since = now
        elif now - self._since > self._deadline_s:
            raise EngineStalledError(
                f"the engine holds {stats.num_running} requests but made no token for "
                f"{now - self._since:.0f} s; this worker ends, so that its work goes elsewhere"
            )
