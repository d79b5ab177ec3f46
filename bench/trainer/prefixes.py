"""Measures prefix-shared training: ``python -m bench.trainer.prefixes [--smoke]``.

The same step trains the same groups with and without ``trainer.share_prefixes``, alternately, at
several lengths of prompts and responses. Results go to ``bench/results/trainer-prefixes.json``.
Tests verify that both are equal (``tests/unit/trainer/test_prefixes.py``).
"""

import argparse
import math
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.report import report_to
from bench.trainer.timing import peak_gib, reset_peak, timed
from bench.trainer.workload import Scale, full_scale, smoke_scale, spec_of
from services.common.models.loading import build_model
from services.trainer.batch import flash
from services.trainer.batch.samples import BatchFacts, Samples
from services.trainer.batch.step_plan import Bounds, plan_step, shard_of
from services.trainer.engines.base import ModelFacts
from services.trainer.engines.fsdp.compiling import compile_ahead
from services.trainer.engines.fsdp.engine import FsdpEngine
from services.trainer.engines.fsdp.parallel import (
    RankTopology,
    build_topology,
    distribute,
)
from services.trainer.model.flops import active_weights
from services.trainer.model.policy import Policy
from services.trainer.steps.step import StepRunner
from services.wire.data.jagged import Jagged

RESULTS = Path(__file__).parents[1] / "results" / "trainer-prefixes.json"
_GROUP_SIZE = 8
_SHAPES = {
    "long prompts": (2048, 512),
    "long responses": (512, 2048),
    "responses only": (1, 2048),
}
"""Tokens of a prompt, and mean tokens of a response."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small sizes, for any machine")
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 samples in a step")
    parser.add_argument("--tokens", type=int, help="token budget of a micro-batch")
    parser.add_argument("--eager", action="store_true", help="layers without torch.compile")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not arguments.smoke
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    scale = smoke_scale() if arguments.smoke else full_scale()
    trainer: dict[str, Any] = {
        "dtype": "bfloat16" if on_gpu else "float32",
        "compile": on_gpu and not arguments.eager,
        "tokens_per_micro_batch": arguments.tokens or scale.tokens_per_micro_batch,
    }
    shrink = 16 if arguments.smoke else 1
    results = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "attention": "FlashAttention 4" if flash.is_here() else "torch",
        **trainer,
        "shapes": measure_shapes(scale, trainer, device, arguments.groups, shrink),
    }
    report_to(None if arguments.smoke else RESULTS, results)


def measure_shapes(
    scale: Scale, trainer: dict[str, Any], device: torch.device, num_groups: int, shrink: int
) -> dict[str, Any]:
    """Measures both variants with all shapes."""
    model = build_model(scale.config, dtype=torch.float32, device=device)
    policy = Policy(model, temperature=1.0)
    cost = ModelFacts(scale.config, active_weights(policy, scale.config)).cost
    spec = spec_of(scale, **trainer).trainer
    topology = build_topology(spec, device=device, rank=0, world_size=1)
    distribute(policy, spec, topology)
    if spec.compile:
        compile_ahead(policy, spec, device=device)
    result = {}
    for name, (prompt, response) in _SHAPES.items():
        samples, facts = make_groups(
            scale, num_groups, max(1, prompt // shrink), max(2, response // shrink)
        )
        steps = {
            way: _Step(policy, scale, trainer, topology, cost, samples, facts, shares=shares)
            for way, shares in (("plain", False), ("shared", True))
        }
        seconds: dict[str, list[float]] = {way: [] for way in steps}
        peaks = {}
        for turn in range(scale.rounds + 1):
            for way, step in steps.items():
                reset_peak(device)
                spent = timed(step.run, 0, device)
                peaks[way] = peak_gib(device)
                if turn:  # the first one warms up
                    seconds[way].append(spent)
        result[name] = {
            "prompt_tokens": int(facts.prompt_lengths[0]),
            "tokens": sum(facts.lengths),
            **{way: _figures(steps[way], seconds[way], peaks[way]) for way in steps},
            "speedup": median(seconds["plain"]) / median(seconds["shared"]),
        }
    return result


class _Step:
    """A step over groups, with or without shared prefixes."""

    def __init__(
        self,
        policy: Policy,
        scale: Scale,
        trainer: dict[str, Any],
        topology: RankTopology,
        cost: Any,
        samples: Samples,
        facts: BatchFacts,
        *,
        shares: bool,
    ) -> None:
        spec = spec_of(scale, **trainer, share_prefixes=shares)
        engine = FsdpEngine(policy, spec=spec, topology=topology)
        self._runner = StepRunner(engine, reference=None, spec=spec)
        self._facts = facts
        share = shard_of(
            facts, num_updates=1, rank=0, num_ranks=1, cost=cost, shares_prefixes=shares
        )
        self._samples = samples.select(share.rows)
        self.plan = plan_step(
            share,
            self._samples,
            bounds=Bounds(max_tokens=spec.trainer.tokens_per_micro_batch),
            ranks=topology.data,
            shares_prefixes=shares,
        )
        self.metrics: dict[str, float] = {}

    def run(self) -> None:
        self.metrics = self._runner.run(1, self._samples, self._facts, self.plan).metrics


def _figures(step: _Step, seconds: list[float], peak: float) -> dict[str, float]:
    metrics = step.metrics
    return {
        "step_s": median(seconds),
        "samples_per_s": metrics["samples"] / median(seconds),
        "micro_batches": len(step.plan.updates[0]),
        "shared_token_fraction": metrics["shared_token_fraction"],
        "loss": metrics["loss"],
        "grad_norm": metrics["grad_norm"],
        "mfu_of_computed_tokens": metrics.get("mfu", 0.0),
        "peak_memory_gib": peak,
    }


def make_groups(
    scale: Scale, num_groups: int, prompt: int, response: int
) -> tuple[Samples, BatchFacts]:
    """Returns groups of one prompt each, with log-normal response lengths."""
    generator = torch.Generator().manual_seed(2)
    count = num_groups * _GROUP_SIZE
    lengths = torch.exp(0.5 * torch.randn(count, generator=generator))
    lengths = (lengths * (response / lengths.mean())).round().clamp(min=1).to(torch.int64)

    def tokens(total: int) -> Tensor:
        return torch.randint(2, scale.config.vocab_size, (total,), generator=generator)

    prompts = [row for _ in range(num_groups) for row in [tokens(prompt)] * _GROUP_SIZE]
    total = int(lengths.sum())
    no, everything = torch.zeros(count, dtype=torch.bool), torch.ones(total, dtype=torch.bool)
    samples = Samples(
        rows=torch.arange(count),
        numbers=torch.zeros(count, dtype=torch.int64),
        prompts=Jagged.from_list(prompts),
        responses=Jagged(tokens(total), lengths),
        rewards=torch.rand(count, generator=generator),
        tokens={
            "response_mask": everything,
            "loss_mask": everything,
            "rollout_logprobs": torch.full((total,), -math.log(scale.config.vocab_size)),
            "token_versions": torch.zeros(total, dtype=torch.int64),
        },
    )
    facts = BatchFacts(
        groups=torch.arange(count) // _GROUP_SIZE,
        lengths=tuple((lengths + prompt).tolist()),
        prompt_lengths=(prompt,) * count,
        is_truncated=no,
        is_member=~no,
        is_failed=no,
        is_greedy=no,
    )
    return samples, facts


if __name__ == "__main__":
    main()
