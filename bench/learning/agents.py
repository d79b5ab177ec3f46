"""Trains examples of agents, tools and images; reports held-out scores before and after.

``python -m bench.learning.agents [EXAMPLE...]``: each run starts all services, on a CPU with a tiny model
that had a warm start. Rollouts of some examples are killed midway. Results go to
``bench/results/agents.json`` or ``--out``, with one entry for each example and seed. ``seconds`` and
``cpu_seconds``, of all processes together, are those of the training run.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.report import read_json, write_json
from bench.rollout.parts import machine_state
from bench.whole_run import REPOSITORY, output_of, running, steps_in, whole_run

RESULTS = REPOSITORY / "bench" / "results" / "agents.json"
EXAMPLES = ("bugfix", "images", "looking")
_KILLS = {"images": (10, 30), "looking": (10, 30)}
"""Steps after which a rollout is killed."""
_SMOKE = ("trainer.steps=2",)
_TIMEOUT_S = 3600.0
_POLL_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("examples", nargs="*", help="examples; by default " + " ".join(EXAMPLES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--smoke", action="store_true", help="two steps of one seed, not kept")
    arguments = parser.parse_args()
    for example in arguments.examples or EXAMPLES:
        for seed in arguments.seeds[:1] if arguments.smoke else arguments.seeds:
            entry = measure(example, seed, is_smoke=arguments.smoke)
            print(json.dumps(entry), flush=True)
            if not arguments.smoke:
                keep(entry, arguments.out)


def measure(example: str, seed: int, *, is_smoke: bool = False) -> dict[str, Any]:
    """Trains once; returns held-out scores before and after."""
    candidates = (
        REPOSITORY / "examples" / name for name in (f"{example}/{example}.yaml", f"{example}.yaml")
    )
    spec = next(path for path in candidates if path.exists())
    with tempfile.TemporaryDirectory() as folder:
        settings = (f"seed={seed}", "validation.only=true")
        before = whole_run(Path(folder), settings, spec=spec).summary
    settings, kills = (f"seed={seed}", *(_SMOKE if is_smoke else ())), _KILLS.get(example, ())
    start, cpu_s = time.perf_counter(), _cpu_s()
    with tempfile.TemporaryDirectory() as folder:
        after = trained(
            Path(folder), settings, spec=spec, kills=(1,) if is_smoke and kills else kills
        )
    return {
        "example": example,
        "seed": seed,
        "before": _scores(before),
        "after": _scores(after),
        "steps": after["steps"],
        "staleness_max": after["staleness"]["max"],
        "kills": len(kills),
        "seconds": round(time.perf_counter() - start),
        "cpu_seconds": round(_cpu_s() - cpu_s),
        **machine_state(),
    }


def trained(
    folder: Path, settings: Sequence[str], *, spec: Path, kills: Sequence[int]
) -> dict[str, Any]:
    """Trains to the end and returns the run's summary.

    Args:
        folder: Folder for runs and logs, only for this run.
        kills: Numbers of steps after which one rollout is killed.

    Raises:
        SystemExit: If the run fails, with its output.
    """
    deadline, remaining_kills = time.monotonic() + _TIMEOUT_S, list(kills)
    with running(folder, settings, spec=spec) as process:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            if remaining_kills and len(steps_in(folder)) >= remaining_kills[0]:
                children = psutil.Process(process.pid).children(recursive=True)
                rollouts = [child for child in children if _is_rollout(child)]
                rollouts[len(remaining_kills) % len(rollouts)].kill()
                del remaining_kills[0]
    if process.returncode != 0 or remaining_kills:
        raise SystemExit(f"{spec} failed, or ended too early:\n{output_of(folder)}")
    (summary,) = folder.glob("run_*/summary.json")
    content: dict[str, Any] = json.loads(summary.read_text(encoding="utf-8"))
    return content


def _is_rollout(process: psutil.Process) -> bool:
    try:
        return " ".join(process.cmdline()).split()[-1:] == ["services.rollout"]
    except psutil.Error:  # it ended
        return False


def _scores(summary: dict[str, Any]) -> dict[str, float]:
    return {name: round(summary["heldout"][name], 3) for name in ("greedy", "sampled")}


def _cpu_s() -> float:
    """Returns the CPU seconds of this process's ended descendants."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def keep(entry: dict[str, Any], results: Path) -> None:
    """Writes an entry, replacing the former one with its example and seed."""
    entries = read_json(results, [])
    key = (entry["example"], entry["seed"])
    entries = [old for old in entries if (old["example"], old["seed"]) != key] + [entry]
    entries.sort(key=lambda run: (run["example"], run["seed"]))
    write_json(results, entries)


if __name__ == "__main__":
    main()
