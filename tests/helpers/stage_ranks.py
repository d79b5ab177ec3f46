"""Layouts of pipeline stages, and the engines of their ranks."""

from pathlib import Path
from typing import Any

from torch import distributed
from transformers import AutoConfig

from services.common.runspec.run import RunSpec
from services.extras.reference_engine.engine import ReferenceEngine
from services.extras.stages.engine import StagesEngine
from services.extras.stages.layout import build_stage
from services.extras.stages.modules import StagedPolicy
from services.trainer.engines.fsdp.compiling import compile_ahead
from services.trainer.engines.fsdp.parallel import distribute
from tests.helpers.batches import CPU, Queue, policy_of, random_queue, spec_of, with_experts
from tests.helpers.mixtures import tiny_config

TINY = "tiny:qwen2-0.4m"
FOUR_LAYERS = "tiny:qwen2-1.2m"
MIXTURE = "tiny:qwen3_moe-0.7m"
LATENT = "latent"
"""A mixture with latent attention, a dense first layer and biases that balance its routing."""
UNTIED = "untied"
"""A model of three layers whose head is not its embedding."""
LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "pp2": (TINY, {"world_size": 2, "pipeline_parallel": 2}),
    "pp2-untied": (UNTIED, {"world_size": 2, "pipeline_parallel": 2}),
    "pp2-fsdp2": (TINY, {"world_size": 4, "pipeline_parallel": 2}),
    "pp2-tp2": (TINY, {"world_size": 4, "pipeline_parallel": 2, "tensor_parallel": 2}),
    "pp2-ep2": (MIXTURE, {"world_size": 4, "pipeline_parallel": 2, "expert_parallel": 2}),
    "pp2-tp2-experts": (MIXTURE, {"world_size": 4, "pipeline_parallel": 2, "tensor_parallel": 2}),
    "pp2-ep2-tp2": (
        LATENT,
        {"world_size": 8, "pipeline_parallel": 2, "tensor_parallel": 2, "expert_parallel": 2},
    ),
    "pp2-fsdp2-ep2": (
        MIXTURE,
        {"world_size": 8, "pipeline_parallel": 2, "expert_parallel": 2},
    ),
    "pp2-latent": (LATENT, {"world_size": 2, "pipeline_parallel": 2}),
    "pp2-cp2": (TINY, {"world_size": 4, "pipeline_parallel": 2, "context_parallel": 2}),
    "pp2-cp2-ep4": (
        MIXTURE,
        {"world_size": 8, "pipeline_parallel": 2, "context_parallel": 2, "expert_parallel": 4},
    ),
    "pp2-fsdp2-cp2": (TINY, {"world_size": 8, "pipeline_parallel": 2, "context_parallel": 2}),
    "pp2-cp2-tp2": (
        TINY,
        {"world_size": 8, "pipeline_parallel": 2, "context_parallel": 2, "tensor_parallel": 2},
    ),
    "pp2-recomputed": (
        FOUR_LAYERS,
        {"world_size": 2, "pipeline_parallel": 2, "activation_checkpointing": True},
    ),
    "pp4": (FOUR_LAYERS, {"world_size": 4, "pipeline_parallel": 4}),
    "pp2-fsdp2-tp2": (
        FOUR_LAYERS,
        {"world_size": 8, "pipeline_parallel": 2, "tensor_parallel": 2},
    ),
    "pp4-fsdp2": (
        FOUR_LAYERS,
        # Half as many samples on each pipeline still make more micro-batches than stages.
        {"world_size": 8, "pipeline_parallel": 4, "tokens_per_micro_batch": 20},
    ),
}
NIGHTLY = (
    "pp2-tp2-experts",
    "pp2-ep2-tp2",
    "pp2-fsdp2-ep2",
    "pp2-latent",
    "pp2-cp2-ep4",
    "pp2-fsdp2-cp2",
    "pp2-cp2-tp2",
    "pp2-recomputed",
    "pp4",
    "pp2-fsdp2-tp2",
    "pp4-fsdp2",
)


def path_of(model: str, folder: Path) -> str:
    """Returns the preset, or the folder of a model that is no preset."""
    if model == LATENT:
        config = tiny_config("deepseek_v3", vocab_size=24, eos_token_id=1)
    elif model == UNTIED:
        config = AutoConfig.for_model(
            "qwen3",
            vocab_size=24,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    else:
        return model
    config.save_pretrained(folder / "model")
    return str(folder / "model")


def spec_with_stages(model: str = TINY, *, replay: str = "off", **trainer: Any) -> RunSpec:
    """Returns a run whose micro-batches are small enough that the pipeline is filled."""
    return spec_of(
        model={"path": model},
        rollout={"routing_replay": replay},
        trainer={
            "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.5},
            "tokens_per_micro_batch": 40,
            **trainer,
        },
    )


def queue_for(spec: RunSpec) -> Queue:
    """Returns random samples; with routing replay, with experts that partly differ and partly are unknown."""
    policy = policy_of(spec, seed=1, scale=1.5)
    queue = random_queue(policy)
    return queue if spec.rollout.routing_replay == "off" else with_experts(queue, policy)


def engine_of_stage(spec: RunSpec, rank: int) -> StagesEngine:
    """Returns the engine of a rank's stage, with random weights. All ranks must call it."""
    topology, stage = build_stage(
        spec.trainer, device=CPU, rank=rank, world_size=spec.trainer.world_size
    )
    model = policy_of(spec, scale=1.5).model
    replay = spec.rollout.routing_replay
    module = StagedPolicy(model, stage, temperature=1.0, routing_replay=replay)
    distribute(module, spec.trainer, topology)
    if spec.trainer.compile:
        compile_ahead(module, spec.trainer, device=CPU)
    return StagesEngine(module, spec=spec, topology=topology)


def join(rank: int, spec: RunSpec, folder: str) -> None:
    """Joins the process group of all ranks of a layout, whose store is in the folder."""
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=spec.trainer.world_size,
    )


def reference_engine(spec: RunSpec) -> ReferenceEngine:
    """Returns the reference engine with the random weights of the stages."""
    model = policy_of(spec, scale=1.5).model
    model.set_attn_implementation("sdpa")
    return ReferenceEngine(model, spec, role="policy")
