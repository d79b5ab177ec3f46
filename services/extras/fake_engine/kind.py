"""Properties of the engine without a model."""

from typing import Final

from services.common.runspec.engines import EngineKind

KIND: Final = EngineKind(
    adapter="services.extras.fake_engine.engine:build",
    arguments=frozenset({"token_seconds", "median_tokens", "sigma"}),
    harmless_arguments=frozenset({"token_seconds", "median_tokens", "sigma"}),
    has_model=False,
    sleeps=True,
)
