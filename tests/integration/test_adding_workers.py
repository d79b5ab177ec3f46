"""Worker kind of docs/adding.md: a run starts its workers and trains on the fields that they add."""

import os

import pytest

from services.common.runspec import workers
from tests.helpers.cli import train
from tests.helpers.pages import example

pytestmark = pytest.mark.timeout(300)

# Every Python process imports this code at its start, as if the table had the entry.
ENTRY = """
from prm_kind import KINDS
from services.common.runspec.workers import WORKERS
WORKERS.update(KINDS)
"""
OWN_GROUP = (
    "topology.task_groups=[train, prm, generate]",
    "topology.ratios=[0.25, 0.25, 0.5]",
    "topology.gpus=4",
    "trainer.steps=3",
)


def test_a_kind_of_worker_costs_an_entry_and_a_module(plumbing, tmp_path, monkeypatch):
    assert "prm" not in workers.WORKERS
    code = tmp_path / "code"
    code.mkdir()
    for name in ("prm_kind.py", "prm.py"):
        example("adding.md", name, code)
    (code / "sitecustomize.py").write_text(ENTRY)
    paths = [str(code), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    done = train(plumbing, tmp_path / "state", *OWN_GROUP)
    assert done.code == 0, done.out + done.err
    assert len((done.folder / "metrics.jsonl").read_text().splitlines()) == 3
    assert (done.folder / "logs" / "prm-0.log").exists()


def test_a_task_that_no_kind_does_is_refused(plumbing, tmp_path):
    done = train(plumbing, tmp_path / "state", *OWN_GROUP)
    assert done.code != 0
    assert "UNKNOWN_TASK" in done.out + done.err
