"""Tests that a trainer saves to disk first, keeps what is not stored, and resumes from the store."""

import shutil
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.common.errors import FailedPreconditionError, NotFoundError
from services.trainer.checkpoint import manifest
from services.trainer.checkpoint.checkpointer import Checkpointer
from services.trainer.ranks.build import _resume
from services.trainer.ranks.rank import Rank
from services.trainer.settings import TrainerSettings
from tests.helpers.batches import policy_of, random_queue, rank_of, spec_of

SPEC = spec_of()


@dataclass
class FolderStore:
    """A store that is a folder; uploads are held back until ``upload``."""

    folder: Path
    url: str = "s3://bucket/run"
    waiting: list[Path] = field(default_factory=list)
    failure: Exception | None = None

    def restore_newest(self, root: Path, *, before: int | None = None) -> None:
        if self.failure is not None:
            raise self.failure
        for stored in sorted(self.folder.glob("step-*"))[-1:]:
            if not (root / stored.name).exists():
                shutil.copytree(stored, root / stored.name)

    def submit(self, folder: Path, *, keep: int | None, keep_steps: Collection[int]) -> None:
        self.waiting.append(folder)

    def pending_steps(self) -> set[int]:
        return {int(folder.name[-8:]) for folder in self.waiting}

    def upload(self) -> None:
        for folder in self.waiting:
            shutil.copytree(folder, self.folder / folder.name, dirs_exist_ok=True)
        self.waiting.clear()

    def report(self, session: object) -> None:
        """Reports nothing."""

    def wait(self, timeout_s: float) -> None:
        self.upload()

    def check(self) -> None:
        """Succeeds."""

    def delete(self, name: str) -> None:
        shutil.rmtree(self.folder / name)

    def close(self) -> None:
        """Does nothing."""


def rank_with(root: Path, store: FolderStore) -> Rank:
    rank = rank_of(SPEC, policy_of(SPEC), random_queue(policy_of(SPEC)), root=root)
    ranks = rank.runner.engine.ranks
    rank.checkpointer = Checkpointer(
        rank.runner.trained(), root=root, keep=1, ranks=ranks, store=store
    )
    return rank


def settings(*, resume: bool = False) -> TrainerSettings:
    return TrainerSettings(
        controller_address="unused", run_id="run", worker_id="trainer-0", resume=resume
    )


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    (tmp_path / "store").mkdir()
    return FolderStore(tmp_path / "store")


def test_a_checkpoint_stays_on_disk_until_the_store_has_it(
    tmp_path: Path, store: FolderStore
) -> None:
    rank = rank_with(tmp_path / "disk", store)
    folders = [rank.checkpointer.write(rank.snapshot(step)) for step in (1, 2)]
    assert [folder.is_dir() for folder in folders] == [True, True], "keep is 1, but none is stored"
    assert rank.checkpointer.location(folders[1]) == "s3://bucket/run/step-00000002"
    store.upload()
    rank.checkpointer.write(rank.snapshot(3))
    names = [folder.name for folder in manifest.published_in(tmp_path / "disk")]
    assert names == ["step-00000003"]


def test_each_folder_has_an_upload_of_its_own(tmp_path: Path, store: FolderStore) -> None:
    rank = rank_with(tmp_path / "disk", store)
    manifests = [
        (rank.checkpointer.write(rank.snapshot(1)) / manifest.MANIFEST).read_text()
        for _ in range(2)
    ]
    assert all('"upload": "upload_' in text for text in manifests)
    assert manifests[0] != manifests[1]


def test_a_trainer_on_an_empty_disk_resumes_from_the_store(
    tmp_path: Path, store: FolderStore
) -> None:
    first = rank_with(tmp_path / "one", store)
    first.checkpointer.write(first.snapshot(3))
    store.upload()
    second = rank_with(tmp_path / "two", store)
    assert _resume(second, tmp_path / "two", None, settings(resume=True)) == 3
    # The newest folder is submitted again, in case the process that wrote it did not upload it.
    assert [folder.name for folder in store.waiting] == ["step-00000003"]


def test_a_trainer_that_starts_again_submits_all_sound_folders_oldest_first(
    tmp_path: Path, store: FolderStore
) -> None:
    first = rank_with(tmp_path / "disk", store)
    for step in (1, 2, 3):
        first.checkpointer.write(first.snapshot(step))
    store.waiting.clear()  # the process ended before its uploads
    damaged = next((tmp_path / "disk" / "step-00000003").rglob("*.safetensors"))
    damaged.write_bytes(b"")
    second = rank_with(tmp_path / "disk", store)
    assert _resume(second, tmp_path / "disk", None, settings(resume=True)) == 2
    assert [folder.name for folder in store.waiting] == ["step-00000001", "step-00000002"]


def test_a_new_run_with_an_empty_store_starts_at_its_beginning(
    tmp_path: Path, store: FolderStore
) -> None:
    rank = rank_with(tmp_path / "disk", store)
    assert _resume(rank, tmp_path / "disk", None, settings()) == 0


def test_a_checkpoint_that_is_expected_and_missing_ends_the_start(
    tmp_path: Path, store: FolderStore
) -> None:
    rank = rank_with(tmp_path / "disk", store)
    with pytest.raises(manifest.UnusableCheckpointError, match="no usable checkpoint"):
        _resume(rank, tmp_path / "disk", None, settings(resume=True))


@pytest.mark.parametrize("error", [FailedPreconditionError, NotFoundError])
def test_a_store_that_refuses_ends_the_start_with_its_cause(
    tmp_path: Path, store: FolderStore, error: type[Exception]
) -> None:
    store.failure = error("the store refuses")
    rank = rank_with(tmp_path / "disk", store)
    with pytest.raises(manifest.UnusableCheckpointError, match="the store refuses"):
        _resume(rank, tmp_path / "disk", None, settings(resume=True))
