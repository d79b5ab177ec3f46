"""Tests that deleting a checkpoint reaches an object store, and that a store that fails is only logged."""

from collections.abc import Callable

import pytest

from services.common.errors import UnavailableError
from services.controller.manager import archive
from services.controller.run.train.checkpoints import Checkpoint, CheckpointStore
from services.controller.store.database import Database
from services.controller.store.records import NewRun
from services.controller.store.runs import RunStore
from services.controller.store.tables import RUNS
from tests.helpers.rest import save

Deleted = list[tuple[str, str]]


def checkpoint(path: str) -> Checkpoint:
    return Checkpoint(
        checkpoint_id="ckpt",
        run_id="run",
        step=1,
        weight_version=1,
        path=path,
        state="DELETED",
        message="",
        create_time=0.0,
    )


class Store:
    def __init__(self, url: str, delete: Callable[[str, str], None]) -> None:
        self.url, self._delete = url, delete

    def delete(self, name: str) -> None:
        self._delete(self.url, name)


def test_a_deleted_checkpoint_is_deleted_in_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    deleted: Deleted = []

    def delete(url: str, name: str) -> None:
        deleted.append((url, name))
        raise UnavailableError("the store does not answer")

    monkeypatch.setattr(archive, "open_checkpoints", lambda url: Store(url, delete))
    archive._remove(checkpoint("s3://bucket/run/step-00000001"))
    # A critic with its own workers has checkpoints beside those of the policy.
    assert deleted == [
        ("s3://bucket/run", "step-00000001"),
        ("s3://bucket/run/critic", "step-00000001"),
    ]


@pytest.mark.parametrize("newest", ["READY", "DELETED"])
def test_the_store_keeps_old_checkpoints_until_the_trainer_has_uploaded_the_newest(
    database: Database, newest: str
) -> None:
    run_id = "run_1"
    RunStore(database).create(NewRun(run_id=run_id, name="one", spec_json="{}", spec_digest="d"))
    save(database, run_id, step=1, path="s3://bucket/run/step-00000001", state="DELETED")
    save(database, run_id, step=2, path="/runs/step-00000002", state="DELETED")
    save(database, run_id, step=3, path="s3://bucket/run/step-00000003", state=newest)
    with database.write() as connection:
        connection.execute(RUNS.update().values(state="FAILED"))
    deleted = [checkpoint.step for checkpoint in CheckpointStore(database).deleted()]
    assert deleted == ([2] if newest == "READY" else [1, 2, 3])
