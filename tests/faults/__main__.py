"""Faults in training runs of real processes: ``python -m tests.faults [table] [kills] [--minutes N]``.

``table`` injects every kind of fault once (``--only`` selects some). ``kills`` does three hundred random
kills over every kind of run (``--kinds`` selects some), checks every trained token against the staleness
bound, that no unfit group trained, and that everything that was due happened. Both add their results,
failures included, to ``bench/results/faults.json`` under the newest commit that changed the services, and
continue with what this commit lacks, so that several calls can share the work. Both refuse services that
differ from that commit. ``--jobs`` does several runs side by side; a copy of the repository without git
needs ``--commit``. The results are written after each run.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.kills import KILLS_PER_RUN, KINDS, STEPS_PER_RUN, tried
from tests.faults.parallel import Task, side_by_side
from tests.faults.table import FAULTS, suffered
from tests.helpers.cli import REPOSITORY

RESULTS = REPOSITORY / "bench" / "results" / "faults.json"
SOURCES = ("services", "proto")
KILLS = 300


def git(*arguments: str) -> str:
    """Returns the output of a git command."""
    result = subprocess.run(
        ["git", *arguments, "--", *SOURCES],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()


def num_kills(runs: list[dict[str, Any]], commit: str) -> int:
    """Returns the number of kills that runs of a commit survived."""
    return sum(sum(run["killed"].values()) for run in runs if run["commit"] == commit)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Runs faults on the services of a commit, and writes the results after each run."""

    commit: str
    """Commit of the services."""
    path: Path
    """File of the results."""
    results: dict[str, Any]
    """Results of this and of other commits."""
    end: float
    """Time of the monotonic clock in seconds after which no run begins."""
    jobs: int = 1
    """Runs side by side."""
    keep: Path | None = None
    """Folder for the files of failed runs."""

    def make_faults(self, names: Sequence[str]) -> list[str]:
        """Injects the commit's remaining faults until the end; returns the failed ones."""
        faults = self.results.setdefault("table", {}).setdefault(self.commit, {})

        def tasks() -> Iterator[tuple[str, Task]]:
            for name in names:
                if time.monotonic() < self.end and "ended" not in faults.get(name, {}):
                    yield name, partial(suffered, name=name)

        for name, result in side_by_side(tasks(), self.jobs, self.keep):
            faults[name] = result
            self._write({name: result})
        num_ended = sum("ended" in faults.get(name, {}) for name in FAULTS)
        print(f"{self.commit}: {num_ended} of {len(FAULTS)} faults end well")
        return [name for name, result in faults.items() if "failure" in result]

    def make_kills(
        self, kinds: Sequence[str] = tuple(KINDS), total: int = KILLS, **size: int
    ) -> list[int]:
        """Kills processes of runs of these kinds in turn, until the end; returns the failed seeds.

        Args:
            total: Number of kills after which no run begins, with those of earlier calls.
            size: Arguments ``kills`` and ``steps`` of each run.
        """
        runs = self.results.setdefault("runs", [])
        seeds = {run["seed"] for run in runs if run["commit"] == self.commit}

        def tasks() -> Iterator[tuple[tuple[int, str], Task]]:
            seed = 0
            while num_kills(runs, self.commit) < total and time.monotonic() < self.end:
                if seed not in seeds:
                    kind = kinds[seed % len(kinds)]
                    yield (seed, kind), partial(tried, seed=seed, kind=kind, **size)
                seed += 1

        for (seed, kind), result in side_by_side(tasks(), self.jobs, self.keep):
            runs.append({"commit": self.commit, "seed": seed, "kind": kind, "killed": {}, **result})
            self.results["kills"] = {
                commit: num_kills(runs, commit)
                for commit in dict.fromkeys(run["commit"] for run in runs)
            }
            self._write(runs[-1])
        print(f"{self.commit}: {num_kills(runs, self.commit)} of {total} kills survived")
        return [run["seed"] for run in runs if run["commit"] == self.commit and "failure" in run]

    def _write(self, result: dict[str, Any]) -> None:
        """Writes all results, and prints the newest one."""
        partial_file = self.path.with_suffix(".part")
        partial_file.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        partial_file.replace(self.path)
        print(json.dumps(result), flush=True)


def newest_commit() -> str:
    """Returns the newest commit that changed the services.

    Raises:
        SystemExit: If the services differ from it.
    """
    if changed_files := git("status", "--porcelain"):
        raise SystemExit(
            f"commit the services first, so that results say what they are of:\n{changed_files}"
        )
    return git("log", "-1", "--format=%h")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["table", "kills"], metavar="table|kills")
    parser.add_argument("--minutes", type=float, default=90.0, help="begin nothing after this time")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of runs with kills"
    )
    parser.add_argument(
        "--kills", type=int, default=KILLS, help="begin no run after this many kills of the commit"
    )
    parser.add_argument("--kills-per-run", type=int, default=KILLS_PER_RUN)
    parser.add_argument(
        "--steps", type=int, default=STEPS_PER_RUN, help="steps that each run trains"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--commit", help="commit of the services; default: git's newest one")
    parser.add_argument("--keep", type=Path, help="folder for the files of failed runs")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - {"table", "kills"}:
        parser.error(f"expected table or kills, got {', '.join(unknown)}")
    path = arguments.results
    suite = Suite(
        commit=arguments.commit or newest_commit(),
        path=path,
        results=json.loads(path.read_text(encoding="utf-8")) if path.exists() else {},
        end=time.monotonic() + 60 * arguments.minutes,
        jobs=arguments.jobs,
        keep=arguments.keep,
    )
    failed: list[Any] = []
    if "table" in arguments.parts:
        failed += suite.make_faults(arguments.only)
    if "kills" in arguments.parts:
        size = {"kills": arguments.kills_per_run, "steps": arguments.steps}
        failed += suite.make_kills(arguments.kinds, arguments.kills, **size)
    if failed:
        raise SystemExit(f"failed: {failed}")


if __name__ == "__main__":
    main()
