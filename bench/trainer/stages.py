"""Two pipeline stages against FSDP2 on two GPUs: ``torchrun --nproc-per-node 2 -m bench.trainer.stages``.

Both engines train the same batch with the same model, optimizer and budget of a micro-batch, one after the
other in the same processes. The schedule is 1F1B, whose bubble is ``(P - 1) / (M + P - 1)`` of an update with
``M`` micro-batches and ``P`` stages (``services/common/models/stages.py``). Both are measured without and
with ``torch.compile``, on a CPU without it only: the C++ of compiled layers takes minutes to build. Results
go to ``bench/results/trainer-stages.json``.

Bar: two stages train at least .9 of the tokens a second of FSDP2 over two GPUs, both compiled.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed

from bench.report import write_json
from bench.trainer.__main__ import Launch, prepare, step_of
from bench.trainer.timing import peak_gib, reset_peak, timed
from bench.trainer.workload import (
    Scale,
    full_scale,
    long_tailed_lengths,
    smoke_scale,
    spec_of,
    useful_flops,
)
from services.common.models.loading import build_model
from services.common.models.stages import bubble
from services.extras.stages.engine import StagesEngine
from services.extras.stages.layout import build_stage
from services.extras.stages.modules import StagedPolicy
from services.trainer.batch.step_plan import StepPlan
from services.trainer.collectives import join_processes
from services.trainer.engines.fsdp.parallel import distribute
from services.trainer.model.flops import peak_flops

RESULTS: Final = Path(__file__).parents[1] / "results" / "trainer-stages.json"
_BAR: Final = 0.9
_TOKENS: Final = 8192
_SEQUENCES: Final = 128
ARMS: Final[dict[str, dict[str, Any]]] = {
    "fsdp": {},
    "stages": {"engine": "stages", "pipeline_parallel": 2},
    "fsdp, compiled": {"compile": True},
    "stages, compiled": {"engine": "stages", "pipeline_parallel": 2, "compile": True},
}
"""Keys of ``trainer`` of each measurement, by its name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small sizes, on CPUs")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--arm", choices=ARMS, action="append", help="repeat; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    launch = Launch()
    on_gpu = torch.cuda.is_available() and not arguments.smoke
    device = torch.device("cuda", launch.local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    join_processes(device=device, rank=launch.rank, world_size=launch.world_size)
    scale = smoke_scale() if arguments.smoke else two_gpu_scale()
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "ranks": launch.world_size,
        "torch": torch.__version__,
        "tokens": sum(long_tailed_lengths(scale)),
        "recompute": arguments.recompute,
        "arms": {},
    }
    for name in arguments.arm or ARMS:
        trainer = settings_of(name, launch.world_size, on_gpu=on_gpu, recompute=arguments.recompute)
        if trainer["compile"] and not on_gpu:
            continue
        results["arms"][name] = _measured(scale, trainer, device, launch)
        if launch.rank == 0:
            print(name, json.dumps(results["arms"][name]), flush=True)
    arms = results["arms"]
    shares = {
        f"stages_over_fsdp{suffix}": arms[f"stages{suffix}"]["tokens_per_s"]
        / arms[f"fsdp{suffix}"]["tokens_per_s"]
        for suffix in ("", ", compiled")
        if {f"stages{suffix}", f"fsdp{suffix}"} <= arms.keys()
    }
    # A run of some arms may have no pair to compare.
    meets_bar = bool(shares) and all(share >= _BAR for share in shares.values())
    results |= {**shares, "bar": _BAR, "meets_bar": meets_bar}
    if launch.rank == 0:
        print(json.dumps(results, indent=1))
        if not arguments.smoke:
            write_json(arguments.out, results)
    distributed.destroy_process_group()


def two_gpu_scale() -> Scale:
    """Returns the model and the batch that are measured on two GPUs."""
    return replace(full_scale(), num_sequences=_SEQUENCES, tokens_per_micro_batch=_TOKENS)


def settings_of(
    arm: str, world_size: int, *, on_gpu: bool = True, recompute: bool = False
) -> dict[str, Any]:
    """Returns the keys of ``trainer`` with which an arm is measured."""
    return {
        "world_size": world_size,
        "dtype": "bfloat16" if on_gpu else "float32",
        "activation_checkpointing": recompute,
        "compile": False,
        **ARMS[arm],
    }


def _measured(
    scale: Scale, trainer: dict[str, Any], device: torch.device, launch: Launch
) -> dict[str, Any]:
    """Returns the rate of an engine, its memory, and the bubble of a schedule of stages.

    The memory is that of the rank that takes the most.
    """
    stages = trainer.get("pipeline_parallel", 1)
    if stages > 1:
        work, plan = _prepare_stages(scale, trainer, device, launch)
    else:
        work, _, plan, _ = prepare(scale, trainer, device, launch)
    reset_peak(device)
    seconds = timed(work, scale.rounds, device)
    peak = torch.tensor(peak_gib(device), device=device)
    distributed.all_reduce(peak, distributed.ReduceOp.MAX)
    micro_batches = len(plan.updates[0])
    row = {
        "step_s": seconds,
        "tokens_per_s": sum(long_tailed_lengths(scale)) / seconds,
        "micro_batches": micro_batches,
        "bubble": bubble(stages, micro_batches),
        "peak_memory_gib": peak.item(),
    }
    if (flops := peak_flops(device)) is not None:
        row["mfu"] = useful_flops(scale) / seconds / flops / launch.world_size
    del work
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def _prepare_stages(
    scale: Scale, trainer: dict[str, Any], device: torch.device, launch: Launch
) -> tuple[Callable[[], Any], StepPlan]:
    """Returns a step of this rank's stage, and its plan."""
    spec = spec_of(scale, **trainer)
    topology, stage = build_stage(
        spec.trainer, device=device, rank=launch.rank, world_size=launch.world_size
    )
    model = build_model(scale.config, dtype=torch.float32, device=device)
    policy = StagedPolicy(model, stage, temperature=1.0)
    distribute(policy, spec.trainer, topology)
    engine = StagesEngine(policy, spec=spec, topology=topology)
    work, _, plan = step_of(engine, scale, spec, topology)
    return work, plan


if __name__ == "__main__":
    main()
