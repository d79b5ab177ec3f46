"""A controller process whose runs wait for workers that never register."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.helpers.specs import changed

ADMIN = "slp_" + "a" * 43
SPEC = changed(name="one", rollout={"max_response_tokens": 8}, trainer={"steps": 3})


@dataclass(frozen=True)
class RunningController:
    """A running controller: its addresses, log file and process id."""

    url: str
    grpc: str
    log: Path
    pid: int

    def client(self, token: str = ADMIN, **headers: str) -> httpx.Client:
        """Returns an HTTP client, by default of an admin."""
        headers = {"Authorization": f"Bearer {token}"} | headers if token else headers
        return httpx.Client(base_url=self.url, headers=headers, timeout=30, trust_env=False)


@contextmanager
def running_queue(folder: Path) -> Iterator[str]:
    """Yields the address of a small transferqueue that runs until the block ends."""
    ready_file, log = folder / "queue.ready", folder / "queue.log"
    settings = {
        "ready_file": ready_file,
        "snapshot_folder": folder / "snapshots",
        "sample_folder": folder / "kept",
        "capacity_bytes": 1 << 24,
    }
    with _service("transferqueue", settings, ready_file, log) as (_, addresses):
        yield addresses["address"]


@contextmanager
def running_controller(folder: Path, **settings: object) -> Iterator[RunningController]:
    """Runs a controller in a folder until the block ends."""
    (folder / "token").write_text(ADMIN)
    ready_file, log = folder / "ready", folder / "log"
    own_settings = {
        "transferqueue_address": "127.0.0.1:9",
        "state_directory": folder / "state",
        "launcher": "none",
        "admin_token_file": folder / "token",
        "ready_file": ready_file,
        "max_active_runs": 1,
        **settings,
    }
    with _service("controller", own_settings, ready_file, log) as (process, addresses):
        yield RunningController(addresses["rest"], addresses["grpc"], log, process.pid)


@contextmanager
def _service(
    name: str, settings: Mapping[str, object], ready_file: Path, log: Path
) -> Iterator[tuple[subprocess.Popen, dict[str, str]]]:
    """Yields a service's process and its addresses once it has announced them."""
    prefix = f"SLIPSTREAM_{name.upper()}_"
    environment = {f"{prefix}{key.upper()}": str(value) for key, value in settings.items()}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", f"services.{name}"],
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        while not ready_file.exists():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield process, json.loads(ready_file.read_text())
    finally:
        process.kill()
        process.wait()
