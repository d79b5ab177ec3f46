"""Training workloads: a random model, its task, and a batch of realistic size."""

import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from services.common.models.loading import build_model

_TASKS = Path(__file__).with_name("tasks.py")
_BYTES = 258
"""Number of tokens of the byte tokenizer; a random model ends its response after about as many
tokens."""
_REAL = 151_936
"""A vocabulary of real size, with which a random model practically never ends a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model of Qwen2's form, or of another family, and the episodes that it is trained on."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    max_response_tokens: int
    mean_response_tokens: int
    """Approximate mean, for requests that are made without a run."""
    prompts_per_step: int = 32
    group_size: int = 8
    dtype: str = "bfloat16"
    workflow: str = "single_turn"
    workflow_arguments: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=lambda: {"compile": True})
    engine: str = "vllm"
    has_own_head: bool = False
    """True if the output layer does not share the embedding's weights."""
    learning_rate: float = 1e-9
    family: str = "qwen2"
    architecture: str = "Qwen2ForCausalLM"
    further: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the configuration that only this family has."""

    def config(self) -> Any:
        """Returns the model's configuration."""
        return AutoConfig.for_model(
            self.family,
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=8192,
            tie_word_embeddings=not self.has_own_head,
            eos_token_id=1,
            pad_token_id=0,
            architectures=[self.architecture],
            **self.further,
        )

    def save_model(self, folder: Path) -> None:
        """Writes the model, from a separate process so that no GPU memory remains allocated."""
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            pool.submit(_save_model, self, folder).result()

    def spec(self, model: Path, *, steps: int) -> dict[str, Any]:
        """Returns the run's specification."""
        return {
            "name": "e2e",
            "model": {"path": str(model), "tokenizer": "bytes"},
            "data": {
                "train": {"source": "python", "path": f"{_TASKS}:prompts"},
                "answer_column": None,
                "max_prompt_tokens": 128,
            },
            "rollout": {
                "engine": self.engine,
                "replicas": 1,
                "group_size": self.group_size,
                "max_response_tokens": self.max_response_tokens,
                "rewards": [{"name": f"{_TASKS}:reward"}],
                "workflow": self.workflow,
                "workflow_arguments": self.workflow_arguments,
            },
            "trainer": {
                "steps": steps,
                "prompts_per_step": self.prompts_per_step,
                "dtype": self.dtype,
                "optimizer": {"learning_rate": self.learning_rate},
                **self.trainer,
            },
            "validation": {"every": 0},
        }


def _save_model(shape: Shape, folder: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model(shape.config(), dtype=getattr(torch, shape.dtype), device=device, seed=0)
    model.save_pretrained(folder)


_GEOMETRIC = Shape(
    layers=28,
    hidden=1536,
    intermediate=8960,
    heads=12,
    kv_heads=2,
    vocabulary=_BYTES,
    max_response_tokens=1024,
    mean_response_tokens=280,
)

QWEN_7B = Shape(
    layers=28,
    hidden=3584,
    intermediate=18_944,
    heads=28,
    kv_heads=4,
    vocabulary=152_064,
    has_own_head=True,
    max_response_tokens=1024,
    mean_response_tokens=280,
    prompts_per_step=16,
    learning_rate=1e-5,
    workflow=f"{_TASKS}:Lognormal",
    workflow_arguments={"least": 16, "most": 1024, "median": 220.0, "sigma": 0.7},
)
"""Qwen2.5-7B's shape with adapters and without any memory setting."""
QWEN_14B = replace(QWEN_7B, layers=48, hidden=5120, intermediate=13_824, heads=40, kv_heads=8)
"""Qwen2.5-14B's shape, for a quantized base."""

HYBRID = Shape(
    layers=24,
    hidden=2048,
    intermediate=6144,
    heads=8,
    kv_heads=2,
    vocabulary=_REAL,
    max_response_tokens=1024,
    mean_response_tokens=280,
    workflow=f"{_TASKS}:Lognormal",
    workflow_arguments={"least": 16, "most": 1024, "median": 220.0, "sigma": 0.7},
    family="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    further={
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
)
"""Qwen3.5's form with 1.68 billion parameters: three of four layers are gated delta nets."""
DENSE = replace(
    HYBRID,
    layers=28,
    heads=16,
    kv_heads=8,
    family="qwen3",
    architecture="Qwen3ForCausalLM",
    further={"head_dim": 128},
)
"""Qwen3's form with 1.72 billion parameters, to compare with :data:`HYBRID`."""

# A random model ends a response after about as many tokens as its vocabulary has.
DUEL = replace(
    _GEOMETRIC,
    vocabulary=600,
    max_response_tokens=2048,
    mean_response_tokens=600,
    prompts_per_step=16,
)
"""1.3 B parameters, 16 groups of 8, geometric lengths with a mean of 600."""

# Its responses have 460 tokens on average.
TAIL = replace(
    _GEOMETRIC,
    vocabulary=350,
    max_response_tokens=3072,
    mean_response_tokens=460,
    prompts_per_step=24,
)
"""1.3 B parameters, 24 groups of 8, geometric lengths with a mean of 460 and a long tail."""

QWEN3_8B = Shape(
    layers=36,
    hidden=4096,
    intermediate=12_288,
    heads=32,
    kv_heads=8,
    vocabulary=_REAL,
    has_own_head=True,
    max_response_tokens=1024,
    mean_response_tokens=280,
    prompts_per_step=16,
    workflow=f"{_TASKS}:Lognormal",
    workflow_arguments={"least": 16, "most": 1024, "median": 220.0, "sigma": 0.7},
    family="qwen3",
    architecture="Qwen3ForCausalLM",
    further={"head_dim": 128},
    trainer={
        "compile": True,
        "activation_checkpointing": True,
        "tokens_per_micro_batch": 2048,
        "cpu_offload": "optimizer",
    },
)
"""Qwen3-8B's shape: 8.2 B parameters, all of which are trained, beside an engine on a GPU of 140 GB."""

QWEN3_MOE_16B = replace(
    QWEN3_8B,
    layers=24,
    hidden=2048,
    intermediate=6144,
    kv_heads=4,
    prompts_per_step=64,
    family="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    further={
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 16,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    trainer={**QWEN3_8B.trainer, "tokens_per_micro_batch": 4096},
)
"""Layers of Qwen3-30B-A3B's shape with 16 active experts: 15.6 B parameters, of which a token uses 2.9 B."""

SHAPES = {
    # 1.31 B parameters; lengths are geometric.
    "geometric": _GEOMETRIC,
    "duel": DUEL,
    "tail": TAIL,
    # Layers of a 7 B model, but fewer: master weights and AdamW of all 28 do not fit on one GPU.
    "lognormal": Shape(
        layers=16,
        hidden=3584,
        intermediate=18_944,
        heads=28,
        kv_heads=4,
        vocabulary=_REAL,
        max_response_tokens=4096,
        mean_response_tokens=540,
        workflow=f"{_TASKS}:Lognormal",
        workflow_arguments={"least": 32, "most": 4096, "median": 360.0, "sigma": 0.9},
        trainer={"compile": True, "activation_checkpointing": True},
    ),
    "tools": replace(
        _GEOMETRIC,
        max_response_tokens=1536,
        mean_response_tokens=900,
        workflow=f"{_TASKS}:SlowTools",
        workflow_arguments={"turns": 4, "turn_tokens": 384, "mean_seconds": 1.5},
    ),
}


_SMALL = {
    "head_dim": 32,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # The kernels of vLLM's CPU build do not have smaller sizes.
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def smoke(shape: Shape) -> Shape:
    """Returns a variant that takes seconds on a CPU."""
    changes = {"least": 2, "most": 24, "median": 8.0, "turn_tokens": 6, "mean_seconds": 0.05}
    return replace(
        shape,
        layers=2,
        hidden=64,
        intermediate=128,
        heads=2,
        kv_heads=2,
        vocabulary=min(shape.vocabulary, 4096),
        max_response_tokens=24,
        mean_response_tokens=12,
        prompts_per_step=4,
        dtype="float32",
        workflow_arguments={
            name: changes.get(name, value) for name, value in shape.workflow_arguments.items()
        },
        trainer={},
        engine="torch",
        further={name: _SMALL.get(name, value) for name, value in shape.further.items()},
    )
