"""Compares prefix-shared training with TRL's: ``python -m bench.trainer.peer [--smoke] [--out FILE]``.

Our step and TRL's (``trl_tree.py``) train the same groups alternately, in one process: with the
same weights, loss, optimizer, attention kernel and micro-batch budget. Planning and packing are
included in the measured time of both; ``trl_packed`` is TRL's step over micro-batches that were
made before. The logprobs, the loss and the gradients of their last steps verify that both sides
compute the same.

TRL's weights are kept in bfloat16 here, its fastest setting, and ours in float32, from which each
step computes in bfloat16. TRL's trainer compiles no layers; ``--no-compile`` disables it for ours
too.
"""

import argparse
import json
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor

from bench.report import write_json
from bench.trainer.prefixes import make_groups
from bench.trainer.timing import peak_gib, reset_peak, timed
from bench.trainer.trl_tree import TrlStep, begin_trl, trl_version
from bench.trainer.workload import Scale, full_scale, smoke_scale, spec_of
from services.common.models.loading import build_model
from services.common.runspec.run import RunSpec
from services.common.settings import set_defaults
from services.trainer.batch import flash
from services.trainer.batch.packing import Work
from services.trainer.batch.samples import BatchFacts, Samples, pack_samples
from services.trainer.batch.step_plan import StepPlan, plan_step, shard_of
from services.trainer.engines.base import ModelFacts
from services.trainer.engines.fsdp.engine import FsdpEngine
from services.trainer.engines.fsdp.parallel import (
    RankTopology,
    build_topology,
    distribute,
)
from services.trainer.model.flops import active_weights, peak_flops, training_flops
from services.trainer.model.policy import Policy
from services.trainer.steps.credit import CreditAssigner
from services.trainer.steps.step import StepRunner

RESULTS = Path(__file__).parents[1] / "results" / "trainer-peer.json"
_SHAPES = {"long prompts": (2048, 512), "long responses": (512, 2048)}
"""Tokens of a prompt, and mean tokens of a response."""
_TOKENS = 20_480
"""Tokens of a micro-batch that fit with two models and uncompiled layers."""
_CLIP = 0.2
_TOLERANCES = {"bfloat16": (0.05, 0.05), "float32": (1e-4, 1e-3)}
"""Max mean distance of logprobs, and max relative distance of the gradients' norms."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small sizes, for any machine")
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 samples in a step")
    parser.add_argument("--rounds", type=int, default=3, help="steps that count, of each side")
    parser.add_argument("--tokens", type=int, help="token budget of a micro-batch, on both sides")
    parser.add_argument(
        "--no-compile", action="store_true", help="our layers without torch.compile"
    )
    parser.add_argument("--recompute", action="store_true", help="layers keep only their inputs")
    parser.add_argument("--out", type=Path, help=f"file of the results; default {RESULTS.name}")
    arguments = parser.parse_args()
    # The two sides leave gaps of different sizes in memory; our trainer sets this too.
    set_defaults({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    on_gpu = torch.cuda.is_available() and not arguments.smoke
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    scale = smoke_scale() if arguments.smoke else full_scale()
    budget = scale.tokens_per_micro_batch if arguments.smoke else _TOKENS
    trainer: dict[str, Any] = {
        "dtype": "bfloat16" if on_gpu else "float32",
        "compile": on_gpu and not arguments.no_compile,
        "activation_checkpointing": arguments.recompute,
        "tokens_per_micro_batch": arguments.tokens or budget,
        # Both sides keep their initial weights, so that they can be compared at any time.
        "optimizer": {"learning_rate": 1e-12},
    }
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl_version(),
        "attention": "FlashAttention 4" if flash.is_here() else "torch",
        **trainer,
        "shapes": {},
    }
    out = arguments.out or (None if arguments.smoke else RESULTS)
    sides = _Sides(scale, trainer, device)
    shrink = 16 if arguments.smoke else 1
    for name, (prompt, response) in _SHAPES.items():
        groups = make_groups(scale, arguments.groups, prompt // shrink, response // shrink)
        results["shapes"][name] = sides.measure(*groups, rounds=arguments.rounds)
        print(name, json.dumps(results["shapes"][name], indent=1), flush=True)
        if out is not None:
            write_json(out, results)
    if not all(shape["agreement"]["agrees"] for shape in results["shapes"].values()):
        raise SystemExit("the two sides do not compute the same: see agreement")


class _Sides:
    """Two models with the same weights, ours and TRL's.

    Args:
        scale: The model.
        trainer: Part of the specification.
        device: Device of both models.
    """

    def __init__(self, scale: Scale, trainer: dict[str, Any], device: torch.device) -> None:
        algorithm = {"clip_low": _CLIP, "clip_high": _CLIP, "dual_clip": None}
        self._spec = spec_of(scale, algorithm=algorithm, **trainer)
        self._config = scale.config
        self._device = device
        model = build_model(scale.config, dtype=torch.float32, device=device)
        self._theirs = deepcopy(model)
        begin_trl(
            self._theirs,
            getattr(torch, trainer["dtype"]),
            recomputes=trainer["activation_checkpointing"],
        )
        self._policy = Policy(model, temperature=1.0)
        self._weights = active_weights(self._policy, scale.config)
        self._topology = build_topology(self._spec.trainer, device=device, rank=0, world_size=1)
        distribute(self._policy, self._spec.trainer, self._topology)
        self._cost = ModelFacts(scale.config, self._weights).cost

    def measure(self, samples: Samples, facts: BatchFacts, *, rounds: int) -> dict[str, Any]:
        """Measures both sides with one shape."""
        ours = _OurStep(
            self._policy, self._spec, self._topology, self._cost, samples=samples, facts=facts
        )
        theirs = TrlStep(
            self._theirs,
            samples,
            ours.advantages(),
            groups=facts.groups,
            optimizer=self._spec.trainer.optimizer,
            clip=_CLIP,
            max_tokens=self._spec.trainer.tokens_per_micro_batch,
            device=self._device,
        )
        batches = theirs.packed()
        ways: dict[str, Callable[[], tuple[float, float]]] = {
            "ours": ours.run,
            "trl": theirs.run,
            "trl_packed": lambda: theirs.run(batches),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        peaks: dict[str, float] = {}
        sums: dict[str, tuple[float, float]] = {}
        for turn in range(rounds + 1):
            for way, run in ways.items():
                reset_peak(self._device)
                spent, sums[way] = _timed(run, self._device)
                peaks[way] = peak_gib(self._device)
                print(f"{way} {turn}: {spent:.3f} s", flush=True)
                if turn:  # the first one warms up
                    seconds[way].append(spent)
        work = ours.work(samples)
        figures: dict[str, dict[str, Any]] = {
            way: {
                "step_s": median(seconds[way]),
                "steps_s": seconds[way],
                "samples_per_s": len(samples.rows) / median(seconds[way]),
                "mfu_of_unique_tokens": self._utilization(work, median(seconds[way])),
                "loss": sums[way][0],
                "grad_norm": sums[way][1],
                # In addition to the weights and moments of both sides.
                "peak_memory_gib": peaks[way],
            }
            for way in ways
        }
        tokens = {"ours": ours.num_tokens(), "trl": sum(batch.num_tokens for batch in batches)}
        return {
            "samples": len(samples.rows),
            "tokens": sum(facts.lengths),
            "unique_tokens": work.tokens,
            "computed_tokens": tokens,
            "micro_batches": {"ours": ours.num_micro_batches, "trl": len(batches)},
            "divided_micro_batches": ours.num_divided,
            # CPU seconds per step.
            "packing_s": {"ours": _seconds(ours.pack), "trl": _seconds(theirs.packed)},
            **figures,
            "speedup": figures["trl"]["step_s"] / figures["ours"]["step_s"],
            "speedup_over_packed": figures["trl_packed"]["step_s"] / figures["ours"]["step_s"],
            "agreement": _agreement(
                ours.logprobs(), theirs.logprobs(), sums, dtype=self._spec.trainer.dtype
            ),
        }

    def _utilization(self, work: Work, seconds: float) -> float | None:
        peak = peak_flops(self._device)
        if peak is None:
            return None
        flops = training_flops(
            self._config,
            self._weights,
            tokens=work.tokens,
            squares=work.squares,
            predictions=work.predictions,
        )
        return flops / seconds / peak


class _OurStep:
    """Our step over groups, including its plan."""

    def __init__(
        self,
        policy: Policy,
        spec: RunSpec,
        topology: RankTopology,
        cost: Any,
        *,
        samples: Samples,
        facts: BatchFacts,
    ) -> None:
        engine = FsdpEngine(policy, spec=spec, topology=topology)
        self._runner = StepRunner(engine, reference=None, spec=spec)
        trained_batches: list[tuple[Samples, Tensor]] = []
        # Not a method, so that the runner and its moments are freed with this step.
        self._runner.on_trained = lambda batch, logprobs: trained_batches.append((batch, logprobs))
        self._spec = spec
        self._ranks = topology.data
        self._cost = cost
        self._samples = samples
        self._facts = facts
        self._trained_batches = trained_batches
        self.num_micro_batches = self.num_divided = 0

    def advantages(self) -> Tensor:
        """Returns ``[R]`` the advantages that the step computes."""
        credit = CreditAssigner(
            self._spec.algorithm,
            self._ranks,
            max_response_tokens=self._spec.rollout.max_response_tokens,
        )
        return credit(self._samples, self._facts, kl_coefficient=0.0).advantages

    def plan(self) -> tuple[Samples, StepPlan]:
        """Returns the samples in the order of their plan, as a rank has them."""
        share = shard_of(
            self._facts,
            num_updates=1,
            rank=0,
            num_ranks=1,
            cost=self._cost,
            shares_prefixes=self._spec.shares_prefixes,
        )
        samples = self._samples.select(share.rows)
        plan = plan_step(
            share,
            samples,
            bounds=self._runner.engine.bounds,
            ranks=self._ranks,
            shares_prefixes=self._spec.shares_prefixes,
        )
        return samples, plan

    def run(self) -> tuple[float, float]:
        """Trains the samples once; returns the loss and the norm of the gradients."""
        self._trained_batches.clear()
        samples, plan = self.plan()
        metrics = self._runner.run(1, samples, self._facts, plan).metrics
        self.num_micro_batches = len(self._trained_batches)
        self.num_divided = int(metrics["divided_micro_batches"])
        return metrics["loss"], metrics["grad_norm"]

    def pack(self) -> list[Work]:
        """Plans and packs the micro-batches on the CPU; returns their costs."""
        samples, plan = self.plan()
        (micros,) = plan.updates
        return [self.work(samples.select(micro)) for micro in micros]

    def num_tokens(self) -> int:
        """Returns the number of tokens that the model computes."""
        return sum(work.tokens for work in self.pack())

    def work(self, samples: Samples) -> Work:
        """Returns the cost of samples as one micro-batch."""
        cpu = torch.device("cpu")
        return pack_samples(samples, cpu, shares_prefixes=self._spec.shares_prefixes).work

    def logprobs(self) -> Tensor:
        """Returns ``[R]`` the logprobs of the last step, before its update, in the order of the samples."""
        logprobs_of_row: dict[int, Tensor] = {}
        for batch, logprobs in self._trained_batches:
            row_logprobs = logprobs.cpu().split(batch.responses.lengths.tolist())
            logprobs_of_row |= dict(zip(batch.rows.tolist(), row_logprobs, strict=True))
        return torch.cat([logprobs_of_row[row] for row in sorted(logprobs_of_row)])


def _timed(
    run: Callable[[], tuple[float, float]], device: torch.device
) -> tuple[float, tuple[float, float]]:
    """Returns the seconds of a step and its result."""
    returned: list[tuple[float, float]] = []
    spent = timed(lambda: returned.append(run()), 0, device)
    return spent, returned[0]


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _agreement(
    ours: Tensor, theirs: Tensor, sums: dict[str, tuple[float, float]], *, dtype: str
) -> dict[str, Any]:
    """Compares the results of both sides' last steps, which have the initial weights."""
    distance = (ours - theirs).abs()
    norms = sums["ours"][1], sums["trl"][1]
    of_norms = abs(norms[0] - norms[1]) / norms[0]
    most, most_of_norms = _TOLERANCES[dtype]
    mean = float(distance.mean())
    return {
        "logprob_distance_mean": mean,
        "logprob_distance_max": float(distance.max()),
        "loss_distance": abs(sums["ours"][0] - sums["trl"][0]),
        "grad_norm_distance": of_norms,
        "agrees": mean <= most and of_norms <= most_of_norms,
    }


if __name__ == "__main__":
    main()
