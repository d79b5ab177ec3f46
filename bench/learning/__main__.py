"""Trains sort4 with every algorithm through the whole system: ``python -m bench.learning [VARIANT...]``.

Each run starts all services, trains 50 steps and evaluates 256 held-out prompts. Results go to
``bench/results/learning.json`` or ``--out``, with one entry for each variant and seed.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.learning.variants import VARIANTS, Variant
from bench.report import read_json, write_json
from bench.whole_run import REPOSITORY, whole_run

RESULTS = REPOSITORY / "bench" / "results" / "learning.json"
_SMOKE = ("trainer.steps=3", "validation.every=0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="*", help=f"some of: {'; '.join(VARIANTS)}")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--smoke", action="store_true", help="three steps of one seed, not kept")
    arguments = parser.parse_args()
    seeds = range(1 if arguments.smoke else arguments.seeds)
    for name in arguments.variants or VARIANTS:
        for seed in seeds:
            entry = measure(VARIANTS[name], seed, extra=_SMOKE if arguments.smoke else ())
            print(f"{name:32} seed {seed}  {entry}", flush=True)
            if not arguments.smoke:
                keep({"variant": name, "seed": seed, **entry}, arguments.out)


def measure(variant: Variant, seed: int, *, extra: tuple[str, ...] = ()) -> dict[str, Any]:
    """Trains once; returns held-out scores, staleness and whether the bounds hold."""
    settings = (f"seed={seed}", "validation.every=0", *variant.settings, *extra)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        summary = whole_run(Path(folder), settings).summary
    greedy, sampled = (summary["heldout"][kind] for kind in ("greedy", "sampled"))
    return {
        "greedy": round(greedy, 3),
        "sampled": round(sampled, 3),
        "staleness_mean": round(summary["staleness"]["mean"], 2),
        "seconds": round(time.perf_counter() - start),
        "holds": greedy >= variant.least_greedy
        and variant.least_sampled <= sampled <= variant.most_sampled,
    }


def keep(entry: dict[str, Any], results: Path) -> None:
    """Writes an entry, replacing the former one with its variant and seed."""
    entries = read_json(results, [])
    key = (entry["variant"], entry["seed"])
    entries = [old for old in entries if (old["variant"], old["seed"]) != key] + [entry]
    order = list(VARIANTS)
    entries.sort(key=lambda e: (order.index(e["variant"]), e["seed"]))
    write_json(results, entries)


if __name__ == "__main__":
    main()
