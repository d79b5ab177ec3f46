"""Whole runs on GPUs."""

import importlib.util
from pathlib import Path

import pytest

from tests.helpers.cli import SORT4, Finished, train


def train_on_gpus(folder: Path, engine: str, *settings: str, timeout: float) -> Finished:
    """Train the example to its end in bfloat16, with one rollout; skips the test without the engine."""
    if engine != "torch" and importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed here")
    finished = train(
        SORT4,
        folder / "runs",
        # Its heads have 64 dimensions, which kernels ask for.
        "model.path=tiny:qwen2-3m",
        f"rollout.engine={engine}",
        "rollout.replicas=1",
        "trainer.dtype=bfloat16",
        *settings,
        timeout=timeout,
    )
    assert finished.code == 0, finished.err[-4000:]
    return finished
