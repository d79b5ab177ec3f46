"""Stall detection by progress instead of age, for the engine and for each episode."""

from collections.abc import Mapping

from services.rollout.engines.base import EngineStats


class EngineStalledError(RuntimeError):
    """The engine has running requests and makes no token; only a restart helps."""


class ProgressWatch:
    """Detects a stalled engine from its gauges, which the caller samples periodically.

    Args:
        deadline_s: Max time without a token while requests run; may be changed.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._tokens_total = -1
        self._weight_version = -1
        self._since = 0.0

    def check(self, stats: EngineStats, *, now: float) -> None:
        """Compares the gauges with the previous check.

        Args:
            now: Monotonic seconds.

        Raises:
            EngineStalledError: If requests run and neither tokens nor weight version changed within
                the deadline.
        """
        seen = (stats.tokens_total, stats.weight_version)
        if (
            stats.num_running == 0
            or stats.is_asleep
            or seen != (self._tokens_total, self._weight_version)
        ):
            self._tokens_total, self._weight_version = seen
            self._since = now
        elif now - self._since > self.deadline_s:
            raise EngineStalledError(
                f"the engine has {stats.num_running} requests but generated no token for "
                f"{now - self._since:.0f} s; this worker exits so that other workers take over its groups"
            )


class EpisodeWatch:
    """Detects stalled members of groups from progress marks, which the caller samples periodically.

    Args:
        deadline_s: Max time in which a member makes neither a token nor a call; may be changed.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._seen: dict[tuple[str, int], tuple[int, float]] = {}

    def find_stalled(
        self, groups: Mapping[str, Mapping[int, int]], *, now: float
    ) -> dict[str, str]:
        """Returns the groups that stalled, each with the reason.

        Args:
            groups: By group and member, a number that changes with each token and call.
            now: Monotonic seconds.
        """
        seen: dict[tuple[str, int], tuple[int, float]] = {}
        stalled: dict[str, str] = {}
        for group_id, marks in groups.items():
            for member, mark in marks.items():
                before, since = self._seen.get((group_id, member), (mark, now))
                seen[group_id, member] = (mark, since if before == mark else now)
                if before == mark and now - since > self.deadline_s:
                    stalled[group_id] = (
                        f"member {member} generated no token and made no call for {now - since:.0f} s; check "
                        "what its workflow waits for, or raise limits.stall_timeout_s"
                    )
        self._seen = seen
        return stalled
