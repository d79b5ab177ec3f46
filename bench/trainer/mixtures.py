"""Measures training of a mixture of experts: ``python -m bench.trainer.mixtures [--layers N] [--smoke]``.

Layers of Qwen3-30B-A3B's shape, as many as fit on one GPU with AdamW in float32, run in the same
step and with the same batch as ``bench.trainer``. MFU counts the active experts of a token. Results
go to ``bench/results/trainer-mixtures.json``. Bar: MFU >= 30 %.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from bench.report import report_to
from bench.trainer.__main__ import Launch, prepare
from bench.trainer.study import explain
from bench.trainer.timing import peak_gib, reset_peak, timed
from bench.trainer.workload import Scale, full_scale, long_tailed_lengths, smoke_scale, useful_flops
from services.trainer.model.flops import peak_flops

RESULTS = Path(__file__).parents[1] / "results" / "trainer-mixtures.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small sizes, for any machine")
    parser.add_argument("--layers", type=int, default=6, help="layers of 0.63 billion parameters")
    parser.add_argument("--tokens", type=int, default=32_768, help="budget of a micro-batch")
    parser.add_argument("--eager", action="store_true", help="layers without torch.compile")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not arguments.smoke
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    scale = _scale(arguments.layers, is_smoke=arguments.smoke)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "layers": scale.config.num_hidden_layers,
        "tokens": sum(long_tailed_lengths(scale)),
    }
    trainer = {
        "dtype": "bfloat16" if on_gpu else "float32",
        "compile": on_gpu and not arguments.eager,
        "tokens_per_micro_batch": scale.tokens_per_micro_batch
        if arguments.smoke
        else arguments.tokens,
    }
    report |= trainer | _measure(scale, trainer, device)
    report_to(None if arguments.smoke else RESULTS, report)


def _measure(scale: Scale, trainer: dict[str, Any], device: torch.device) -> dict[str, Any]:
    work, _, plan, _ = prepare(scale, trainer, device, Launch())
    reset_peak(device)
    seconds = timed(work, scale.rounds, device)
    row: dict[str, Any] = {
        "step_s": seconds,
        "tokens_per_s": sum(long_tailed_lengths(scale)) / seconds,
        "micro_batches": len(plan.updates[0]),
        "peak_memory_gib": peak_gib(device),
    }
    peak = peak_flops(device)
    if peak is not None:
        row["mfu"] = useful_flops(scale) / seconds / peak
        row["seconds"] = explain(work, device)
    return row


def _scale(layers: int, *, is_smoke: bool) -> Scale:
    base = smoke_scale() if is_smoke else full_scale()
    sizes: dict[str, int] = (
        {"hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 8, "vocab_size": 512}
        if is_smoke
        else {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128}
    )
    config = AutoConfig.for_model(
        "qwen3_moe",
        **{
            "vocab_size": 151_936,
            "intermediate_size": 6144,
            "num_hidden_layers": 2 if is_smoke else layers,
            "num_attention_heads": 4 if is_smoke else 32,
            "num_key_value_heads": 4,
            "head_dim": 16 if is_smoke else 128,
            "num_experts_per_tok": 2 if is_smoke else 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 32_768,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            **sizes,
        },
    )
    return replace(base, config=config)


if __name__ == "__main__":
    main()
