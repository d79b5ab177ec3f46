"""Memory of a run's services on one GPU, and the plan for it."""

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch
from transformers import AutoConfig

from services.common.memory.rollout import plan_of
from services.common.memory.trainer import SLEEPING, trainer_memory
from services.common.runspec.run import RunSpec

_POLL_S = 0.25


def planned_gb(spec: RunSpec, model: Path) -> dict[str, float]:
    """Returns the planned GB of the trainer, and of the engine with its weight transfer.

    They share the GPU if only one is visible.
    """
    config = AutoConfig.from_pretrained(model)
    total = int(_query("memory.total")[0]) << 20
    is_shared = torch.cuda.device_count() == 1
    engines = 1 if is_shared and not spec.topology.is_colocated else 0
    trainer = trainer_memory(spec, config, gpu_bytes=total, engines=engines)
    planned = {
        "trainer": trainer.reserved - trainer.parts.get(SLEEPING, 0.0),
        "rollout": plan_of(
            spec, config, gpu_bytes=total, roles=["trainer"] if is_shared else []
        ).used,
    }
    return {name: round(size / 1e9, 2) for name, size in planned.items()}


@contextmanager
def watched_memory() -> Iterator[dict[str, float]]:
    """Yields the max GB of each service's processes on this run's GPU, as the driver counts them.

    ``gpu`` is the max of all processes on one GPU, and ``total`` a GPU's memory. The dictionary is updated
    during the block; it stays empty without a GPU.
    """
    peaks: dict[str, float] = {}
    done = threading.Event()

    def look() -> None:
        while not done.wait(_POLL_S):
            now: dict[str, float] = {}
            for line in _query("pid,used_memory", of="compute-apps"):
                pid, used = line.split(", ")
                if name := _service(int(pid)):
                    now[name] = now.get(name, 0.0) + float(used) * 2**20 / 1e9
            sizes = [line.split(", ") for line in _query("memory.used,memory.total")]
            now["gpu"] = max(float(used) for used, _ in sizes) * 2**20 / 1e9
            peaks["total"] = round(float(sizes[0][1]) * 2**20 / 1e9, 2)
            for name, size in now.items():
                peaks[name] = max(peaks.get(name, 0.0), round(size, 2))

    if not torch.cuda.is_available():
        yield peaks
        return
    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


def _service(pid: int) -> str:
    """Returns the service of a process or of its parent; empty if it is gone."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for ancestor in (process, *process.parents()):
            command = " ".join(ancestor.cmdline())
            for name in ("trainer", "rollout"):
                if f"services.{name}" in command:
                    return name
    return ""


def _query(names: str, *, of: str = "gpu") -> list[str]:
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")  # noqa: TID251 -- the run inherits it
    command = [
        "nvidia-smi",
        *([f"--id={gpus}"] if gpus else []),
        f"--query-{of}={names}",
        "--format=csv,noheader,nounits",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
