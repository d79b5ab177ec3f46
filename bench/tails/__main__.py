"""Measures long responses: ``python -m bench.tails``.

Usage: python -m bench.tails [--smoke] [--served-only | --simulated-only] [--out FILE.json]

In virtual time: log-normal lengths up to 131,072 tokens with and without partial rollouts, 20
kills, and a response of two hours. In real time: one response of 100,000 tokens through all
services and the torch engine. ``--folder`` keeps the state of the latter; after ``--limit-s``, the
same command continues from it.
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.report import GrowingReport, read_json
from bench.tails.served import measure
from bench.tails.setting import Setting
from bench.tails.simulated import simulate
from services.controller.rules.prompts import sample_seed
from services.extras.fake_engine.engine import LongTail

_SMALL: dict[str, Any] = {
    "replicas": 2,
    "places": 8,
    "groups_per_step": 4,
    "group_size": 4,
    "lengths": LongTail(median=256.0, sigma=1.2),
    "max_tokens": 4096,
    "train_s": 2.0,
    "restart_s": 5.0,
}


class OneLong:
    """The first group has responses of two hours, all others of five minutes."""

    def length(self, seed: int) -> int:
        """Returns the tokens of a response, at ten per second."""
        return 72_000 if seed in {sample_seed(0, 0, member) for member in range(2)} else 3_000


TWO_HOURS = Setting(
    steps=30,
    lag=30,
    kills=3,
    kills_oldest=True,
    replicas=2,
    places=2,
    groups_per_step=1,
    group_size=2,
    lengths=OneLong(),
    token_s=0.1,
    train_s=1.0,
)


def settings(*, is_small: bool) -> Iterator[tuple[str, Setting]]:
    """Yields the compared settings by name."""
    kills = 5 if is_small else 20
    for lag in (1, 4):
        full = Setting(steps=16 + lag, lag=lag, **_SMALL if is_small else {})
        yield f"lag {lag}", full
        yield f"lag {lag}, not partial", replace(full, is_partial=False)
        yield f"lag {lag}, {kills} kills", replace(full, kills=kills)
    yield (
        f"lag 4, {kills} kills in thrice the time",
        replace(full, kills=kills, steps=3 * full.steps),
    )
    for seconds in (60.0, 600.0, 1e6):
        yield f"lag 4, waits {seconds:g} s at most", replace(full, stale_wait_timeout_s=seconds)
    yield "lag 4, caches recomputed", replace(full, kv_policy="recompute")
    segments = replace(full, segment_tokens=full.max_tokens // 8)
    yield "lag 4, in segments", segments
    yield f"lag 4, in segments, {kills} kills", replace(segments, kills=kills)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small, a minute or two")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--simulated-only", action="store_true")
    only.add_argument("--served-only", action="store_true")
    parser.add_argument("--folder", type=Path, help="where the served run is kept")
    parser.add_argument("--limit-s", type=float, default=7200.0, help="for the served run")
    parser.add_argument(
        "--out", type=Path, help="default: bench/results/tails.json, none for --smoke"
    )
    arguments = parser.parse_args()
    default = None if arguments.smoke else Path("bench/results/tails.json")
    out = arguments.out or default
    results = read_json(out)
    results.pop("unfinished", None)
    report = GrowingReport(out, results)
    if not arguments.served_only:
        simulations = {}
        for name, setting in settings(is_small=arguments.smoke):
            simulations[name] = simulate(setting)
            report.add({"simulated": simulations})
        for lag in (1, 4):
            partial, other = (simulations[f"lag {lag}{rest}"] for rest in ("", ", not partial"))
            times = partial["samples_per_s"] / other["samples_per_s"]
            simulations[f"lag {lag}, times"] = round(times, 2)
            simulations[f"lag {lag}, times, without masked tokens"] = round(
                times * (1 - partial["masked"]), 2
            )
        report.add({"simulated": simulations, "two_hours": simulate(TWO_HOURS)})
    if not arguments.simulated_only:
        tokens, versions = (3_000, 6) if arguments.smoke else (100_000, 22)
        with tempfile.TemporaryDirectory() as temporary:
            served_figures = measure(
                arguments.folder or Path(temporary),
                tokens=tokens,
                versions=versions,
                kills=1 if arguments.smoke else 3,
                limit_s=arguments.limit_s,
            )
        report.add({"served": served_figures})
    report.finish({})


if __name__ == "__main__":
    main()
