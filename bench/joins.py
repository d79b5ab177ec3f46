"""A rollout that joins a running training, and one that leaves: ``python -m bench.joins [--smoke]``.

A run with one rollout gets a second one over the API, as users request it, and loses it again. On
one GPU all three workers share it, each with a part of its memory. The benchmark reports when the
engine of the new rollout was ready, when it had the current weights, and when it generated its
first tokens; and the longest time between two trained steps meanwhile, next to the median of those
before. Results go to ``bench/results/joins.json``. Bar: within 10 s from the engine to the first
token, and training does not stop.
"""

import argparse
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench.e2e.shapes import SHAPES, smoke
from bench.report import device_name, report_to
from bench.whole_run import REPOSITORY, output_of, run_folder, running, steps_in
from slipstream_client import ApiError, Client, Run

RESULTS = REPOSITORY / "bench" / "results" / "joins.json"
_TASKS = REPOSITORY / "bench" / "e2e" / "tasks.py"
_BAR_S = 10.0
_LOOK_S = 0.1
_START_S = 420.0
_JOIN_S = 240.0
_STEPS = 5
_NEW = "rollout-1"
# Short steps make a pause between two of them visible.
_SHAPE = replace(
    SHAPES["geometric"],
    prompts_per_step=16,
    vocabulary=151_936,
    workflow=f"{_TASKS}:Lognormal",
    workflow_arguments={"least": 16, "most": 512, "median": 120.0, "sigma": 0.7},
    trainer={"compile": True, "tokens_per_micro_batch": 16_384},
)
# An engine must not take all memory that is free at its start: the other engine and the trainer start
# later.
_ENGINE = {"gpu_memory_utilization": 0.18, "kv_cache_memory_bytes": 8_000_000_000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, without a GPU")
    parser.add_argument("--set", action="append", default=[], help="further settings of the run")
    parser.add_argument("--folder", type=Path, help="where run and logs stay; default: nowhere")
    arguments = parser.parse_args()
    shape = smoke(_SHAPE) if arguments.smoke else _SHAPE
    with run_folder(arguments.folder) as folder:
        model, spec = folder / "model", folder / "spec.json"
        if not model.exists():
            shape.save_model(model)
        document = shape.spec(model, steps=100_000)
        if shape.engine == "vllm":
            document["rollout"]["engine_arguments"] = _ENGINE
        spec.write_text(json.dumps(document))
        report = {
            "device": device_name(),
            "settings": arguments.set,
            "bar_s": _BAR_S,
            **_joined_and_left(folder, arguments.set, spec=spec),
        }
    report_to(None if arguments.smoke else RESULTS, report)


def _joined_and_left(folder: Path, settings: list[str], *, spec: Path) -> dict[str, Any]:
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with running(folder, settings, spec=spec, port=port) as process:

        def until(done: Callable[[], bool], event: str, *, timeout_s: float) -> None:
            deadline = time.monotonic() + timeout_s
            while not done():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"no {event} in time:\n{output_of(folder)}")
                time.sleep(_LOOK_S)

        def trained(more: int) -> None:
            least = len(steps_in(folder)) + more
            until(lambda: len(steps_in(folder)) >= least, f"step {least}", timeout_s=_START_S)

        trained(_STEPS)
        with Client(url, patience_s=30) as client:
            (run,) = client.runs()
            began = time.time()
            _resize(client, run.id, 2)
            watch = _Watch(client, run.id)
            until(lambda: watch.look().has_tokens, f"token of {_NEW}", timeout_s=_JOIN_S)
            trained(_STEPS)
            leaves = time.time()
            _resize(client, run.id, 1)
            until(lambda: _num_events(run, "Resized") == 2, "smaller run", timeout_s=_JOIN_S)
            end = time.time()
            trained(_STEPS)
            lost_workers = _num_events(run, "WorkerLost")
        return {
            **watch.moments.facts(since=began),
            "leaving_s": round(end - leaves, 2),
            "between_steps": _gaps(folder, watch.moments, began=began, leaves=leaves),
            "workers_lost": lost_workers,
        }


@dataclass(frozen=True, slots=True)
class _Moments:
    """First observations of the new rollout's states, as Unix times in seconds; 0 before."""

    loaded: float = 0.0
    weights: float = 0.0
    token: float = 0.0

    @property
    def has_tokens(self) -> bool:
        return self.token > 0

    def facts(self, *, since: float) -> dict[str, Any]:
        return {
            "engine_up_after_s": round(self.loaded - since, 2),
            "weights_after_engine_s": round(self.weights - self.loaded, 2),
            # Workers report their counters once per second.
            "first_token_after_engine_s": round(self.token - self.loaded, 2),
            # The source is on the same host, and no rollout is closer.
            "weights_from": "trainer",
        }


class _Watch:
    """Watches the new rollout."""

    def __init__(self, client: Client, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self.moments = _Moments()

    def look(self) -> _Moments:
        now, moments = time.time(), self.moments
        workers = self._client.get_topology(self._run_id).items
        new = next((worker for worker in workers if worker.worker_id == _NEW), None)
        if new is None:
            return moments
        if not moments.loaded and new.state in {"loaded", "ready"}:
            moments = replace(moments, loaded=now)
        if not moments.weights and new.weight_version >= 0:
            moments = replace(moments, weights=now)
        if not moments.token and new.gauges.get("tokens_total", 0.0) > 0:
            moments = replace(moments, token=now)
        self.moments = moments
        return moments


def _gaps(folder: Path, moments: _Moments, *, began: float, leaves: float) -> Mapping[str, float]:
    """Returns seconds between steps: usual ones, and the longest while a rollout loaded, joined, or left.

    The wait for samples in the longest one is reported separately: the first samples of a new
    rollout take longer.
    """
    steps = steps_in(folder)
    ends = [datetime.fromisoformat(step["time"]).timestamp() for step in steps]
    waits = {end: step["trainer_wait_s"] for end, step in zip(ends, steps, strict=True)}
    gaps = list(pairwise(ends))

    def longest(since: float, until: float, phase: str) -> dict[str, float]:
        candidates = [
            (end - start, waits[end]) for start, end in gaps if end > since and start < until
        ]
        seconds, wait_s = max(candidates)
        return {
            f"longest_while_{phase}_s": round(seconds, 3),
            f"of_it_for_samples_while_{phase}_s": round(wait_s, 3),
        }

    # The first steps compile.
    usual = [end - start for start, end in gaps[1:] if end < began]
    return {
        "median_s": round(median(usual), 3),
        **longest(began, moments.loaded, "loading"),
        **longest(moments.loaded, moments.token, "joining"),
        **longest(leaves, time.time(), "leaving"),
    }


def _resize(client: Client, run_id: str, replicas: int) -> None:
    while True:
        revision = client.get_run(run_id).revision
        try:
            client.update_run(run_id, if_match=f'"{revision}"', rollout_replicas=replicas)
        except ApiError as error:
            if error.status == 412:  # the run took a step in between
                continue
            raise
        return


def _num_events(run: Run, kind: str) -> int:
    return sum(1 for _ in run.events(kind))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    main()
