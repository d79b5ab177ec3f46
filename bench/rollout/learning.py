"""Trains sort4 with partial rollout forced every two tokens, over three seeds, as a user runs it.

Usage: PYTHON -m bench.rollout.learning [--seeds 0 1 2] [--steps 400] [--engine NAME] [--out FILE.json]

``PYTHON`` is that of an environment with the engine; see ``tests/engines/run.sh``. Results of other
engines in the file are kept.

Bars: held-out greedy >= 0.88 and sampled >= 0.75; at least 30 % of the trained samples have tokens
of more than one weight version. Responses have only five tokens, so new weights must arrive often
and while many responses are running: the example's 1,600 prompts are trained in small steps, and
the two replicas have slots for as many groups as a step trains. Training then waits for generation,
with three attempts per group.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import read_json, report_to
from bench.whole_run import whole_run

PARTIAL = (
    "rollout.partial_rollout=true",
    "rollout.segment_tokens=2",
    "rollout.max_running_samples=16",
    "algorithm.max_staleness=4",
    "trainer.prompts_per_step=4",
    "trainer.optimizer.learning_rate=1.5e-4",
    "validation.every=0",
)


def train(seed: int, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Trains one run; returns its scores."""
    run = whole_run(folder, (f"seed={seed}", *overrides))
    return {
        "seed": seed,
        "greedy": round(run.summary["heldout"]["greedy"], 3),
        "sampled": round(run.summary["heldout"]["sampled"], 3),
        "samples_of_several_versions": round(
            statistics.fmean(step["partial_ratio"] for step in run.steps), 3
        ),
        "staleness": run.summary["staleness"],
        "prompts": run.summary["prompts"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--out", type=Path, default=Path("bench/results/rollout-learning.json"))
    arguments = parser.parse_args()
    overrides = (*PARTIAL, f"trainer.steps={arguments.steps}", f"rollout.engine={arguments.engine}")
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for seed in arguments.seeds:
            runs.append(train(seed, overrides, Path(folder)))
            print(json.dumps(runs[-1]), flush=True)
    result = {
        "overrides": overrides,
        "meets_bars": all(meets_bars(run) for run in runs),
        "runs": runs,
    }
    results = read_json(arguments.out)
    report_to(arguments.out, results | {arguments.engine: result})


def meets_bars(run: dict[str, Any]) -> bool:
    """Returns True if a run reached its scores and used partial rollout."""
    return (
        run["greedy"] >= 0.88
        and run["sampled"] >= 0.75
        and run["samples_of_several_versions"] >= 0.3
    )


if __name__ == "__main__":
    main()
