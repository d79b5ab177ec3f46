"""Tests that the planned bytes of trainers, rollouts and shared GPUs are those of the golden file.

Figures are golden, because a change of the planner's structure must not change them, and a change of its
constants must show which runs it affects. ``pytest --update-golden`` rewrites them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig, Qwen2Config

from services.checks.start.memory import needed_by_gpu, run_memory, smallest_change
from services.common.memory.rollout import other_workers_bytes, plan_of
from services.common.memory.trainer import (
    compiles_asleep,
    resident_memory,
    sleeping_memory,
    state_memory,
)
from services.common.runspec.base import in_yaml
from services.common.runspec.run import RunSpec
from services.common.runspec.worker_kinds import total_gpus
from tests.helpers.configs import qwen_7b
from tests.helpers.mixtures import tiny_config
from tests.helpers.specs import spec_with

_GB = 10**9


def _tied() -> PretrainedConfig:
    return Qwen2Config(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


def _mixture() -> PretrainedConfig:
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        tie_word_embeddings=False,
    )
    assert isinstance(config, PretrainedConfig)
    return config


_MODELS: Mapping[str, Callable[[], PretrainedConfig]] = {
    "7B": qwen_7b,
    "1.5B, tied": _tied,
    "30B, experts": _mixture,
    "tiny, recurrent": lambda: tiny_config("qwen3_5_text"),
}
_LORA = {"lora": {"rank": 32}}
_STAGES = {"engine": "stages", "world_size": 8, "pipeline_parallel": 4, "compile": False}
_CASES: Mapping[str, tuple[str, int, dict[str, Any]]] = {
    "one GPU": ("1.5B, tied", 80, {}),
    "one shared GPU": ("1.5B, tied", 141, {"gpus": 1}),
    "float32": ("1.5B, tied", 80, {"trainer": {"dtype": "float32"}}),
    "8 bits": ("7B", 141, {"trainer": {"optimizer": {"kind": "adamw_8bit"}}}),
    "adapters beside a rollout": ("7B", 80, {"trainer": _LORA, "gpus": 1}),
    "adapters with their own GPUs": ("7B", 80, {"trainer": _LORA}),
    "nf4": ("7B", 80, {"trainer": {"lora": {"rank": 32, "base_dtype": "nf4"}}, "gpus": 1}),
    "merged adapters": ("7B", 141, {"trainer": {"lora": {"rank": 8, "sync": "merged"}}}),
    "8 shards": ("7B", 80, {"trainer": {"world_size": 8}, "sync": {"mode": "cpu_async"}}),
    "whole gradients": ("7B", 141, {"trainer": {"world_size": 4, "zero_stage": 1}}),
    "tensor and context": (
        "7B",
        80,
        {"trainer": {"world_size": 8, "tensor_parallel": 4, "context_parallel": 2}},
    ),
    "experts": ("30B, experts", 141, {"trainer": {"world_size": 8, "expert_parallel": 8}}),
    "experts received in place": (
        "30B, experts",
        141,
        {
            "trainer": {"world_size": 8, "expert_parallel": 4},
            "sync": {"mode": "inplace"},
            "rollout": {"engine_arguments": {"tensor_parallel_size": 4}},
        },
    ),
    "stages": ("7B", 80, {"trainer": _STAGES}),
    "stages with experts": ("30B, experts", 141, {"trainer": {**_STAGES, "expert_parallel": 2}}),
    "offloaded optimizer": ("7B", 80, {"trainer": {"cpu_offload": "optimizer"}}),
    "offloaded": (
        "7B",
        80,
        {
            "trainer": {"cpu_offload": True, "activation_offloading": True},
            "sync": {"mode": "delta"},
        },
    ),
    "recomputed": ("7B", 141, {"trainer": {"activation_checkpointing": True, "compile": False}}),
    "selective": ("7B", 141, {"trainer": {"activation_checkpointing": "selective"}}),
    "reference": ("1.5B, tied", 80, {"algorithm": {"kl": {"coefficient": 0.1}}}),
    "critic": ("1.5B, tied", 80, {"algorithm": {"advantage": "gae"}}),
    "colocated": ("1.5B, tied", 141, {"topology": {"placement": "colocated"}}),
    "colocated, little memory": ("7B", 80, {"topology": {"placement": "colocated"}}),
    "colocated, sharded": (
        "7B",
        141,
        {
            "topology": {"placement": "colocated"},
            "trainer": {"world_size": 4},
            "rollout": {"replicas": 2, "engine_arguments": {"tensor_parallel_size": 2}},
        },
    ),
    "FP8": ("7B", 80, {"rollout": {"quantization": "fp8", "kv_cache_dtype": "fp8"}}),
    "engine with replicas": (
        "7B",
        80,
        {"rollout": {"engine_arguments": {"data_parallel_size": 2, "tensor_parallel_size": 2}}},
    ),
    "given share": ("7B", 80, {"rollout": {"engine_arguments": {"gpu_memory_utilization": 0.5}}}),
    "given cache": (
        "7B",
        80,
        {"rollout": {"engine_arguments": {"kv_cache_memory_bytes": 20 * _GB}}, "gpus": 1},
    ),
    "recurrent": ("tiny, recurrent", 24, {"rollout": {"engine": "torch"}}),
}


def _spec(parts: Mapping[str, Any]) -> RunSpec:
    return spec_with(
        model={"path": "/models/any", "tokenizer": "bytes"},
        rollout={
            "engine": "vllm",
            "replicas": 1,
            "max_response_tokens": 4096,
            **parts.get("rollout", {}),
        },
        trainer={
            "prompts_per_step": 16,
            "dtype": "bfloat16",
            "compile": True,
            "tokens_per_micro_batch": 8192,
            **parts.get("trainer", {}),
        },
        algorithm=parts.get("algorithm", {}),
        topology=parts.get("topology", {}),
        weight_sync=parts.get("sync", {}),
    )


def _figures(spec: RunSpec, config: PretrainedConfig, size: int, gpus: int) -> dict[str, Any]:
    memory = run_memory(spec, config, gpu_bytes=size, gpus=gpus)
    trainer, rollout = memory.trainer, memory.rollout
    stays = resident_memory(spec, config, gpu_bytes=size)
    roles = ["trainer", "ref_logp", "rollout"]
    beside = plan_of(spec, config, gpu_bytes=size, roles=roles, checks=False)
    change = smallest_change(spec, config, gpu_bytes=size, gpus=gpus)
    devices = [str(number) for number in range(gpus)]
    return {
        "chosen": memory.spec.trainer.activation_checkpointing,
        "trainer": {name: round(num_bytes) for name, num_bytes in trainer.parts.items()},
        "host": {name: round(num_bytes) for name, num_bytes in trainer.host.items()},
        "cached": round(trainer.cached),
        "rollout": {
            "weights": round(rollout.weights),
            "plane": round(rollout.plane),
            "kv cache": round(rollout.kv_cache),
            "share": rollout.engine_share,
            "tokens": rollout.kv_tokens,
        },
        "beside others": [round(beside.used), round(beside.other_workers), beside.stays_awake],
        "others": round(other_workers_bytes(roles, spec, config, gpu_bytes=size)),
        "stays": stays,
        "asleep": round(sleeping_memory(spec, config, gpu_bytes=size)),
        "state": round(state_memory(spec, config, gpu_bytes=size)),
        "compiles asleep": compiles_asleep(spec, config, contents=stays, gpu_bytes=size),
        "fits": not memory.why_not,
        "change": [f"{key}: {in_yaml(value)}" for key, value in change.items()],
        "needed": {
            name: round(num_bytes)
            for name, num_bytes in needed_by_gpu(spec, config, gpu_bytes=size, gpus=devices).items()
        },
    }


@pytest.mark.parametrize("case", _CASES)
def test_planned_bytes_are_golden(case: str, golden: Callable[[str, str, Any], None]) -> None:
    model, size_gb, parts = _CASES[case]
    spec = _spec(parts)
    figures = _figures(
        spec, _MODELS[model](), size_gb * _GB, parts.get("gpus", max(1, total_gpus(spec)))
    )
    golden("memory_figures", case, figures)
