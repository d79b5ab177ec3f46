"""Trains examples of agents and tools; reports held-out scores before and after.

``python -m bench.learning.agents [EXAMPLE...]``: each run starts all services, on a CPU with a tiny model
that had a warm start. Results go to ``bench/results/agents.json`` or ``--out``, with one entry for each
example and seed.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import read_json, write_json
from bench.rollout.parts import machine_state
from bench.whole_run import REPOSITORY, whole_run

RESULTS = REPOSITORY / "bench" / "results" / "agents.json"
EXAMPLES = ("bugfix", "looking")
_SMOKE = ("trainer.steps=2",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "examples", nargs="*", help="folders of examples; by default " + " ".join(EXAMPLES)
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--smoke", action="store_true", help="two steps of one seed, not kept")
    arguments = parser.parse_args()
    for example in arguments.examples or EXAMPLES:
        for seed in arguments.seeds[:1] if arguments.smoke else arguments.seeds:
            entry = measure(example, seed, extra=_SMOKE if arguments.smoke else ())
            print(json.dumps(entry), flush=True)
            if not arguments.smoke:
                keep(entry, arguments.out)


def measure(example: str, seed: int, *, extra: tuple[str, ...] = ()) -> dict[str, Any]:
    """Trains once; returns held-out scores before and after."""
    spec = REPOSITORY / "examples" / example / f"{example}.yaml"
    scores = {}
    start = time.perf_counter()
    for when, settings in (("before", ("validation.only=true",)), ("after", extra)):
        with tempfile.TemporaryDirectory() as folder:
            summary = whole_run(Path(folder), (f"seed={seed}", *settings), spec=spec).summary
        scores[when] = {name: round(summary["heldout"][name], 3) for name in ("greedy", "sampled")}
    return {
        "example": example,
        "seed": seed,
        **scores,
        "steps": summary["steps"],
        "seconds": round(time.perf_counter() - start),
        **machine_state(),
    }


def keep(entry: dict[str, Any], results: Path) -> None:
    """Writes an entry, replacing the former one with its example and seed."""
    entries = read_json(results, [])
    place = (entry["example"], entry["seed"])
    entries = [old for old in entries if (old["example"], old["seed"]) != place] + [entry]
    entries.sort(key=lambda each: (each["example"], each["seed"]))
    write_json(results, entries)


if __name__ == "__main__":
    main()
