"""Faults in training runs of real processes: ``python -m tests.faults [table] [kills] [--minutes N]``.

``table`` injects every kind of fault once (``--only`` selects some). ``kills`` does three hundred random
kills over every kind of run (``--kinds`` selects some), checks every trained token against the staleness
bound, that no unfit group trained, and that everything that was due happened. Both add their results,
failures included, to ``bench/results/faults.json`` under the newest commit that changed the services, and
continue with what this commit lacks, so that several calls can share the work. Both refuse services that
differ from that commit.
"""

import argparse
import json
import subprocess
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.kills import KILLS_PER_RUN, KINDS, STEPS_PER_RUN, tried
from tests.faults.small_disk import NoNamespacesError
from tests.faults.table import FAULTS, suffer
from tests.helpers.cli import REPOSITORY

RESULTS = REPOSITORY / "bench" / "results" / "faults.json"
SOURCES = ("services", "proto")
KILLS = 300


def git(*arguments: str) -> str:
    """Returns the output of a git command."""
    done = subprocess.run(
        ["git", *arguments, "--", *SOURCES],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def suffered(name: str) -> dict[str, Any]:
    """Injects one fault; returns its result, also if it is a failure."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return suffer(Path(folder), FAULTS[name])
        except (AssertionError, subprocess.TimeoutExpired) as error:
            traceback.print_exc()
            return {"failure": f"{type(error).__name__}: {error}"[:300]}
        except NoNamespacesError as error:
            return {"skipped": str(error)}


def num_kills(runs: list[dict[str, Any]], commit: str) -> int:
    """Returns the number of kills that runs of a commit survived."""
    return sum(sum(run["killed"].values()) for run in runs if run["commit"] == commit)


def make_faults(results: dict[str, Any], commit: str, names: list[str], end: float) -> list[str]:
    """Injects the commit's remaining faults until a deadline; returns the failed ones."""
    known = results.setdefault("table", {}).setdefault(commit, {})
    for name in names:
        if time.monotonic() > end:
            break
        if "ended" in known.get(name, {}):
            continue
        known[name] = suffered(name)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps({name: known[name]}), flush=True)
    print(
        f"{commit}: {sum('ended' in known.get(name, {}) for name in FAULTS)} of {len(FAULTS)} faults end well"
    )
    return [name for name, result in known.items() if "failure" in result]


def make_kills(
    results: dict[str, Any],
    commit: str,
    end: float,
    kinds: Sequence[str] = tuple(KINDS),
    **size: int,
) -> list[int]:
    """Kills processes of runs of these kinds in turn, until a deadline; returns the failed seeds.

    Args:
        size: Arguments ``kills`` and ``steps`` of each run.
    """
    runs = results["runs"]
    seed = 0
    while num_kills(runs, commit) < KILLS and time.monotonic() < end:
        if any((run["commit"], run["seed"]) == (commit, seed) for run in runs):
            seed += 1
            continue
        kind = kinds[seed % len(kinds)]
        with tempfile.TemporaryDirectory() as folder:
            runs.append({"commit": commit, **tried(Path(folder), seed, kind, **size)})
        results["kills"] = {name: num_kills(runs, name) for name in {r["commit"] for r in runs}}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(runs[-1]), flush=True)
    print(f"{commit}: {num_kills(runs, commit)} of {KILLS} kills survived")
    return [run["seed"] for run in runs if run["commit"] == commit and "failure" in run]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["table", "kills"], metavar="table|kills")
    parser.add_argument("--minutes", type=float, default=90.0, help="begin nothing after this time")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of runs with kills"
    )
    parser.add_argument("--kills-per-run", type=int, default=KILLS_PER_RUN)
    parser.add_argument(
        "--steps", type=int, default=STEPS_PER_RUN, help="steps that each run trains"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - {"table", "kills"}:
        parser.error(f"expected table or kills, got {', '.join(unknown)}")
    if changed := git("status", "--porcelain"):
        raise SystemExit(
            f"commit the services first, so that results say what they are of:\n{changed}"
        )
    commit = git("log", "-1", "--format=%h")
    end = time.monotonic() + 60 * arguments.minutes
    results = json.loads(RESULTS.read_text())
    failed: list[Any] = []
    if "table" in arguments.parts:
        failed += make_faults(results, commit, arguments.only, end)
    if "kills" in arguments.parts:
        size = {"kills": arguments.kills_per_run, "steps": arguments.steps}
        failed += make_kills(results, commit, end, arguments.kinds, **size)
    if failed:
        raise SystemExit(f"failed: {failed}")


if __name__ == "__main__":
    main()
