"""Properties of the engines without a model."""

from typing import Final

from services.common.runspec.engines import EngineKind

FAKE: Final = EngineKind(
    adapter="services.rollout.engines.fake:build",
    arguments=frozenset({"token_seconds", "median_tokens", "sigma"}),
    harmless_arguments=frozenset({"token_seconds", "median_tokens", "sigma"}),
    has_model=False,
    sleeps=True,
)

NONE: Final = EngineKind(
    adapter="services.rollout.engines.fake:build_none", arguments=frozenset(), has_model=False
)
