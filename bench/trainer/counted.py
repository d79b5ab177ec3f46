"""Compares the plan of a trainer's memory with a count: ``python -m bench.trainer.counted [--smoke]``.

The trainer's own passes run on fake tensors, which have shapes but no data: two micro-batches, forward and
backward, of models in real widths; only forward for workers that score. The count is the most bytes of
storages that exist at once, without optimizer and allocator; it needs no GPU. Kernels that a GPU fuses count
as their results. Layers are not compiled. Results go to ``bench/results/trainer-counted.json``. Bar: each
plan within 5 % of its count.

With ``--planned FILE`` the counts are those of the stored results, and FILE has the new comparison.
"""

import argparse
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, PretrainedConfig

from bench.report import read_json, report_to
from bench.trainer.workload import Scale, spec_of
from services.common.memory.trainer import trainer_memory
from services.common.models.loading import build_model
from services.common.runspec.run import RunSpec
from services.common.runspec.topology import TopologySpec
from services.extras.scoring.memory import reference_memory, scoring_spec
from services.trainer.algorithm import logprobs
from services.trainer.batch import attention
from services.trainer.batch.packing import PackedTokens, pack
from services.trainer.collectives import Ranks
from services.trainer.engines.fsdp import parallel
from services.trainer.model import experts
from services.trainer.model.policy import Policy, freeze
from services.wire.data.jagged import Jagged

RESULTS: Final = Path(__file__).parents[1] / "results" / "trainer-counted.json"
_UNCOUNTED: Final = ("optimizer", "moments, dequantized", "weights in transfer", "context")
"""Parts of the plan that passes do not have."""
_CPU: Final = torch.device("cpu")
_QWEN: Final = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
_MODELS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "Qwen2.5-1.5B": ("qwen2", {**_QWEN, "tie_word_embeddings": True}),
    "untied": ("qwen2", {**_QWEN, "tie_word_embeddings": False}),
    "Qwen3-8B": (
        "qwen3",
        {
            "vocab_size": 151_936,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 3,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": False,
        },
    ),
    "mixture of the 16B run": (
        "qwen3_moe",
        {
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "tie_word_embeddings": False,
        },
    ),
    "Moonlight": (
        "deepseek_v3",
        {
            "vocab_size": 163_840,
            "hidden_size": 2048,
            "intermediate_size": 11_264,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 3,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "head_dim": 64,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
        },
    ),
}
"""Models in the widths of published ones, with few layers."""
_CASTS: Final = {"activation_checkpointing": True, "keep_gathered": False}
_SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "all kept": {},
    "recomputed": {"activation_checkpointing": True},
    "recomputed, weights cast by layer": _CASTS,
    "every second layer recomputed": {"activation_checkpointing": 2},
    "selective": {"activation_checkpointing": "selective"},
    "float32": {"dtype": "float32"},
    "4 ranks": {"world_size": 4},
    "4 ranks, zero_stage 1, recomputed": {
        "world_size": 4,
        "zero_stage": 1,
        "activation_checkpointing": True,
    },
}
_SCORING: Final[Mapping[str, Mapping[str, Any]]] = {
    "scored": {},
    "scored by 4 ranks": {"scoring_ranks": 4},
}
"""Keys of ``topology`` of workers that only score."""
_DENSE_ONLY: Final = ("selective",)
"""Settings without a count for mixtures: a selected product of experts needs real numbers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one model, and no file")
    parser.add_argument("--planned", type=Path, help="file of a comparison with the stored counts")
    arguments = parser.parse_args()
    models = [*_MODELS][: 1 if arguments.smoke else None]
    cases = [
        (model, setting, tokens)
        for model in models
        for setting in (*_SETTINGS, *_SCORING)
        if not (setting in _DENSE_ONLY and "moe" in str(_MODELS[model][1]))
        for tokens in (4096, 20_480)
    ]
    counts: Mapping[Any, float] = {}
    if arguments.planned is not None:
        stored = read_json(RESULTS)["rows"]
        counts = {(r["model"], r["setting"], r["tokens"]): 1e9 * r["counted_gb"] for r in stored}
    rows = [
        {"model": model, "setting": setting, "tokens": tokens}
        | compare(model, setting, tokens, counted=counts.get((model, setting, tokens)))
        for model, setting, tokens in cases
    ]
    ratios = [row["planned_over_counted"] for row in rows]
    report_to(
        None if arguments.smoke else arguments.planned or RESULTS,
        {
            "host": "none: fake tensors",
            "torch": torch.__version__,
            "rows": rows,
            "lowest": min(ratios),
            "highest": max(ratios),
            "bar": "0.95 to 1.05",
            "meets_bar": all(0.95 <= ratio <= 1.05 for ratio in ratios),
        },
    )


def compare(
    model: str, setting: str, tokens: int, *, counted: float | None = None
) -> dict[str, float]:
    """Returns the counted and the planned bytes of a pass's peak in GB, and their ratio.

    Args:
        counted: Bytes that were counted before; None to count them.
    """
    family, shape = _MODELS[model]
    config = AutoConfig.for_model(family, **shape)
    scale = Scale(config, 8, 256, tokens // 2, tokens, 1, 1)
    trainer = {"dtype": "bfloat16", "compile": False, "activation_checkpointing": False}
    spec = spec_of(scale, **{**trainer, **_SETTINGS.get(setting, {})})
    if setting in _SCORING:
        spec = _scoring_run(spec, _SCORING[setting])
        memory = reference_memory(spec, config, gpu_bytes=10**12)
        counted = counted or count(config, scoring_spec(spec).trainer, tokens, scores=True)
    else:
        memory = trainer_memory(spec, config, gpu_bytes=10**12)
        counted = counted or count(config, spec.trainer, tokens)
    planned = sum(size for name, size in memory.parts.items() if name not in _UNCOUNTED)
    return {
        "counted_gb": round(counted / 1e9, 3),
        "planned_gb": round(planned / 1e9, 3),
        "planned_over_counted": round(planned / counted, 3),
    }


def _scoring_run(spec: RunSpec, topology: Mapping[str, Any]) -> RunSpec:
    """Returns a run whose reference has its own GPUs."""
    ranks = topology.get("scoring_ranks", 1)
    groups = {"train": 1, "ref_logp": ranks, "generate": 1}
    total = sum(groups.values())
    changes = {
        "task_groups": tuple((name,) for name in groups),
        "ratios": tuple(size / total for size in groups.values()),
        "gpus": total,
        **topology,
    }
    return spec.model_copy(update={"topology": TopologySpec.model_validate(changes)})


def count(config: PretrainedConfig, spec: Any, tokens: int, *, scores: bool = False) -> int:
    """Returns the most bytes that exist at once in two micro-batches of rank 0.

    Args:
        scores: True for passes of a frozen model without gradients.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()
    size = spec.world_size
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        with patch.object(parallel, "join_processes", lambda **_: None):
            topology = _topology(spec, scores=scores)
        packed = _pack(tokens)
        with _as_on_a_gpu(), FakeTensorMode(allow_non_fake_inputs=True):
            dtype = torch.bfloat16 if scores else torch.float32
            policy = Policy(build_model(config, dtype=dtype, device=_CPU), temperature=1.0)
            if scores:
                policy = freeze(policy)
            with patch.object(nn.Module, "to", lambda module, *_: module):
                parallel.distribute(policy, spec, topology)
            storages = LiveStorages()
            for parameter in policy.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                storages.add(local.untyped_storage())
            with storages, torch.set_grad_enabled(not scores):
                for is_last in (False, True):
                    parallel.begin_micro_batch(policy, is_last=is_last, spec=spec)
                    values = policy(packed)
                    if scores:
                        parallel.free_gathered(policy)
                    else:
                        torch.stack([value.sum() for value in values]).sum().backward()
            return storages.peak
    finally:
        distributed.destroy_process_group()


def _topology(spec: Any, *, scores: bool) -> parallel.RankTopology:
    size = spec.world_size
    if scores and size == 1:  # as services/extras/scoring/worker.py does
        return parallel.RankTopology(device=_CPU, data=Ranks())
    return parallel.build_topology(spec, device=_CPU, rank=0, world_size=size)


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of the storages that operations inside the block allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        """Most bytes at once."""
        self._now = 0
        self._sizes: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._stack = ExitStack()

    def add(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage until it is freed; its size may change."""
        key = id(storage)
        size, reference = self._sizes.get(key, (0, None))
        if reference is None:
            reference = weakref.ref(storage, lambda _: self._drop(key))
        self._sizes[key] = storage.nbytes(), reference
        self._now += storage.nbytes() - size
        self.peak = max(self.peak, self._now)

    def _drop(self, key: int) -> None:
        self._now -= self._sizes.pop(key)[0]

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self.add(leaf.untyped_storage())
        return output

    def __enter__(self) -> Any:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            resize(storage, size)
            if id(storage) in self._sizes:
                self.add(storage)

        # FSDP frees gathered weights in this way.
        self._stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        super().__exit__(*error)


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Selects the operations of a GPU in bfloat16; those that it compiles have their results only."""
    with ExitStack() as stack:
        for module, name, replacement in (
            (experts, "_fused", _fused_experts),
            (experts, "_by_expert", _grouped),
            (logprobs, "_fused", _fused_logits),
            (logprobs, "float32_products", _products),
            (attention, "_packed", _varlen),
        ):
            stack.enter_context(patch.object(module, name, replacement))
        stack.enter_context(patch.dict(logprobs._MULTIPLIED, {None: _products}))  # noqa: SLF001
        yield


class _Gated(torch.autograd.Function):
    """Allocates the gated rows and their gradients, as the compiled kernels do."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shares: Tensor) -> Tensor:
        ctx.save_for_backward(rows, shares)
        return rows.new_empty(len(rows), rows.shape[1] // 2)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor]:
        rows, shares = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(shares)


def _fused_experts(function: Any, _: Tensor) -> Any:
    if function is experts._gate:  # noqa: SLF001
        return lambda _module, rows, shares: _Gated.apply(rows, shares)  # type: ignore[no-untyped-call]
    return lambda rows, by_token: rows.new_empty(len(by_token), rows.shape[1])


def _grouped(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    if rows.dtype != torch.bfloat16:
        return rows @ weight[0]
    return functional.grouped_mm(rows, weight, offs=counts.cumsum(0).to(torch.int32))


def _fused_logits(function: Any, _: Tensor) -> Any:
    if function is logprobs._reduce:  # noqa: SLF001
        return lambda products, *_: tuple(products.new_empty(len(products)) for _ in range(3))
    return lambda products, *arguments: products.new_empty(products.shape, dtype=arguments[-1])


def _products(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.new_empty(len(hidden), len(weight), dtype=torch.float32)


def _varlen(query: Tensor, key: Tensor, value: Tensor, *, scores: Any, layout: Any) -> Tensor:
    flat = [states[0].transpose(0, 1) for states in (query, key, value)]
    return attention._varlen(*flat, scores=scores, layout=layout)[None]  # noqa: SLF001


def _pack(tokens: int) -> PackedTokens:
    """Returns a pack of four sequences with short prompts."""
    prompt, length = 32, tokens // 4 + 1
    return pack(
        Jagged.from_list([torch.zeros(prompt, dtype=torch.int32)] * 4),
        Jagged.from_list([torch.full((length - prompt,), 1, dtype=torch.int32)] * 4),
        device=_CPU,
        shares_prefixes=False,
    )


if __name__ == "__main__":
    main()
