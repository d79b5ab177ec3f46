"""Worker kind of docs/adding.md: a run starts its workers and trains on the fields that they add."""

import pytest

from services.common.runspec import workers
from tests.helpers.cli import train
from tests.helpers.packages import install_from
from tests.helpers.pages import example

pytestmark = pytest.mark.timeout(300)

OWN_GROUP = (
    "topology.task_groups=[train, prm, generate]",
    "topology.ratios=[0.25, 0.25, 0.5]",
    "topology.gpus=4",
    "trainer.steps=3",
)


def test_a_kind_of_worker_costs_a_package(plumbing, tmp_path, monkeypatch):
    assert "prm" not in workers.WORKERS
    code = tmp_path / "code"
    code.mkdir()
    for name in ("prm_kind.py", "prm.py"):
        example("adding.md", name, code)
    install_from(example("adding.md", "prm.toml", code), monkeypatch)
    result = train(plumbing, tmp_path / "state", *OWN_GROUP)
    assert result.code == 0, result.out + result.err
    assert len((result.folder / "metrics.jsonl").read_text().splitlines()) == 3
    assert (result.folder / "logs" / "prm-0.log").exists()


def test_a_task_that_no_kind_does_is_refused(plumbing, tmp_path):
    result = train(plumbing, tmp_path / "state", *OWN_GROUP)
    assert result.code != 0
    assert "UNKNOWN_TASK" in result.out + result.err
