"""Properties of the training engine ``fsdp``. Imports no torch."""

from typing import Final

from services.common.runspec.engines import TrainEngineKind

FSDP: Final = TrainEngineKind(
    build="services.trainer.engines.fsdp.build:build",
    supported={"trainer.pipeline_parallel": (1,)},
)
