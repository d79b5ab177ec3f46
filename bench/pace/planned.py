"""Compares plans with measurements: ``python -m bench.pace.planned [SHAPE ...]``, twenty minutes.

A real controller drives fakes that take the time of GPUs, in real time, with splits of one to three
GPUs, colocation on them, and several staleness bounds. As a user would do, ``slipstream plan
--from`` takes its rates from the first of them, on two GPUs. The benchmark prints, and writes to
``bench/results/plan.json``, the predictions for the others next to their measured times, and
whether the recommended split is the best one measured.
"""

import argparse
import asyncio
import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from bench.controller.stage import Stage, stage
from bench.pace.__main__ import GROUP_SIZE, GROUPS, STEPS, measure
from bench.pace.fakes import Pace
from bench.report import read_json, write_json
from bench.whole_run import REPOSITORY
from services.extras.planner.inputs import Rates, Setting, rates_of, trainer_speedup
from services.extras.planner.simulation import predict

RESULTS = REPOSITORY / "bench" / "results" / "plan.json"
_STEPS = 12
_SLOTS = 256


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs and staleness bound of one measurement."""

    trainer_gpus: int
    rollouts: int
    lag: int
    colocated_rollouts: int = 0

    def __str__(self) -> str:
        together = f" ({self.colocated_rollouts} colocated)" if self.colocated_rollouts else ""
        return f"{self.trainer_gpus}+{self.rollouts}{together} lag {self.lag}"


SHAPES = {
    "1.3B geometric": Pace(),
    "long tail": Pace(mean_tokens=180.0, sigma=0.9, max_tokens=1536, train_s=1.2),
    "training is slow": Pace(mean_tokens=150.0, max_tokens=512, train_s=4.0),
}
SPLITS = (
    Split(1, 1, 1),
    Split(1, 1, 0),
    Split(1, 2, 4),
    Split(2, 1, 4),
    Split(1, 1, 0, colocated_rollouts=1),
    Split(1, 1, 1, colocated_rollouts=1),
    Split(1, 3, 1, colocated_rollouts=1),
    Split(1, 3, 4, colocated_rollouts=1),
)
"""The measured splits; the first one provides the rates."""


async def compare(
    system: Stage, pace: Pace, split: Split, rates: Rates | None
) -> tuple[dict[str, Any], Rates]:
    """Measures and predicts one split; uses the split's own rates if there are none yet."""
    setting = Setting(
        trainer_gpus=split.trainer_gpus,
        rollouts=split.rollouts,
        slots=_SLOTS,
        max_staleness=split.lag,
        groups_per_step=GROUPS,
        group_size=GROUP_SIZE,
        partial_rollout=split.lag > 0,
        colocated_rollouts=split.colocated_rollouts,
    )
    scaled = replace(pace, train_s=pace.train_s / trainer_speedup(split.trainer_gpus))
    measured = await measure(
        system,
        scaled,
        steps=_STEPS,
        places=_SLOTS,
        rollouts=split.rollouts,
        max_staleness=split.lag,
        topology={"placement": setting.placement},
    )
    rates = rates or rates_of(measured[STEPS], _lengths(measured[STEPS]), setting=setting)
    # A disaggregated run has no measurement of switches.
    predicted = predict(replace(rates, gpu_switch_s=pace.gpu_switch_s), setting)
    row = {
        "predicted_step_s": round(predicted.step_s, 3),
        "measured_step_s": measured["step_s"],
        "off": round(predicted.step_s / measured["step_s"] - 1, 3),
        "predicted_staleness": round(predicted.staleness_mean, 2),
        "measured_staleness": measured["staleness_mean"],
        "measured_waits": measured["idle"],
    }
    return row, rates


def _lengths(steps: list[dict[str, Any]]) -> dict[int, int]:
    counter: Counter[int] = Counter()
    for step in steps:
        for bound, count in step["histograms"]["response_tokens"].items():
            counter[int(bound)] += count
    return dict(counter)


async def measure_shapes(names: list[str]) -> None:
    """Measures, prints and writes."""
    results = read_json(RESULTS, {"shapes": {}})
    async with stage("bench.pace.fleet") as system:
        for name in names:
            rows: dict[str, Any] = {}
            rates = None
            for split in SPLITS:
                rows[str(split)], rates = await compare(system, SHAPES[name], split, rates)
                print(f"{name}, {split}: {json.dumps(rows[str(split)])}", flush=True)
            results["shapes"][name] = {"splits": rows, **_choice(rows)}
            results["largest_error"] = max(
                abs(row["off"])
                for shape in results["shapes"].values()
                for row in shape["splits"].values()
            )
            write_json(RESULTS, results)


def _choice(rows: dict[str, Any]) -> dict[str, Any]:
    """Returns the chosen split of three GPUs, and its loss compared with the best one."""
    gpus = {
        split: split.trainer_gpus + split.rollouts - split.colocated_rollouts for split in SPLITS
    }
    three = [str(split) for split, count in gpus.items() if count == 3]
    choice = min(three, key=lambda split: rows[split]["predicted_step_s"])
    best = min(rows[split]["measured_step_s"] for split in three)
    return {"chosen": choice, "chosen_over_best": round(rows[choice]["measured_step_s"] / best, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="SHAPE", help=", ".join(SHAPES))
    names = parser.parse_args().names or [*SHAPES]
    if unknown := set(names) - SHAPES.keys():
        parser.error(f"no shape is called {', '.join(sorted(unknown))}")
    asyncio.run(measure_shapes(names))


if __name__ == "__main__":
    main()
