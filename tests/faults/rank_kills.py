"""Kills ranks of a trainer in a step and during a broadcast of weights; checks the first cause of each loss.

``python -m tests.faults.rank_kills [--layout NAME] [--kills 10] [--steps 12] [--seed 0] [--add]``

Runs with FSDP, with pipeline stages, and with stages of tensor- and expert-parallel ranks lose a random rank
again and again. After each kill, the newest event ``WorkerLost`` must name that rank and its signal, and the
run must train from its checkpoint. In the end every trained token is within the staleness bound, and the
ledger is closed. Results go to ``bench/results/rank-kills.json``, by layout.
"""

import argparse
import json
import os
import random
import sqlite3
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from tests.faults.training import Training, until
from tests.helpers.cli import ranks_of
from tests.helpers.ledger_check import check_run
from tests.helpers.plumbing import write_plumbing

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "rank-kills.json"
_DENSE = "model.path=tiny:qwen2-1.2m"
_STAGES = (
    "trainer.engine=stages",
    "trainer.pipeline_parallel=2",
    "trainer.tokens_per_micro_batch=64",
)
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "fsdp, 2 ranks": (_DENSE, "trainer.world_size=2"),
    "2 stages": (_DENSE, "trainer.world_size=2", *_STAGES),
    "2 stages x 2 tensor x 2 expert parallel": (
        "model.path=tiny:qwen3_moe-0.7m",
        "trainer.world_size=8",
        "trainer.tensor_parallel=2",
        "trainer.expert_parallel=2",
        *_STAGES,
    ),
}
_COMMON = (
    "rollout.replicas=1",
    "rollout.max_response_tokens=30",
    "algorithm.max_staleness=1",
    "algorithm.stale_wait_timeout_s=3600",
    "trainer.checkpoint.every=2",
    "limits.max_restarts=200",
    "samples.groups_per_step=1000",
    # Many small buckets, so that a broadcast lasts long enough to be hit.
    "weight_sync.bucket_bytes=65536",
)
_STEPS_BETWEEN = 2
_POLL_S = 0.003
_WINDOW_S = 0.1
"""Longest time between the moment that a kill waits for and the kill."""
Phase = Literal["step", "broadcast"]


class Database:
    """Reads the facts of the only run in a state directory."""

    def __init__(self, state: Path) -> None:
        self._file = state / "slipstream.db"

    def row(self, query: str) -> tuple[Any, ...]:
        with closing(sqlite3.connect(f"file:{self._file}?mode=ro", uri=True)) as connection:
            return tuple(connection.execute(query).fetchone())

    def trained(self) -> int:
        """Returns the newest committed step."""
        return int(self.row("SELECT coalesce(max(step), 0) FROM steps WHERE is_committed")[0])

    def phase(self) -> Phase:
        """Returns ``broadcast`` while a trained version is not yet published."""
        step, published = self.row(
            "SELECT (SELECT coalesce(max(step), 0) FROM steps WHERE is_committed), "
            "(SELECT coalesce((SELECT json_extract(data_json, '$.step') FROM events "
            "WHERE type = 'WeightsPublished' ORDER BY seq DESC LIMIT 1), 0))"
        )
        return "broadcast" if step > published else "step"

    def losses(self) -> int:
        return int(self.row("SELECT count(*) FROM events WHERE type = 'WorkerLost'")[0])

    def cause(self) -> str:
        """Returns the message of the newest loss."""
        query = "SELECT message FROM events WHERE type = 'WorkerLost' ORDER BY seq DESC LIMIT 1"
        return str(self.row(query)[0])


def wait_for_phase(training: Training, database: Database, phase: Phase) -> None:
    """Waits for a phase with a higher frequency than the phases have.

    Raises:
        AssertionError: If the run ends before.
    """
    while database.phase() != phase:
        assert training.process.poll() is None, f"ended before a {phase}: {training.output[-2000:]}"
        time.sleep(_POLL_S)


def kill_one(training: Training, chooser: random.Random, phase: Phase) -> dict[str, Any]:
    """Kills a random rank in a phase; returns what was reported and how long the recovery took.

    Raises:
        AssertionError: If the newest loss is not that of the rank, or the run does not go on.
    """
    database = Database(training.state)
    before, step = database.losses(), database.trained()
    until(lambda: database.trained() >= step + _STEPS_BETWEEN, "steps before a kill")
    ranks = ranks_of("trainer-0", training.state)
    rank = chooser.choice(sorted(ranks))
    wait_for_phase(training, database, phase)
    time.sleep(chooser.uniform(0.0, _WINDOW_S) if phase == "step" else 0.0)
    hit = database.phase()
    ranks[rank].kill()
    begin = time.monotonic()
    until(lambda: database.losses() > before, "the report of the loss")
    noticed_s = time.monotonic() - begin
    cause, step = database.cause(), database.trained()
    # The launcher sees the signal; another rank sees that this one does not answer.
    reports = (f"trainer-0 exited with signal 9, rank {rank} first", f"rank {rank} on ")
    assert any(text in cause for text in reports), f"rank {rank}: {cause}"
    until(lambda: database.trained() > step, "a step after the loss")
    return {
        "rank": int(rank),
        "phase": hit,
        "cause": cause[:160],
        "noticed_s": round(noticed_s, 2),
        "recovered_s": round(time.monotonic() - begin, 1),
    }


def kills_of(layout: str, folder: Path, *, count: int, steps: int, seed: int) -> dict[str, Any]:
    """Trains in a layout while ranks are killed; returns the kills and the checked facts of the run.

    Args:
        steps: Steps of the run.
    """
    chooser = random.Random(seed)
    spec = write_plumbing(folder)
    training = Training(spec, folder / "runs", f"trainer.steps={steps}", *_COMMON, *LAYOUTS[layout])
    training.start()
    kills = []
    try:
        training.until_step(2)
        for number in range(count):
            phase: Phase = "step" if number % 2 else "broadcast"
            kills.append(kill_one(training, chooser, phase))
            print(f"  {layout} {len(kills):3} {kills[-1]}", flush=True)
        assert training.wait() == 0, training.output[-4000:]
    finally:
        training.close()
    facts = check_run(folder / "runs")
    assert facts["samples_checked"] > 0
    return {"kills": kills, "load_1m": round(os.getloadavg()[0], 1), **facts}


def summary_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns all kills of the runs of a layout, and what they have in common."""
    kills = [kill for run in runs for kill in run["kills"]]
    return {
        "num_kills": len(kills),
        "phases": dict(Counter(kill["phase"] for kill in kills)),
        "ranks": dict(sorted(Counter(str(kill["rank"]) for kill in kills).items())),
        "noticed_p50_s": round(statistics.median(kill["noticed_s"] for kill in kills), 2),
        "noticed_max_s": max(kill["noticed_s"] for kill in kills),
        "recovered_p50_s": round(statistics.median(kill["recovered_s"] for kill in kills), 1),
        "recovered_max_s": max(kill["recovered_s"] for kill in kills),
        "oldest_trained": max(run["oldest_trained"] for run in runs),
        "runs": [*runs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--layout", choices=LAYOUTS, action="append", help="repeat for several; default: all"
    )
    parser.add_argument("--kills", type=int, default=10, help="kills of each layout")
    parser.add_argument("--steps", type=int, default=12, help="steps of a run for each kill")
    parser.add_argument("--seed", type=int, default=0, help="seed of the ranks and moments")
    parser.add_argument("--add", action="store_true", help="keep the layouts' earlier runs too")
    options = parser.parse_args()
    for layout in options.layout or LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            steps = options.steps * options.kills + 8
            run = kills_of(
                layout, Path(folder), count=options.kills, steps=steps, seed=options.seed
            )
        layouts = json.loads(RESULTS.read_text())["layouts"] if RESULTS.exists() else {}
        earlier = layouts[layout]["runs"] if options.add and layout in layouts else []
        layouts[layout] = summary_of([*earlier, run])
        host = f"{os.cpu_count()} CPU cores, shared with other work"
        results = {
            "host": host,
            "layouts": {name: layouts[name] for name in LAYOUTS if name in layouts},
        }
        RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        print(f"{RESULTS} is written", flush=True)


if __name__ == "__main__":
    main()
