"""Runs of sort4 with everything in an object store: ``python -m bench.objects [--smoke]``.

Model, data and checkpoints are in a bucket of a server of the S3 protocol on this machine
(``make s3-server``), in the first measurement also records of steps and samples. Three measurements:

kills    the trainer, or all processes at once, are killed at random moments, every second time with the
         loss of the local checkpoints; after each kill every visible checkpoint, every object of samples
         and each new file of the newest record is downloaded and verified. Bar: the run goes on each
         time, and no object is torn.
steps    intervals between steps with a checkpoint of each step, with and without the store, alternating,
         and the processor time of the trainer per step, which other work of the host changes less.
         Bar: the median interval with the store is at most 5 % longer.
outage   while a run trains, the server first delays each answer by 5 seconds, then has no space, then is
         stopped for ten minutes, so that requests neither fail nor end. Bar: steps go on at the same pace,
         the run reports each failure, and the store has its last checkpoint at the end.

Results go to ``bench/results/objects.json``.
"""

import argparse
import gzip
import json
import math
import os
import random
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import xxhash
import yaml

from bench.report import device_name, read_json, write_json
from bench.whole_run import REPOSITORY, steps_in
from examples import sort4
from services.common.errors import DataLossError, NotFoundError
from services.extras.objects.checkpoints import ObjectCheckpoints
from services.extras.objects.connection import ObjectFolder
from services.extras.objects.layout import stored_checkpoints
from services.extras.objects.records import record_objects
from services.extras.objects.transfers import Patience
from services.trainer.checkpoint import manifest

RESULTS = REPOSITORY / "bench" / "results" / "objects.json"
SERVER = """
import logging, sys, threading, time
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication, MotoRequestHandler, create_backend_app)
from werkzeug.serving import make_server

backend, state = DomainDispatcherApplication(create_backend_app), "ready"

def answer(environ, start_response):
    if state == "slow":
        time.sleep(5)
    if state == "full" and environ["REQUEST_METHOD"] in ("POST", "PUT"):
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response("507 Insufficient Storage", [("Content-Length", "0")])
        return [b""]
    return backend(environ, start_response)

server = make_server("127.0.0.1", 0, answer, True, request_handler=MotoRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
for line in sys.stdin:
    state = line.strip()
"""
BUCKET = "s3://bench"
_POLL_S = 0.2
_PATIENCE_S = 600.0
_FAULTY_S = 60.0
_FIRST_STEPS = 5
_ENDLESS = 100_000
"""Steps of a run that is paused when the measurement is over."""


@contextmanager
def served(python: Path) -> Iterator[subprocess.Popen[str]]:
    """Starts a server with an empty bucket; its address and keys are in this process's environment."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen([python, "-c", SERVER], text=True, **pipes)
    try:
        assert server.stdout is not None
        port = next(int(line) for line in server.stdout if line.strip().isdecimal())
        address = f"http://127.0.0.1:{port}"
        os.environ |= {  # noqa: TID251 -- clients and the processes of runs inherit it
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": address,
        }
        bucket = urllib.request.Request(f"{address}/bench", method="PUT")
        with urllib.request.urlopen(bucket, timeout=30):
            yield server
    finally:
        server.kill()
        server.wait()


class Command:
    """``slipstream run`` on one specification and one state directory, started again after it was killed."""

    def __init__(self, spec: Path, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self._command = [sys.executable, "-m", "services.cli.main", "run", str(spec)]
        self._command += ["--state-directory", str(self.state)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "output.log").open("ab") as output:
            self._process = subprocess.Popen(
                self._command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT
            )

    def steps(self) -> list[dict[str, Any]]:
        return steps_in(self.state)

    def ended(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def wait(self) -> None:
        """Waits until the run has succeeded."""
        assert self._process is not None
        if self._process.wait(_PATIENCE_S) != 0:
            raise SystemExit((self.folder / "output.log").read_text()[-4000:])

    def pause(self) -> None:
        """Ends the run with a checkpoint, and waits until the command has ended."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        self._process.wait(_PATIENCE_S)

    def trainer(self) -> psutil.Process | None:
        """Returns the trainer's process, or None before it has started."""
        with suppress(psutil.Error):
            return next(iter(self._processes().get("trainer", ())), None)
        return None

    def _processes(self) -> dict[str, list[psutil.Process]]:
        assert self._process is not None
        processes: dict[str, list[psutil.Process]] = {}
        for child in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.Error):
                line = child.cmdline()
                name = next((a for a in line if a.startswith("services.")), "")
                processes.setdefault(name.removeprefix("services."), []).append(child)
        return processes

    def kill_all(self, *, loses_disk: bool) -> None:
        """Kills the command and its services at once, as a power failure does."""
        assert self._process is not None
        root = psutil.Process(self._process.pid)
        root.suspend()
        for child in root.children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
        root.kill()
        self._process.wait()
        if loses_disk:
            self._lose_checkpoints()
        self.start()

    def kill_trainer(self, *, loses_disk: bool) -> None:
        """Kills the trainer; the controller, which starts it again, is stopped meanwhile."""
        processes = self._processes()
        for controller in processes.get("controller", ()):
            controller.suspend()
        try:
            for trainer in processes.get("trainer", ()):
                with suppress(psutil.NoSuchProcess):
                    trainer.kill()
            if loses_disk:
                self._lose_checkpoints()
        finally:
            for controller in processes.get("controller", ()):
                controller.resume()

    def _lose_checkpoints(self) -> None:
        for checkpoints in self.state.glob("run_*/checkpoints"):
            shutil.rmtree(checkpoints)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            root = psutil.Process(self._process.pid)
            for process in (*root.children(recursive=True), root):
                with suppress(psutil.Error):
                    process.kill()


def specification(folder: Path, name: str, changes: Mapping[str, Any]) -> Path:
    """Writes a specification: sort4 with changes by dotted key."""
    document = yaml.safe_load((REPOSITORY / "examples" / "sort4.yaml").read_text())
    document["validation"] = {"every": 0}
    document["limits"] = {"max_restarts": 1000}
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        section = document
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def on_disk(folder: Path, *, steps: int) -> Path:
    """Returns the specification of a run without the store."""
    examples = REPOSITORY / "examples" / "sort4.py"
    changes = {
        "model.warm_start.examples": f"{examples}:warm_start",
        "model.warm_start.steps": 50,  # no measurement depends on the model's score
        "data.train.path": f"{examples}:train",
        "data.heldout.path": f"{examples}:heldout",
        "trainer.steps": steps,
        "trainer.checkpoint": {"every": 1},
    }
    return specification(folder, f"disk-{steps}", changes)


def in_bucket(folder: Path, name: str, *, steps: int, **further: Any) -> Path:
    """Returns the specification of a run whose model, data and checkpoints are in the bucket."""
    changes = {
        **further,
        "model": {"path": f"{BUCKET}/model", "tokenizer": "chars:0123456789="},
        "data.train": {"source": "jsonl", "path": f"{BUCKET}/train.jsonl"},
        "data.heldout": {"source": "jsonl", "path": f"{BUCKET}/heldout.jsonl"},
        "trainer.steps": steps,
        "trainer.checkpoint": {"every": 1, "directory": f"{BUCKET}/{name}"},
    }
    return specification(folder, name, changes)


def fill_bucket(models: Path) -> None:
    """Uploads the base model that a run on disk has trained, and the rows of sort4."""
    bucket = ObjectFolder(BUCKET)
    (model,) = {path.parent for path in models.rglob("config.json")}
    for path in model.iterdir():
        bucket.upload(path, f"model/{path.name}", on_bytes=lambda count: None)
    for name, rows in (("train", sort4.train()), ("heldout", sort4.heldout())):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        bucket.write(f"{name}.jsonl", lines.encode())


@dataclass(frozen=True, slots=True)
class Trained:
    """Times of a run, without its first steps."""

    intervals: list[float]
    """Seconds between steps."""
    processor_s: float
    """Processor seconds of the trainer per step."""


def train(spec: Path, folder: Path) -> Trained:
    """Trains to the end."""
    command = Command(spec, folder)
    try:
        command.start()
        processor_s = _watch_trainer(command)
        command.wait()
        times = [step_time(step) for step in command.steps()]
    finally:
        command.close()
    intervals = [end - begin for begin, end in pairwise(times)]
    return Trained(intervals[_FIRST_STEPS:], processor_s)


def _watch_trainer(command: Command) -> float:
    """Waits until a run ends; returns the processor seconds of its trainer per step after the first ones."""
    trainer: psutil.Process | None = None
    samples: list[tuple[int, float]] = []
    while command.ended() is None:
        time.sleep(_POLL_S)
        trainer = trainer or command.trainer()
        if trainer is None:
            continue
        with suppress(psutil.Error):
            times = trainer.cpu_times()
            steps = len(command.steps())
            if steps >= _FIRST_STEPS:
                samples.append((steps, times.user + times.system))
    if not samples or samples[-1][0] == samples[0][0]:
        return math.nan
    return (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0])


def step_time(step: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(step["time"]).timestamp()


def measure_steps(
    folder: Path, *, steps: int, pairs: int, report: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Trains in alternation on the disk and in the bucket; every second pair begins with the bucket.

    Args:
        report: Receives the result after each pair, so that an interruption loses one.
    """
    runs: dict[str, list[Trained]] = {"disk": [], "bucket": []}
    for number in range(pairs):
        order = ("disk", "bucket") if number % 2 == 0 else ("bucket", "disk")
        for kind in order:
            name = f"{kind}-{number}"
            is_on_disk = kind == "disk"
            spec = (
                on_disk(folder, steps=steps) if is_on_disk else in_bucket(folder, name, steps=steps)
            )
            runs[kind].append(train(spec, folder / name))
        report(compared(runs))
    return compared(runs)


def compared(runs: Mapping[str, list[Trained]]) -> dict[str, Any]:
    """Returns the medians of the runs on the disk and in the bucket."""
    medians = {
        kind: statistics.median([length for run in trained for length in run.intervals])
        for kind, trained in runs.items()
    }
    processor = {
        kind: statistics.median([run.processor_s for run in trained])
        for kind, trained in runs.items()
    }
    return {
        "intervals": sum(len(run.intervals) for run in runs["disk"]),
        "pairs": len(runs["disk"]),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        **{f"{kind}_median_s": round(median, 4) for kind, median in medians.items()},
        "longer": round(medians["bucket"] / medians["disk"] - 1, 4),
        **{f"{kind}_trainer_processor_s": round(s, 4) for kind, s in processor.items()},
        "longer_processor": round(processor["bucket"] / processor["disk"] - 1, 4),
    }


def measure_kills(
    folder: Path, *, kills: int, seed: int, report: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Kills a run again and again; returns counts.

    Args:
        report: Receives the counts after each kill, so that an interruption loses none.
    """
    rng = random.Random(seed)
    name, samples = "killed", f"{BUCKET}/samples"
    spec = in_bucket(
        folder, name, steps=3 * kills + 4, record="full", samples={"directory": samples}
    )
    command = Command(spec, folder / name)
    counts = {"trainer": 0, "everything": 0, "with_loss_of_disk": 0}
    verified = torn = 0
    objects = VerifiedObjects()
    try:
        command.start()
        for number in range(kills):
            wait_for_steps(command, len(command.steps()) + 1)
            time.sleep(rng.uniform(0.0, 3.0))
            if command.ended() is not None:
                raise SystemExit(f"the run ended after {number} kills")
            loses_disk = number % 2 == 1
            counts["with_loss_of_disk"] += loses_disk
            if rng.random() < 0.25:
                counts["everything"] += 1
                command.kill_all(loses_disk=loses_disk)
            else:
                counts["trainer"] += 1
                command.kill_trainer(loses_disk=loses_disk)
            whole, damaged = verify_all(f"{BUCKET}/{name}", folder / f"read-{number}")
            verified, torn = verified + whole, torn + damaged
            objects.read_samples(samples)
            objects.read_record(f"{BUCKET}/{name}")
            report(
                {
                    "kills": number + 1,
                    **counts,
                    "verified_checkpoints": verified,
                    "torn_checkpoints": torn,
                    **objects.counts(),
                    "steps": max(int(step["step"]) for step in command.steps()),
                    "ended": False,
                }
            )
        command.wait()
    finally:
        command.close()
    objects.read_samples(samples)
    objects.read_record(f"{BUCKET}/{name}")
    steps = [int(step["step"]) for step in command.steps()]
    return {
        "kills": kills,
        **counts,
        "verified_checkpoints": verified,
        "torn_checkpoints": torn,
        **objects.counts(),
        "steps": max(steps),
        "ended": True,
        "cores": os.cpu_count(),
    }


def measure_outage(
    folder: Path, server: subprocess.Popen[str], *, gone_s: float, faulty_s: float
) -> dict[str, Any]:
    """Makes the server slow, full and silent while a run trains; returns what the run did meanwhile.

    Args:
        gone_s: Seconds for which the server is stopped.
        faulty_s: Seconds for which it is slow, and for which it is full.
    """
    name = "outage"
    command = Command(in_bucket(folder, name, steps=_ENDLESS), folder / name)
    moments: dict[str, tuple[float, float]] = {}
    try:
        command.start()
        wait_for_steps(command, 10)
        began = time.time()
        for fault, seconds in (("slow", faulty_s), ("full", faulty_s), ("gone", gone_s)):
            since = time.time()
            set_fault(server, fault)
            time.sleep(seconds)
            set_fault(server, "ready")
            moments[fault] = (since, time.time())
            wait_until_stored(command, f"{BUCKET}/{name}")
        moments["none"] = (moments["gone"][1], time.time())
        command.pause()
        steps = command.steps()
    finally:
        set_fault(server, "ready")
        command.close()
    times = [step_time(step) for step in steps]
    before = [end - begin for begin, end in pairwise(times) if end < began][4:]
    with closing(sqlite3.connect(command.state / "slipstream.db")) as connection:
        rows = connection.execute("SELECT type, time, message FROM events ORDER BY seq").fetchall()
    events: list[tuple[str, float, str]] = rows
    return {
        "steps": int(steps[-1]["step"]),
        "newest_stored_step": max(stored_steps(f"{BUCKET}/{name}")),
        "restarts": sum(kind == "RunRestarting" for kind, _, _ in events),
        "cores": os.cpu_count(),
        "median_before_s": round(statistics.median(before), 4),
        **{
            fault: {
                "seconds": round(end - begin, 1),
                **_intervals([t for t in times if begin <= t < end]),
                "events": [
                    f"{kind}: {text}"
                    for kind, moment, text in events
                    if begin <= moment < end and "Upload" in kind and kind != "CheckpointUploaded"
                ][:4],
            }
            for fault, (begin, end) in moments.items()
        },
    }


def set_fault(server: subprocess.Popen[str], fault: str) -> None:
    """Makes the server ``slow``, ``full``, ``gone`` (stopped) or ``ready``."""
    if fault == "gone":
        server.send_signal(signal.SIGSTOP)
        return
    server.send_signal(signal.SIGCONT)
    assert server.stdin is not None
    server.stdin.write(f"{fault}\n")
    server.stdin.flush()


def stored_steps(url: str) -> list[int]:
    checkpoints = stored_checkpoints(ObjectFolder(url).list()).values()
    return [checkpoint.step for checkpoint in checkpoints if checkpoint.is_published]


def wait_until_stored(command: Command, url: str) -> None:
    """Waits until the store has a checkpoint of a step that the run takes from now on."""
    newest = int(command.steps()[-1]["step"])
    end = time.monotonic() + _PATIENCE_S
    while max(stored_steps(url), default=0) <= newest:
        if command.ended() is not None or time.monotonic() > end:
            raise SystemExit((command.folder / "output.log").read_text()[-4000:])
        time.sleep(_POLL_S)


def _intervals(times: list[float]) -> dict[str, float]:
    lengths = [end - begin for begin, end in pairwise(times)]
    return {
        "steps": len(times),
        "median_s": round(statistics.median(lengths), 4),
        "longest_s": round(max(lengths), 4),
    }


def wait_for_steps(command: Command, count: int) -> None:
    end = time.monotonic() + _PATIENCE_S
    while len(command.steps()) < count:
        if command.ended() is not None or time.monotonic() > end:
            raise SystemExit((command.folder / "output.log").read_text()[-4000:])
        time.sleep(_POLL_S)


def verify_all(url: str, folder: Path) -> tuple[int, int]:
    """Downloads every visible checkpoint; returns how many are whole and how many are torn.

    One that the run deletes meanwhile is neither.
    """
    store, whole, torn = ObjectFolder(url), 0, 0
    for step, checkpoint in stored_checkpoints(store.list()).items():
        if not checkpoint.is_published:
            continue
        root = folder / str(step)
        ObjectCheckpoints(store).restore_newest(root, before=step + 1)
        target = manifest.folder_of(root, step)
        is_there = stored_checkpoints(store.list()).get(step)
        if target.is_dir():
            manifest.verify(target)
            whole += 1
        elif is_there is not None and is_there.is_published:
            torn += 1
    shutil.rmtree(folder, ignore_errors=True)
    return whole, torn


class VerifiedObjects:
    """Objects of samples and of a record that were read whole, or torn. An object is read once."""

    def __init__(self) -> None:
        self._samples: set[str] = set()
        self._record_files: set[str] = set()
        self._torn: set[str] = set()

    def counts(self) -> dict[str, int]:
        return {
            "verified_sample_objects": len(self._samples),
            "verified_record_files": len(self._record_files),
            "torn_objects": len(self._torn),
        }

    def read_samples(self, url: str) -> None:
        store = ObjectFolder(url)
        for name in {entry.name for entry in store.list()} - self._samples:
            try:
                for line in gzip.decompress(store.read(name)).splitlines():
                    json.loads(line)
            except (OSError, EOFError, zlib.error, ValueError):
                self._torn.add(f"{url}/{name}")
            else:
                self._samples.add(name)

    def read_record(self, url: str) -> None:
        store = ObjectFolder(url)
        try:
            objects, _ = record_objects(store, Patience(url))
        except NotFoundError:  # no checkpoint has been uploaded
            return
        except DataLossError:
            self._torn.add(f"{url}/record")
            return
        for name in {entry.name for entry in objects} - self._record_files:
            with suppress(NotFoundError):  # the run deletes what it has overwritten
                digest = xxhash.xxh3_128_hexdigest(store.read(name))
                whole = name.endswith(f"-{digest}")
                (self._record_files if whole else self._torn).add(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few kills and steps; no results")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--outage", type=float, default=600.0, help="seconds without a store")
    parser.add_argument("--only", choices=("kills", "steps", "outage"))
    parser.add_argument("--server", type=Path, default=REPOSITORY / ".venv-s3/bin/python")
    arguments = parser.parse_args()
    kills, steps, pairs, outage_s = (
        arguments.kills,
        arguments.steps,
        arguments.pairs,
        arguments.outage,
    )
    if arguments.smoke:
        kills, steps, pairs, outage_s = 3, 12, 1, 10.0

    def store(figures: Mapping[str, Any]) -> None:
        print(json.dumps(figures, indent=1), flush=True)
        if not arguments.smoke:
            facts = {"device": device_name()}
            write_json(RESULTS, {**read_json(RESULTS), **facts, **figures})

    with tempfile.TemporaryDirectory() as temporary, served(arguments.server) as server:
        folder = Path(temporary)
        models = str(folder / "models")
        os.environ["SLIPSTREAM_TRAINER_MODEL_CACHE"] = models  # noqa: TID251 -- runs inherit it
        train(on_disk(folder, steps=1), folder / "base")
        fill_bucket(folder / "models")
        parts: Mapping[str, Callable[[], dict[str, Any]]] = {
            "kills": lambda: measure_kills(
                folder, kills=kills, seed=1, report=lambda counts: store({"kills": counts})
            ),
            "steps": lambda: measure_steps(
                folder, steps=steps, pairs=pairs, report=lambda times: store({"steps": times})
            ),
            "outage": lambda: measure_outage(
                folder, server, gone_s=outage_s, faulty_s=min(outage_s, _FAULTY_S)
            ),
        }
        for name, measure in parts.items():
            if arguments.only not in (None, name):
                continue
            store({name: measure()})


if __name__ == "__main__":
    main()
