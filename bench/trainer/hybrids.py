"""Measures training of a hybrid against a dense model: ``python -m bench.trainer.hybrids [--smoke]``.

A model of Qwen3.5's form (three of four layers are gated delta nets) and one of Qwen3's form with as many
active weights, both random, run in the same step and with the same batch as ``bench.trainer``. For each the
MFU and the kernels that take most of the GPU's time are reported, in ``bench/results/hybrid-gpu.json`` beside
the whole runs of ``bench.one_gpu --hybrid`` and ``--dense``. Bar: the hybrid's MFU within 10 % of the dense
model's.
"""

import argparse
import importlib.util
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from bench.e2e.shapes import DENSE, HYBRID, smoke
from bench.one_gpu import HYBRIDS
from bench.report import read_json, report_to
from bench.trainer.__main__ import Launch, prepare
from bench.trainer.study import explain
from bench.trainer.timing import peak_gib, reset_peak, timed
from bench.trainer.workload import Scale, full_scale, long_tailed_lengths, smoke_scale, useful_flops
from services.trainer.model.flops import model_weights, peak_flops

_MODELS = {"hybrid": HYBRID, "dense": DENSE}
_KERNELS = ("fla", "tilelang", "causal_conv1d")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="default: both")
    parser.add_argument("--smoke", action="store_true", help="small sizes, for any machine")
    parser.add_argument("--tokens", type=int, default=8192, help="budget of a micro-batch")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--eager", action="store_true", help="layers without torch.compile")
    arguments = parser.parse_args()
    is_smoke = arguments.smoke or not torch.cuda.is_available()
    device = torch.device("cpu" if is_smoke else "cuda", None if is_smoke else 0)
    base = smoke_scale() if is_smoke else replace(full_scale(), longest=2048)
    trainer: dict[str, Any] = {
        "dtype": "float32" if is_smoke else "bfloat16",
        "compile": not is_smoke and not arguments.eager,
        "activation_checkpointing": arguments.recompute,
        "tokens_per_micro_batch": base.tokens_per_micro_batch if is_smoke else arguments.tokens,
    }
    out = None if is_smoke else HYBRIDS
    results = read_json(out)
    results["step"] = results.get("step", {}) | {
        "device": "cpu" if is_smoke else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "packages": [name for name in _KERNELS if importlib.util.find_spec(name)],
        "tokens": sum(long_tailed_lengths(base)),
        **trainer,
    }
    for name in arguments.models or _MODELS:
        shape = smoke(_MODELS[name]) if is_smoke else _MODELS[name]
        results["step"][name] = _measure(replace(base, config=shape.config()), trainer, device)
        if distributed.is_initialized():
            distributed.destroy_process_group()
        report_to(out, results)


def _measure(scale: Scale, trainer: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns one model's rate, MFU and, on a GPU, seconds and shares of its kernels."""
    work, _, plan, _ = prepare(scale, trainer, device, Launch())
    reset_peak(device)
    seconds = timed(work, scale.rounds, device)
    parameters, active = model_weights(scale.config)
    row: dict[str, Any] = {
        "parameters": parameters,
        "active": active,
        "step_s": seconds,
        "tokens_per_s": sum(long_tailed_lengths(scale)) / seconds,
        "micro_batches": len(plan.updates[0]),
        "peak_memory_gib": peak_gib(device),
    }
    if device.type != "cuda":
        return row
    if (peak := peak_flops(device)) is not None:
        row["mfu"] = useful_flops(scale) / seconds / peak
    row["seconds"] = explain(work, device)
    kernels = {name: spent for name, spent in row["seconds"].items() if name.startswith("kernel ")}
    row["shares"] = {name: round(spent / seconds, 4) for name, spent in kernels.items()}
    return row


if __name__ == "__main__":
    main()
