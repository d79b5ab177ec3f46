"""Settings of a simulated run with long tails."""

from dataclasses import dataclass, field

from services.common.runspec.loader import parse_spec
from services.common.runspec.run import RunSpec
from services.extras.fake_engine.engine import Lengths, LongTail

RUN = "run_tails"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One simulated run."""

    steps: int
    lag: int
    is_partial: bool = True
    kv_policy: str = "keep"
    segment_tokens: int | None = None
    kills: int = 0
    kills_oldest: bool = False
    """True if kills always hit the rollout with the oldest group; otherwise a random one."""
    stale_wait_timeout_s: float = 180.0
    """Max seconds to wait for groups that would become too stale; their oldest tokens are masked
    after that."""
    replicas: int = 4
    places: int = 32
    groups_per_step: int = 16
    group_size: int = 8
    lengths: Lengths = field(default_factory=lambda: LongTail(median=4096.0, sigma=1.2))
    max_tokens: int = 131_072
    token_s: float = 0.02
    prefill_tokens_per_s: float = 40_000.0
    train_s: float = 60.0
    restart_s: float = 60.0
    """Seconds from a kill until the rollout serves again."""

    def specification(self) -> RunSpec:
        """Returns the run's specification for its services."""
        return parse_spec(
            {
                "name": "tails",
                "model": {"path": "tiny:qwen2-0.4m"},
                "data": {"train": {"source": "jsonl", "path": "prompts.jsonl"}, "shuffle": False},
                "rollout": {
                    "engine": "fake",
                    "replicas": self.replicas,
                    "group_size": self.group_size,
                    "max_response_tokens": self.max_tokens,
                    "max_running_samples": self.places,
                    "partial_rollout": self.is_partial,
                    "segment_tokens": self.segment_tokens,
                    "kv_policy": self.kv_policy,
                    "rewards": [{"name": "exact_match"}],
                },
                "algorithm": {
                    "max_staleness": self.lag,
                    "stale_wait_timeout_s": self.stale_wait_timeout_s,
                },
                # More steps than are trained, because no new groups would start after the last
                # one.
                "trainer": {
                    "steps": self.steps + self.lag + 1,
                    "prompts_per_step": self.groups_per_step,
                },
            }
        )
