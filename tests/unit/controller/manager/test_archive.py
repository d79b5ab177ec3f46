"""Tests that deleting a checkpoint reaches an object store, and that a store that fails is only logged."""

from collections.abc import Callable

import pytest

from services.common.errors import UnavailableError
from services.controller.manager import archive
from services.controller.run.train.checkpoints import Checkpoint

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
