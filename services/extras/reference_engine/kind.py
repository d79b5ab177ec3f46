"""Properties of the training engine ``reference``. Imports no torch."""

from typing import Final

from services.common.runspec.engines import TrainEngineKind

KIND: Final = TrainEngineKind(
    build="services.extras.reference_engine.engine:build",
    supported={
        "trainer.world_size": (1,),
        "trainer.pipeline_parallel": (1,),
        "trainer.dtype": ("float32",),
        "trainer.lora": (None,),
        "trainer.optimizer.kind": ("adamw",),
        "trainer.compile": (False,),
        "trainer.cpu_offload": (False,),
        "trainer.activation_offloading": (False,),
        "trainer.activation_checkpointing": ("auto", False),
        "trainer.balancing.kind": ("none",),
        "rollout.routing_replay": ("off",),
        "topology.placement": ("disaggregated",),
    },
    serves_own_gpus=False,
)
