"""Two hundred random kills of the services as they are: ``python -m bench.faults [--minutes N]``.

Adds each run, also a failed one, to ``bench/results/faults.json`` under the newest commit that changed the
services, and goes on with the seeds that this commit lacks: it can be done in pieces. Services that differ
from that commit are refused.
"""

import argparse
import json
import subprocess
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.faults.kills import run_and_kill
from tests.helpers.cli import REPOSITORY

RESULTS = REPOSITORY / "bench" / "results" / "faults.json"
SOURCES = ("services", "proto")
KILLS = 200


def git(*arguments: str) -> str:
    """What git answers."""
    done = subprocess.run(
        ["git", *arguments, "--", *SOURCES],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def tried(seed: int) -> dict[str, Any]:
    """One run; its failure is a result too."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run_and_kill(Path(folder), seed)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            traceback.print_exc()
            return {"seed": seed, "killed": {}, "failure": type(error).__name__}


def num_kills(runs: list[dict[str, Any]], commit: str) -> int:
    """Kills that runs of a commit survived."""
    return sum(sum(run["killed"].values()) for run in runs if run["commit"] == commit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no run after this time")
    arguments = parser.parse_args()
    if changed := git("status", "--porcelain"):
        raise SystemExit(
            f"commit the services first, so that results say what they are of:\n{changed}"
        )
    commit = git("log", "-1", "--format=%h")
    end = time.monotonic() + 60 * arguments.minutes
    results = json.loads(RESULTS.read_text())
    runs = results["runs"]
    seed = 0
    while num_kills(runs, commit) < KILLS and time.monotonic() < end:
        if any((run["commit"], run["seed"]) == (commit, seed) for run in runs):
            seed += 1
            continue
        runs.append({"commit": commit, **tried(seed)})
        results["kills"] = {name: num_kills(runs, name) for name in {r["commit"] for r in runs}}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(runs[-1]), flush=True)
    failed = [run["seed"] for run in runs if run["commit"] == commit and "failure" in run]
    print(f"{commit}: {num_kills(runs, commit)} of {KILLS} kills survived; failed seeds: {failed}")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
