"""Generates the table of models that fit onto GPUs, from the plan of ``slipstream plan --gpu-memory``."""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from services.common.models.training_memory import TrainerMemory, shapes_of, trainer_memory
from services.common.runspec.run import RunSpec

_HEAD = """# What fits where

Written by `make docs` from `services/common/models/training_memory.py`: computed, not measured. The same for
a specification of yours: `slipstream plan run.yaml --gpus 8 --gpu-memory 141GB`; how far measurement bears it
out is in [planning](planning.md#memory), and what each key does in [memory](memory.md).

Each cell has the settings that cost least of those that fit, the memory of a GPU at its peak and, behind a
plus, the host memory for each GPU. All weights are trained, in `bfloat16` and compiled, with
`trainer.zero_stage: 3` over GPUs that the trainer has for itself, and are sent from there
(`weight_sync.mode: shadow`); the context is the longest sequence, prompt and response. Of a GPU {most:.0%}
are planned at most. "none" of these ways fits; `trainer.lora` and `trainer.tensor_parallel` are not tried.

| sign | key |
| --- | --- |
| S | `trainer.activation_checkpointing: selective` |
| R | `trainer.activation_checkpointing: true` |
| A | `trainer.activation_offloading: true` |
| C2 | `trainer.context_parallel: 2` |
| M | `trainer.cpu_offload: optimizer` |
| H | `trainer.cpu_offload: true` |
"""
_MOST = 0.95
_GB = 1e9
_MODELS: Mapping[str, dict[str, Any]] = {
    "7B (Qwen2.5)": {
        "model_type": "qwen2",
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "14B (Qwen2.5)": {
        "model_type": "qwen2",
        "vocab_size": 152_064,
        "hidden_size": 5120,
        "intermediate_size": 13_824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "32B (Qwen2.5)": {
        "model_type": "qwen2",
        "vocab_size": 152_064,
        "hidden_size": 5120,
        "intermediate_size": 27_648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "70B (Llama 3)": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
_GPUS = (1, 2, 8)
_SIZES_GB = (80, 141)
_CONTEXTS = {"8k": 8_192, "32k": 32_768, "128k": 131_072}
_KEPT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {"activation_checkpointing": False}),
    ("S", {"activation_checkpointing": "selective"}),
    ("R", {"activation_checkpointing": True}),
    ("R A", {"activation_checkpointing": True, "activation_offloading": True}),
)
_OFFLOADED = (("", False), ("M", "optimizer"), ("H", True))


def page() -> str:
    """Returns the page, with a row for each model and number of GPUs."""
    head = f"| model | GPUs | {' | '.join(_CONTEXTS)} |\n| --- | --- |{' --- |' * len(_CONTEXTS)}"
    return "\n".join([_HEAD.format(most=_MOST), head, *_rows(), ""])


def _rows() -> Iterator[str]:
    for name, values in _MODELS.items():
        config = AutoConfig.for_model(**{**values, "tie_word_embeddings": False})
        shapes = shapes_of(config)
        for gpus in _GPUS:
            for size_gb in _SIZES_GB:
                cells = [
                    _cell(config, shapes, gpus=gpus, size_gb=size_gb, context=context)
                    for context in _CONTEXTS.values()
                ]
                yield f"| {name} | {gpus} of {size_gb} GB | {' | '.join(cells)} |"


def _cell(
    config: PretrainedConfig,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    gpus: int,
    size_gb: int,
    context: int,
) -> str:
    total = int(size_gb * _GB)
    for signs, trainer in _ways(config, gpus):
        spec = _spec(context, {**trainer, "world_size": gpus})
        found = trainer_memory(spec, config, gpu_bytes=total, shapes=shapes)
        if found.used <= _MOST * total:
            return f"{signs or 'plain'}: {_figures(found)}"
    return "none"


def _figures(found: TrainerMemory) -> str:
    there = sum(found.host.values()) / _GB
    return f"{found.used / _GB:.0f}" + (f" + {there:.0f} GB" if there >= 1 else " GB")


def _ways(config: PretrainedConfig, gpus: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields settings with their signs, in order of increasing cost."""
    heads: int = config.num_attention_heads
    for offload_sign, offload in _OFFLOADED:
        shares = [n for n in (1, 2, 4, 8) if n <= gpus and heads % n == 0]
        for sharing in shares:
            # Ranks share a sequence only if it does not fit otherwise.
            for kept_sign, kept in _KEPT if sharing == 1 else _KEPT[2:]:
                share_sign = f"C{sharing}" if sharing > 1 else ""
                signs = " ".join(filter(None, (kept_sign, share_sign, offload_sign)))
                yield signs, {**kept, "cpu_offload": offload, "context_parallel": sharing}


def _spec(context: int, trainer: Mapping[str, Any]) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "fits",
            "model": {"path": "tiny:qwen2-0.4m"},
            "data": {"train": {"source": "jsonl", "path": "none"}, "max_prompt_tokens": 2048},
            "rollout": {
                "max_response_tokens": context - 2048,
                "rewards": [{"name": "exact_match"}],
            },
            "trainer": {
                "steps": 1,
                "prompts_per_step": 8,
                "dtype": "bfloat16",
                "compile": True,
                "tokens_per_micro_batch": 8192,
                **trainer,
            },
        }
    )
