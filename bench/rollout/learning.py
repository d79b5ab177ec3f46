"""sort4 with partial rollout forced every two tokens, over three seeds, as a user runs it.

Usage: python -m bench.rollout.learning [--seeds 0 1 2] [--engine torch] [--out FILE.json]

Bars: held-out greedy >= 0.88 and sampled >= 0.75; at least 30 % of the trained samples have tokens of more
than one weight version. The example's 1,600 prompts are trained in small steps, and few are generated at
once, so that new weights come while responses, five tokens long, are under way.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PARTIAL = (
    "rollout.partial_rollout=true",
    "rollout.segment_tokens=2",
    "rollout.max_running_samples=16",
    "trainer.prompts_per_step=4",
    "trainer.steps=400",
    "trainer.optimizer.learning_rate=1.5e-4",
    "validation.every=0",
)


def train(seed: int, engine: str, folder: Path) -> dict[str, Any]:
    """One run; returns its scores."""
    settings = (f"seed={seed}", f"rollout.engine={engine}", *PARTIAL)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "services.cli.main", "run", "examples/sort4.yaml", "--json"),
            *("--state-directory", str(folder)),
            *(part for setting in settings for part in ("--set", setting)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"seed {seed}: the run failed\n{done.stdout}{done.stderr}")
    place = Path(done.stdout.splitlines()[-1])
    summary = json.loads(place.read_text())
    steps = [json.loads(line) for line in place.with_name("metrics.jsonl").read_text().splitlines()]
    return {
        "seed": seed,
        "greedy": round(summary["heldout"]["greedy"], 3),
        "sampled": round(summary["heldout"]["sampled"], 3),
        "samples_of_several_versions": round(
            statistics.fmean(step["partial_ratio"] for step in steps), 3
        ),
        "staleness": summary["staleness"],
        "prompts": summary["prompts"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--out", type=Path, default=Path("bench/results/rollout-learning.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for seed in arguments.seeds:
            runs.append(train(seed, arguments.engine, Path(folder)))
            print(json.dumps(runs[-1]), flush=True)
    result = {
        "engine": arguments.engine,
        "overrides": PARTIAL,
        "meets_bars": all(
            run["greedy"] >= 0.88
            and run["sampled"] >= 0.75
            and run["samples_of_several_versions"] >= 0.3
            for run in runs
        ),
        "runs": runs,
    }
    print(json.dumps(result, indent=2))
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
