"""Complete runs on GPUs."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.cli import SORT4, Finished, train


def use_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restricts the processes of a test to the first visible GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible.partition(",")[0])


def train_on_gpus(folder: Path, engine: str, *settings: str, timeout: float) -> Finished:
    """Trains the example in bfloat16 with one rollout; skips the test if the engine is not installed."""
    if engine != "torch" and importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed here")
    result = train(
        SORT4,
        folder / "runs",
        # The heads of this model have 64 dimensions, which the kernels require.
        "model.path=tiny:qwen2-3m",
        f"rollout.engine={engine}",
        "rollout.replicas=1",
        "trainer.dtype=bfloat16",
        *settings,
        timeout=timeout,
    )
    assert result.code == 0, "\n".join(_failure_report(folder, result))
    return result


def _failure_report(folder: Path, finished: Finished) -> Iterator[str]:
    """Yields the end of the output of the command and of each worker."""
    yield finished.out[-2000:] + finished.err[-4000:]
    for log in sorted(folder.rglob("*.log")):
        yield f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}"
