"""Data of each tracker after its process was killed and received some events twice."""

import json

import pytest

from tests.helpers import tracked
from tests.helpers.tracked import curve, needs, write

KINDS = [pytest.param(kind, marks=needs(kind)) for kind in ("tensorboard", "mlflow", "trackio")]


def kept(kind, folder):
    if kind == "tensorboard":
        return tracked.of_tensorboard(folder)
    if kind == "mlflow":
        return tracked.of_mlflow(f"file:{folder}/mlflow")
    return tracked.of_trackio(folder / "trackio")


@pytest.mark.parametrize("kind", KINDS)
def test_a_curve_continues_after_a_kill_without_gap_or_repetition(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    write(kind, tmp_path, [1, 2, 3], [1, 2, 3, 4, 5], num_killed=1)
    points = kept(kind, tmp_path)
    assert curve(points, "reward_mean") == [1, 2, 3, 4, 5]
    assert curve(points, "reward/a b") == [1, 2, 3, 4, 5]
    # An evaluation is written after later steps than its own.
    assert set(curve(points, "heldout/greedy")) <= {2, 4}
    assert 4 in curve(points, "heldout/greedy")
    if kind == "mlflow":
        (table,) = tmp_path.rglob("samples/heldout/000004.json")
        assert json.loads(table.read_text())["data"] == [tracked.ROW]
    if kind == "tensorboard":  # which renders text as Markdown
        files = tmp_path.rglob("events.out.tfevents.*")
        content = b"".join(path.read_bytes() for path in files)
        assert b"\\| what \xe2\x8f\x8e it wrote \\|" in content


@needs("wandb")
def test_wandb_keeps_repeated_events_once_across_a_kill(tmp_path):
    write("wandb", tmp_path, [1, 2], [1, 2, 2, 1, 3], [1, 2, 3, 4, 5], num_killed=1)
    points = tracked.of_wandb(tmp_path)
    assert curve(points, "reward_mean") == [1, 2, 3, 4, 5]
    assert set(curve(points, "heldout/greedy")) >= {2, 4}
