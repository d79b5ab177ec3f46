"""Properties of the training engine ``stages``. Imports no torch."""

from typing import Final

from services.common.runspec.engines import TrainEngineKind

STAGES: Final = TrainEngineKind(
    build="services.extras.stages.build:build",
    problems="services.extras.stages.problems:problems",
    supported={
        "algorithm.score_centering": (None,),
        "trainer.lora": (None,),
        "trainer.optimizer.kind": ("adamw",),
        "trainer.cpu_offload": (False,),
        "trainer.activation_offloading": (False,),
        "trainer.balancing.kind": ("none",),
        "model.images": (False,),
        "weight_sync.senders": ("ranks",),
        "topology.placement": ("disaggregated",),
    },
)
