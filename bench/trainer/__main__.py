"""Measures the trainer: ``python -m bench.trainer [--smoke]``, or with ``torchrun`` on several GPUs.

Our packed step is compared with a padded Hugging Face step of the same model, batch and optimizer,
in the same process. Results go to ``bench/results/trainer.json``, with one entry for each number of
ranks.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from pydantic_settings import BaseSettings
from torch import Tensor, distributed
from transformers import PreTrainedModel

from bench.report import read_json, write_json
from bench.trainer.padded import PaddedStep
from bench.trainer.study import compare, explain
from bench.trainer.timing import peak_gib, reset_peak, timed
from bench.trainer.workload import (
    Scale,
    full_scale,
    long_tailed_lengths,
    make_samples,
    smoke_scale,
    spec_of,
    useful_flops,
)
from services.common.models.loading import build_model
from services.common.runspec.run import RunSpec
from services.trainer.algorithm.logprobs import OutputHead, token_logprobs
from services.trainer.batch.packing import pack
from services.trainer.batch.samples import Samples
from services.trainer.batch.step_plan import Bounds, StepPlan, plan_step, shard_of
from services.trainer.checkpoint.checkpointer import Checkpointer
from services.trainer.collectives import join_processes
from services.trainer.engines.fsdp.engine import FsdpEngine
from services.trainer.engines.fsdp.parallel import (
    RankTopology,
    build_topology,
    distribute,
)
from services.trainer.model.flops import peak_flops
from services.trainer.model.policy import Policy
from services.trainer.steps.step import StepRunner

RESULTS = Path(__file__).parents[1] / "results" / "trainer.json"


class Launch(BaseSettings):
    """Environment that ``torchrun`` sets for this process."""

    rank: int = Field(0, validation_alias="RANK")
    local_rank: int = Field(0, validation_alias="LOCAL_RANK")
    world_size: int = Field(1, validation_alias="WORLD_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small sizes, for any machine")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--eager", action="store_true", help="layers without torch.compile")
    parser.add_argument("--zero-stage", type=int, choices=(1, 3), default=3, help="what is sharded")
    parser.add_argument("--tokens", type=int, help="token budget of a micro-batch")
    parser.add_argument("--study", action="store_true", help="compare variants of the step instead")
    arguments = parser.parse_args()
    launch = Launch()
    on_gpu = torch.cuda.is_available() and not arguments.smoke
    device = torch.device("cuda", launch.local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if launch.world_size > 1:
        join_processes(device=device, rank=launch.rank, world_size=launch.world_size)
    scale = smoke_scale() if arguments.smoke else full_scale()
    trainer: dict[str, Any] = {
        "world_size": launch.world_size,
        "dtype": "bfloat16" if on_gpu else "float32",
        "zero_stage": arguments.zero_stage,
        "activation_checkpointing": arguments.recompute,
        "compile": on_gpu and not arguments.eager,
    }
    if arguments.tokens:
        trainer["tokens_per_micro_batch"] = arguments.tokens
    if arguments.study:
        print(json.dumps(study(scale, trainer, device, launch), indent=1))
        return
    row = measure(scale, trainer, device, launch)
    if launch.rank == 0:
        save(row, is_smoke=arguments.smoke)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def measure(
    scale: Scale, trainer: dict[str, Any], device: torch.device, launch: Launch
) -> dict[str, Any]:
    """Returns all measurements for this number of ranks."""
    row: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "ranks": launch.world_size,
        "torch": torch.__version__,
        **{key: value for key, value in trainer.items() if key != "world_size"},
        "tokens": sum(long_tailed_lengths(scale)),
    }
    if launch.world_size == 1:
        row |= measure_padded(scale, device)
        row |= measure_exactness(scale, device)
        row |= measure_logits_memory(scale, device)
    row |= measure_packed(scale, trainer, device, launch)
    if "padded_tokens_per_s" in row:
        row["speedup_over_padded"] = row["tokens_per_s"] / row["padded_tokens_per_s"]
    return row


def measure_packed(
    scale: Scale, trainer: dict[str, Any], device: torch.device, launch: Launch
) -> dict[str, Any]:
    """Measures our step: tokens per second, MFU, memory, and the cost of a checkpoint."""
    work, runner, plan, topology = prepare(scale, trainer, device, launch)
    reset_peak(device)
    seconds = timed(work, scale.rounds, device)
    tokens = sum(long_tailed_lengths(scale))
    row = {
        "step_s": seconds,
        "tokens_per_s": tokens / seconds,
        "micro_batches": len(plan.updates[0]),
        "peak_memory_gib": peak_gib(device),
    }
    peak = peak_flops(device)
    if peak is not None:
        row["mfu"] = useful_flops(scale) / seconds / peak / launch.world_size
    return row | measure_checkpoint(runner, topology)


def study(
    scale: Scale, trainer: dict[str, Any], device: torch.device, launch: Launch
) -> dict[str, Any]:
    """Measures the effect of single choices in the step, and its time by part."""
    work, *_ = prepare(scale, trainer, device, launch)
    variants = compare(work, lambda call: timed(call, 0, device))
    peak = peak_flops(device)
    if peak is not None:
        for figures in variants.values():
            figures["mfu"] = useful_flops(scale) / figures["step_s"] / peak / launch.world_size
    return {
        "variants": variants,
        "seconds": explain(work, device) if device.type == "cuda" else {},
        "peak_memory_gib": peak_gib(device),
    }


def prepare(
    scale: Scale, trainer: dict[str, Any], device: torch.device, launch: Launch
) -> tuple[Callable[[], Any], StepRunner, StepPlan, RankTopology]:
    """Returns a step of this rank and its components."""
    spec = spec_of(scale, **trainer)
    model = build_model(scale.config, dtype=torch.float32, device=device)
    policy = Policy(model, temperature=1.0)
    topology = build_topology(
        spec.trainer, device=device, rank=launch.rank, world_size=launch.world_size
    )
    distribute(policy, spec.trainer, topology)
    engine = FsdpEngine(policy, spec=spec, topology=topology)
    work, runner, plan = step_of(engine, scale, spec, topology)
    return work, runner, plan, topology


def step_of(
    engine: FsdpEngine, scale: Scale, spec: RunSpec, topology: RankTopology
) -> tuple[Callable[[], Any], StepRunner, StepPlan]:
    """Returns a step of an engine over this rank's share of the batch, its runner and its plan."""
    samples, facts = make_samples(scale)
    shares = spec.trainer.share_prefixes
    rows = shard_of(
        facts,
        num_updates=1,
        rank=topology.data.rank,
        num_ranks=topology.data.size,
        cost=engine.model.cost,
        shares_prefixes=shares,
    )
    share = samples.select(rows.rows)
    plan = plan_step(
        rows,
        share,
        bounds=Bounds(max_tokens=spec.trainer.tokens_per_micro_batch),
        ranks=topology.data,
        shares_prefixes=shares,
    )
    runner = StepRunner(engine, reference=None, spec=spec)
    return lambda: runner.run(1, share, facts, plan), runner, plan


def measure_padded(scale: Scale, device: torch.device) -> dict[str, Any]:
    """Measures the padded Hugging Face step."""
    model = build_model(scale.config, dtype=torch.float32, device=device)
    step = PaddedStep(model, scale, autocast=device.type == "cuda")
    samples, _ = make_samples(scale)
    reset_peak(device)
    seconds = timed(lambda: step.run(samples), scale.rounds, device)
    return {
        "padded_step_s": seconds,
        "padded_tokens_per_s": sum(long_tailed_lengths(scale)) / seconds,
        "padded_peak_memory_gib": peak_gib(device),
    }


@torch.no_grad()
def measure_exactness(scale: Scale, device: torch.device) -> dict[str, Any]:
    """Compares packed logprobs with one forward pass per sequence, and both with float32.

    In bfloat16 two correct kernels differ as much as either differs from float32: that is the
    floor.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build_model(scale.config, dtype=dtype, device=device)
    exact = build_model(scale.config, dtype=torch.float32, device=device)
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    samples, _ = make_samples(scale)
    few = samples.select(range(8))
    truth, usual = per_sequence(exact, few), per_sequence(model, few)
    packed = pack(few.prompts, few.responses, device=device)
    actual, _ = Policy(model, temperature=1.0)(packed)
    pairs = {
        "logprob_packed_vs_usual": (actual, usual),
        "logprob_packed_vs_float32": (actual, truth),
        "logprob_usual_vs_float32": (usual, truth),
    }
    differences = {
        name: (actual_values - expected_values).abs()
        for name, (actual_values, expected_values) in pairs.items()
    }
    return {
        f"{name}_{kind}": getattr(difference, kind)().item()
        for name, difference in differences.items()
        for kind in ("max", "mean")
    }


def per_sequence(model: PreTrainedModel, samples: Samples) -> Tensor:
    """Returns logprobs of all response tokens, from one Hugging Face forward pass per sequence."""
    row_logprobs = []
    for prompt, response in zip(samples.prompts.unbind(), samples.responses.unbind(), strict=True):
        ids = torch.cat([prompt, response]).to(model.device)
        logits = model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        logprobs = torch.log_softmax(logits, -1)
        row_logprobs.append(logprobs.gather(1, ids[len(prompt) :, None]).squeeze(1))
    return torch.cat(row_logprobs)


def measure_logits_memory(scale: Scale, device: torch.device) -> dict[str, Any]:
    """Measures the peak memory of the logits path for two numbers of tokens."""
    if device.type != "cuda":
        return {}
    row = {}
    config: Any = scale.config
    weight = torch.zeros(config.vocab_size, config.hidden_size, device=device).bfloat16()
    weight.requires_grad_()
    for tokens in (8192, 65_536):
        hidden = torch.zeros(tokens, config.hidden_size, device=device).bfloat16()
        hidden.requires_grad_()
        targets = torch.zeros(tokens, dtype=torch.int64, device=device)
        before = torch.cuda.memory_allocated(device)
        reset_peak(device)
        logprobs, _ = token_logprobs(hidden, OutputHead(weight), targets, temperature=1.0)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
        extra = torch.cuda.max_memory_allocated(device) - before
        row[f"logits_path_gib_{tokens}_tokens"] = extra / 2**30
        row[f"all_logits_gib_{tokens}_tokens"] = tokens * config.vocab_size * 4 / 2**30
        hidden.grad = weight.grad = None
    return row


def measure_checkpoint(runner: StepRunner, topology: RankTopology) -> dict[str, Any]:
    """Measures the time for which a save blocks training, asynchronous and synchronous."""
    # All ranks need the same path.
    root = Path(tempfile.gettempdir()) / "slipstream-bench-checkpoints"
    checkpointer = Checkpointer(runner.trained(), root=root, keep=1, ranks=topology.data)
    checkpointer.snapshot(1, runner.facts())  # allocates the buffers, once in a run
    start = time.perf_counter()
    snapshot = checkpointer.snapshot(1, runner.facts())
    blocked = time.perf_counter() - start
    checkpointer.write(snapshot)
    whole = time.perf_counter() - start
    if topology.rank == 0:
        shutil.rmtree(root)
    return {
        "checkpoint_blocked_s": blocked,
        "checkpoint_whole_s": whole,
        "checkpoint_blocked_fraction": blocked / whole,
    }


def save(row: dict[str, Any], *, is_smoke: bool) -> None:
    """Prints the results; stores them unless they are only a smoke test."""
    print(json.dumps(row, indent=1))
    if is_smoke:
        return
    rows = read_json(RESULTS, [])
    rows = [old_row for old_row in rows if old_row["ranks"] != row["ranks"]] + [row]
    single = next((old_row for old_row in rows if old_row["ranks"] == 1), None)
    for old_row in rows:
        if single is not None:
            old_row["speedup_over_one_rank"] = old_row["tokens_per_s"] / single["tokens_per_s"]
    write_json(RESULTS, sorted(rows, key=lambda row: row["ranks"]))


if __name__ == "__main__":
    main()
