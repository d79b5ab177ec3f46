"""Measures settings that save memory, and their cost: ``python -m bench.trainer.memory [--smoke]``.

The same step is trained with every setting for weights, moments and activations; its peak is
compared with the estimate of ``slipstream plan``. Results go to
``bench/results/trainer-memory.json``.
"""

import argparse
import gc
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from bench.report import write_json
from bench.trainer.__main__ import Launch, prepare
from bench.trainer.timing import peak_gib, reset_peak, timed
from bench.trainer.workload import Scale, full_scale, long_tailed_lengths, smoke_scale, spec_of
from services.common.memory.trainer import trainer_memory
from services.trainer.batch.step_plan import StepPlan

RESULTS = Path(__file__).parents[1] / "results" / "trainer-memory.json"
_WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "selective": {"activation_checkpointing": "selective"},
    "recomputed": {"activation_checkpointing": True},
    "recomputed, inputs in host memory": {
        "activation_checkpointing": True,
        "activation_offloading": True,
    },
    "optimizer in host memory": {"cpu_offload": "optimizer"},
    "activations in host memory": {"activation_offloading": True},
    "every second layer recomputed": {"activation_checkpointing": 2},
    "weights and optimizer in host memory": {"cpu_offload": True},
}
_UNCOUNTED = ("weights in transfer", "context")
"""Parts without a counterpart: no weights are sent here, and torch does not count its own memory."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small sizes, for any machine")
    parser.add_argument("--only", choices=tuple(_WAYS), help="one way alone, and nothing is kept")
    parser.add_argument("--sequences", type=int, default=24, help="in a step")
    parser.add_argument("--tokens", type=int, default=20_480, help="budget of a micro-batch")
    parser.add_argument("--limit-s", type=float, default=110.0, help="no way begins later")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not arguments.smoke
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if arguments.smoke:
        scale = smoke_scale()
    else:
        scale = replace(
            full_scale(),
            num_sequences=arguments.sequences,
            tokens_per_micro_batch=arguments.tokens,
            rounds=2,
        )
    common = {
        "dtype": "bfloat16" if on_gpu else "float32",
        "compile": on_gpu,
        # Not "auto", which the plan resolves for the GPU of a run, of which a bench has none.
        "activation_checkpointing": False,
        "keep_gathered": True,
    }
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        **common,
        "tokens": sum(long_tailed_lengths(scale)),
        "tokens_per_micro_batch": scale.tokens_per_micro_batch,
        "ways": {},
    }
    begin = time.monotonic()
    for name, way in _WAYS.items():
        if arguments.only not in (None, name):
            continue
        if time.monotonic() - begin > arguments.limit_s:
            report["ways"][name] = {"not_measured": "out of time"}
        else:
            report["ways"][name] = _tried(scale, {**common, **way}, device)
        print(name, json.dumps(report["ways"][name]), flush=True)
    if not arguments.smoke and arguments.only is None:
        write_json(RESULTS, report)


def _tried(scale: Scale, trainer: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns the results of one setting, or the reason why there are none; the others are still measured."""
    begin = time.monotonic()
    try:
        row = _measured(scale, trainer, device)
    except Exception as error:  # noqa: BLE001 -- it is reported
        row = {"failed": f"{type(error).__name__}: {error}"[:500]}
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {**row, "whole_s": time.monotonic() - begin}


def _measured(scale: Scale, trainer: dict[str, Any], device: torch.device) -> dict[str, Any]:
    work, _, plan, _ = prepare(scale, trainer, device, Launch())
    metrics: list[dict[str, float]] = []

    def step() -> None:
        metrics.append(work().metrics)

    timed(step, 0, device)  # compiles, and allocates the memory that all later steps hold
    reset_peak(device)
    seconds = timed(step, scale.rounds - 1, device)
    predicted = trainer_memory(
        spec_of(scale, **{**trainer, "tokens_per_micro_batch": _most_tokens(scale, plan)}),
        scale.config,
        gpu_bytes=0,
    )
    counted = sum(size for name, size in predicted.parts.items() if name not in _UNCOUNTED)
    return {
        "step_s": seconds,
        "tokens_per_s": sum(long_tailed_lengths(scale)) / seconds,
        "forward_backward_s": metrics[-1]["seconds_forward_backward"],
        "optimizer_s": metrics[-1]["seconds_optimizer"],
        "peak_memory_gib": peak_gib(device),
        "predicted_gib": counted / 2**30,
        "predicted_in_host_gib": sum(predicted.host.values()) / 2**30,
        "micro_batches": len(plan.updates[0]),
    }


def _most_tokens(scale: Scale, plan: StepPlan) -> int:
    lengths = long_tailed_lengths(scale)
    return max(sum(lengths[position] for position in micro) for micro in plan.updates[0])


if __name__ == "__main__":
    main()
