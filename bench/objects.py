"""Runs of sort4 with everything in an object store: ``python -m bench.objects [--smoke]``.

Model, data and checkpoints are in a bucket of a server of the S3 protocol on this machine
(``make s3-server``). Three measurements:

kills    the trainer, or all processes at once, are killed at random moments, every second time with the
         loss of the local checkpoints; after each kill every visible checkpoint is downloaded and
         verified. Bar: the run goes on each time, and no checkpoint is torn.
steps    intervals between steps with a checkpoint of each step, with and without the store, alternating.
         Bar: the median with the store is at most 5 % longer.
outage   the server is stopped for a time, so that requests neither fail nor end. Bar: steps go on at the
         same pace, the run reports the failure, and the store has its last checkpoints at the end.

Results go to ``bench/results/objects.json``.
"""

import argparse
import json
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import yaml

from bench.report import device_name, read_json, write_json
from bench.whole_run import REPOSITORY, steps_in
from examples import sort4
from services.extras.objects.checkpoints import ObjectCheckpoints
from services.extras.objects.connection import ObjectFolder
from services.extras.objects.layout import stored_checkpoints
from services.trainer.checkpoint import manifest

RESULTS = REPOSITORY / "bench" / "results" / "objects.json"
SERVER = """
import logging, sys
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
BUCKET = "s3://bench"
_POLL_S = 0.2
_PATIENCE_S = 600.0


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
        part = document
        for parent in parents:
            part = part.setdefault(parent, {})
        part[leaf] = value
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def on_disk(folder: Path, *, steps: int) -> Path:
    """Returns the specification of a run without the store."""
    examples = REPOSITORY / "examples" / "sort4.py"
    changes = {
        "model.warm_start.examples": f"{examples}:warm_start",
        "data.train.path": f"{examples}:train",
        "data.heldout.path": f"{examples}:heldout",
        "trainer.steps": steps,
        "trainer.checkpoint": {"every": 1},
    }
    return specification(folder, f"disk-{steps}", changes)


def in_bucket(folder: Path, name: str, *, steps: int) -> Path:
    """Returns the specification of a run whose model, data and checkpoints are in the bucket."""
    changes = {
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


def train(spec: Path, folder: Path) -> list[float]:
    """Trains to the end; returns the seconds between steps, without the first five."""
    command = Command(spec, folder)
    try:
        command.start()
        command.wait()
        times = [step_time(step) for step in command.steps()]
    finally:
        command.close()
    return [end - begin for begin, end in pairwise(times)][5:]


def step_time(step: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(step["time"]).timestamp()


def measure_steps(folder: Path, *, steps: int, pairs: int) -> dict[str, Any]:
    disk, bucket = [], []
    for number in range(pairs):
        disk += train(on_disk(folder, steps=steps), folder / f"disk-{number}")
        name = f"steps-{number}"
        bucket += train(in_bucket(folder, name, steps=steps), folder / name)
    medians = statistics.median(disk), statistics.median(bucket)
    return {
        "intervals": len(disk),
        "disk_median_s": round(medians[0], 4),
        "bucket_median_s": round(medians[1], 4),
        "longer": round(medians[1] / medians[0] - 1, 4),
    }


def measure_kills(
    folder: Path, *, kills: int, seed: int, report: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Kills a run again and again; returns counts.

    Args:
        report: Receives the counts after each kill, so that an interruption loses none.
    """
    rng = random.Random(seed)
    name = "killed"
    command = Command(in_bucket(folder, name, steps=3 * kills + 4), folder / name)
    counts = {"trainer": 0, "everything": 0, "with_loss_of_disk": 0}
    verified = torn = 0
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
            report(
                {
                    "kills": number + 1,
                    **counts,
                    "verified_checkpoints": verified,
                    "torn_checkpoints": torn,
                    "steps": max(int(step["step"]) for step in command.steps()),
                    "ended": False,
                }
            )
        command.wait()
    finally:
        command.close()
    steps = [int(step["step"]) for step in command.steps()]
    return {
        "kills": kills,
        **counts,
        "verified_checkpoints": verified,
        "torn_checkpoints": torn,
        "steps": max(steps),
        "ended": True,
    }


def measure_outage(
    folder: Path, server: subprocess.Popen[str], *, steps: int, seconds: float
) -> dict[str, Any]:
    """Stops the server while a run trains; returns what the steps did meanwhile."""
    name = "outage"
    command = Command(in_bucket(folder, name, steps=steps), folder / name)
    try:
        command.start()
        wait_for_steps(command, 5)
        began = time.time()
        server.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        server.send_signal(signal.SIGCONT)
        ended = time.time()
        command.wait()
        times = [step_time(step) for step in command.steps()]
    finally:
        server.send_signal(signal.SIGCONT)
        command.close()
    intervals = [(begin, end - begin) for begin, end in pairwise(times)][4:]
    meanwhile = [length for begin, length in intervals if began <= begin < ended]
    others = [length for begin, length in intervals if not began <= begin < ended]
    with closing(sqlite3.connect(command.state / "slipstream.db")) as connection:
        events = [kind for (kind,) in connection.execute("SELECT type FROM events ORDER BY seq")]
    published = stored_checkpoints(ObjectFolder(f"{BUCKET}/{name}").list()).values()
    return {
        "seconds": seconds,
        "steps_meanwhile": len(meanwhile),
        "median_meanwhile_s": round(statistics.median(meanwhile), 4),
        "longest_meanwhile_s": round(max(meanwhile), 4),
        "median_otherwise_s": round(statistics.median(others), 4) if others else None,
        "events": [kind for kind in events if "Upload" in kind and kind != "CheckpointUploaded"],
        "stored_steps": sorted(each.step for each in published if each.is_published),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few kills and steps; no results")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--outage", type=float, default=120.0, help="seconds")
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

    def store(part: Mapping[str, Any]) -> None:
        print(json.dumps(part, indent=1), flush=True)
        if not arguments.smoke:
            facts = {"device": device_name(), "cores": os.cpu_count()}
            write_json(RESULTS, {**read_json(RESULTS), **facts, **part})

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
            "steps": lambda: measure_steps(folder, steps=steps, pairs=pairs),
            "outage": lambda: measure_outage(folder, server, steps=6 * steps, seconds=outage_s),
        }
        for name, measure in parts.items():
            if arguments.only not in (None, name):
                continue
            store({name: measure()})


if __name__ == "__main__":
    main()
