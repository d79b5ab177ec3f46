"""Layouts of a large mixture on many GPUs, by arithmetic alone: ``python -m bench.trainer.layouts``.

For each layout: memory of the rank that needs the most, the bubble of an update, bytes that a GPU sends to
experts and to the next stage, and bytes that it sends to rollouts. In addition, the memory that
``bench/trainer/stages.py`` measures on two GPUs, as the plan predicts it. Nothing is measured. Results go to
``bench/results/trainer-layouts.json``; a test compares them with today's plan.
"""

import argparse
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig

from bench.report import report_to
from bench.trainer.stages import ARMS, settings_of, two_gpu_scale
from bench.trainer.workload import spec_of
from services.common.memory.sizes import weight_bytes
from services.common.memory.trainer import trainer_memory
from services.common.models.stages import bubble, most_packs
from services.common.runspec.run import RunSpec
from services.trainer.model.flops import model_weights

RESULTS: Final = Path(__file__).parents[1] / "results" / "trainer-layouts.json"
_GPUS: Final = 512
_GPU_BYTES: Final = 141 * 10**9
_MODEL: Final = {
    "vocab_size": 152_064,
    "hidden_size": 5120,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 192,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 2,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
"""A mixture of about 280 billion weights with latent attention."""
_LAYOUTS: Final = (
    {"pipeline_parallel": 4, "expert_parallel": 64},
    {"pipeline_parallel": 8, "expert_parallel": 32},
    {"pipeline_parallel": 8, "expert_parallel": 64},
    {"pipeline_parallel": 8, "tensor_parallel": 2, "expert_parallel": 16},
    {"pipeline_parallel": 8, "tensor_parallel": 4, "expert_parallel": 16},
)


_UNMEASURED: Final = ("weights in transfer", "context")
"""Parts of the plan that the peak of a bench's tensors does not include."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    config = AutoConfig.for_model("deepseek_v3", **_MODEL)
    weights, active = model_weights(config)
    report_to(
        parser.parse_args().out,
        {
            "host": "none: arithmetic only",
            "gpus": _GPUS,
            "weights": weights,
            "active_weights": active,
            "layouts": [_planned(layout, config) for layout in _LAYOUTS],
            "two_gpus_gib": {arm: round(_planned_on_two_gpus(arm), 1) for arm in ARMS},
        },
    )


def _planned_on_two_gpus(arm: str) -> float:
    """Returns the planned GiB of a measurement's tensors on the fullest of two GPUs."""
    scale = two_gpu_scale()
    spec = spec_of(scale, **settings_of(arm, world_size=2))
    parts = trainer_memory(spec, scale.config, gpu_bytes=_GPU_BYTES).parts
    return sum(size for name, size in parts.items() if name not in _UNMEASURED) / 2**30


def _planned(layout: dict[str, int], config: Any) -> dict[str, Any]:
    """Returns the figures of one layout: 256 prompts with 16 answers of up to 16,384 tokens in an update."""
    spec = RunSpec.model_validate(
        {
            "name": "on-paper",
            "model": {"path": "tiny:qwen2-0.4m"},
            "data": {
                "train": {"source": "jsonl", "path": "none.jsonl"},
                "max_prompt_tokens": 2048,
            },
            "rollout": {
                "group_size": 16,
                "max_response_tokens": 16_384,
                "rewards": [{"name": "exact_match"}],
            },
            "trainer": {
                "steps": 1,
                "prompts_per_step": 256,
                "engine": "stages",
                "world_size": _GPUS,
                "dtype": "bfloat16",
                "tokens_per_micro_batch": 18_432,
                "activation_checkpointing": True,
                **layout,
            },
        }
    )
    trainer = spec.trainer
    memory = trainer_memory(spec, config, gpu_bytes=_GPU_BYTES)
    packs, item = most_packs(spec), torch.bfloat16.itemsize
    sharing = trainer.expert_parallel * trainer.tensor_parallel
    # A rank sends its tokens to the ranks whose experts compute them, and gets the results back.
    sent = trainer.tokens_per_micro_batch // trainer.tensor_parallel * config.num_experts_per_tok
    return {
        **layout,
        "memory_gb": round(memory.used / 1e9, 1),
        "parts_gb": {name: round(size / 1e9, 2) for name, size in memory.parts.items()},
        "micro_batches": packs,
        "bubble": round(bubble(trainer.pipeline_parallel, packs), 3),
        "to_experts_gb_per_layer": round(
            2 * sent * config.hidden_size * item * (sharing - 1) / sharing / 1e9, 2
        ),
        "to_next_stage_mb": round(
            trainer.tokens_per_micro_batch * config.hidden_size * item / 1e6, 1
        ),
        "to_rollouts_gb": round(weight_bytes(config, torch.bfloat16) / _GPUS / 1e9, 2),
    }


if __name__ == "__main__":
    main()
