"""Properties of the engine ``none``."""

from typing import Final

from services.common.runspec.engines import EngineKind

KIND: Final = EngineKind(
    adapter="services.extras.no_engine.engine:build", arguments=frozenset(), has_model=False
)
