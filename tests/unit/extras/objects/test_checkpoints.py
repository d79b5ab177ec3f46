"""Tests that stored checkpoints exist whole or not at all, and that a store which fails costs no step."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from services.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    UnavailableError,
)
from services.common.fields import new_id
from services.common.stores import join_url
from services.extras.objects import checkpoints, transfers
from services.extras.objects.checkpoints import ObjectCheckpoints
from services.extras.objects.connection import ObjectFolder
from services.extras.objects.layout import stored_checkpoints
from services.trainer.checkpoint import manifest
from tests.helpers.s3 import Relay, environment, needs_s3

pytestmark = needs_s3
Opener = Callable[..., ObjectCheckpoints]
LONG_S = 60.0


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(transfers, "_MAX_PAUSE_S", 0.2)


@pytest.fixture
def opened(bucket: str) -> Iterator[Opener]:
    with ExitStack() as stack:

        def open_(**arguments: int) -> ObjectCheckpoints:
            store = ObjectCheckpoints(
                ObjectFolder(join_url(bucket, "run", "checkpoints")), **arguments
            )
            stack.callback(store.close)
            return store

        yield open_


def publish(
    store: ObjectCheckpoints,
    root: Path,
    step: int,
    *,
    keep: int = 2,
    keep_steps: tuple[int, ...] = (),
    size: int = 1000,
) -> Path:
    """Publishes a checkpoint on disk, as the trainer does."""
    unfinished = manifest.unfinished_of(root, step)
    unfinished.mkdir(parents=True)
    for rank in (1, 2):
        name = f"shard-{rank:05d}-00001.safetensors"
        (unfinished / name).write_bytes(random.Random(step).randbytes(size))
    steps_to_keep = {*keep_steps, *store.pending_steps()}
    return manifest.publish(
        root, step, {"step": step}, keep=keep, keep_steps=steps_to_keep, upload=new_id("upload")
    )


def save(
    store: ObjectCheckpoints,
    root: Path,
    step: int,
    *,
    keep: int = 2,
    keep_steps: tuple[int, ...] = (),
    size: int = 1000,
) -> Path:
    """Publishes a checkpoint on disk and submits it, as the trainer does."""
    folder = publish(store, root, step, keep=keep, keep_steps=keep_steps, size=size)
    store.submit(folder, keep=keep, keep_steps=keep_steps)
    return folder


def stored_steps(store: ObjectCheckpoints) -> list[int]:
    checkpoints = stored_checkpoints(ObjectFolder(store.url).list())
    return sorted(step for step, checkpoint in checkpoints.items() if checkpoint.is_published)


def test_the_newest_checkpoint_is_restored_on_another_machine(
    opened: Opener, tmp_path: Path
) -> None:
    store = opened()
    for step in (1, 2, 3):
        save(store, tmp_path / "one", step)
    store.wait(LONG_S)
    opened().restore_newest(tmp_path / "other")
    folder, facts = manifest.newest(tmp_path / "other")
    assert (folder.name, facts) == ("step-00000003", {"step": 3})
    assert store.status().stored_step == 3


def reported_uploads(store: ObjectCheckpoints) -> list[tuple[int, str]]:
    """Returns step and upload of the events that a worker reports now."""
    session = Mock(run_id="run")
    store.report(session)
    calls = [call for call in session.report_event.mock_calls if call.args[0].endswith("Uploaded")]
    return [(call.kwargs["step"], call.kwargs["key"]) for call in calls]


def test_what_a_process_did_not_report_before_its_end_is_reported_by_the_next(
    opened: Opener, tmp_path: Path
) -> None:
    killed = opened()
    for step in (1, 2):
        save(killed, tmp_path / "one", step)
        killed.wait(LONG_S)
    successor = opened()
    successor.restore_newest(tmp_path / "other")
    restored = reported_uploads(successor)
    assert restored == reported_uploads(killed), "the run's record leaves out what it has"
    assert [step for step, _ in restored] == [1, 2]
    save(successor, tmp_path / "other", 3)
    successor.wait(LONG_S)
    assert [step for step, _ in reported_uploads(successor)] == [3]


def test_retention_in_the_store_is_that_of_the_disk(opened: Opener, tmp_path: Path) -> None:
    store = opened()
    for step in (1, 2, 3, 4, 5):
        save(store, tmp_path, step, keep_steps=(2,))
        store.wait(LONG_S)
    assert stored_steps(store) == [2, 4, 5]
    on_disk = sorted(int(folder.name[-8:]) for folder in manifest.published_in(tmp_path))
    assert on_disk == [2, 4, 5]
    names = {stored.name.split("/")[0] for stored in ObjectFolder(store.url).list()}
    assert names == {"step-00000002", "step-00000004", "step-00000005"}


def test_later_steps_of_a_left_history_are_deleted(opened: Opener, tmp_path: Path) -> None:
    store = opened()
    for step in (4, 5, 3):
        save(store, tmp_path, step)
        store.wait(LONG_S)
    assert stored_steps(store) == [3]


@pytest.mark.parametrize("mode", ["refuse", "full"])
def test_a_failing_store_holds_nothing_up_and_gets_all_that_is_kept(
    opened: Opener, tmp_path: Path, relay: Relay, mode: str
) -> None:
    store = opened()
    save(store, tmp_path, 1)
    store.wait(LONG_S)
    relay.set(mode)  # type: ignore[arg-type]
    for step in (2, 3, 4, 5):
        begin = time.monotonic()
        save(store, tmp_path, step)
        assert time.monotonic() - begin < 30, "saving does not wait for the store"
    with pytest.raises(DeadlineExceededError, match="first cause: "):
        store.wait(1.0)
    status = store.status()
    assert status.failing_s > 0
    assert ("507" if mode == "full" else "error sending request") in status.cause
    pending = store.pending_steps()
    assert {4, 5} <= pending
    for step in pending:
        manifest.verify(manifest.folder_of(tmp_path, step))
    relay.set("forward")
    store.wait(LONG_S)
    assert stored_steps(store) == [4, 5]
    assert store.status().failing_s == 0


def test_an_upload_continues_with_the_files_that_the_store_lacks(
    opened: Opener, tmp_path: Path, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "CONCURRENCY", 1)
    store = opened()
    relay.cut_after = relay.num_bytes + 1_500_000  # in the second file
    save(store, tmp_path, 1, size=1_000_000)
    with pytest.raises(DeadlineExceededError):
        store.wait(1.5)
    sent, relay.cut_after = relay.num_bytes, None
    relay.set("forward")
    store.wait(LONG_S)
    assert stored_steps(store) == [1]
    assert relay.num_bytes - sent < 1_500_000, "the first file is not sent again"


def test_the_next_process_uploads_what_the_last_one_did_not(
    opened: Opener, tmp_path: Path, relay: Relay
) -> None:
    first = opened()
    save(first, tmp_path, 1)
    first.wait(LONG_S)
    relay.set("refuse")
    folder = save(first, tmp_path, 2)
    first.close()
    relay.set("forward")
    second = opened()
    second.restore_newest(tmp_path)
    assert manifest.newest(tmp_path)[0] == folder
    second.submit(folder, keep=None, keep_steps=())
    second.wait(LONG_S)
    assert stored_steps(second) == [1, 2]


def test_a_damaged_folder_is_left_out_and_does_not_hold_up_the_next_one(
    opened: Opener, tmp_path: Path, relay: Relay
) -> None:
    store = opened()
    relay.set("refuse")
    folder = publish(store, tmp_path, 1)
    next(folder.glob("*.safetensors")).write_bytes(b"")
    store.submit(folder, keep=2, keep_steps=())
    save(store, tmp_path, 2)
    relay.set("forward")
    store.wait(LONG_S)
    assert stored_steps(store) == [2]


def test_a_file_that_is_damaged_between_two_attempts_is_left_out(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    upload = store._store.upload

    def fail_once(file: Path, name: str, **options: Any) -> None:
        monkeypatch.setattr(store._store, "upload", upload)
        file.write_bytes(b"")
        raise UnavailableError("the store fails")

    monkeypatch.setattr(store._store, "upload", fail_once)
    save(store, tmp_path, 1)
    with pytest.raises(FailedPreconditionError, match="its manifest says"):
        store.wait(LONG_S)
    save(store, tmp_path, 2)
    store.wait(LONG_S)
    assert stored_steps(store) == [2]


def test_older_folders_reach_the_store_and_the_reported_step_stays(
    opened: Opener, tmp_path: Path, relay: Relay
) -> None:
    first = opened()
    relay.set("refuse")
    old = save(first, tmp_path, 1)
    first.close()
    relay.set("forward")
    second = opened()
    save(second, tmp_path, 2)
    second.wait(LONG_S)
    third = opened()
    third.restore_newest(tmp_path)
    third.submit(old, keep=None, keep_steps=())
    third.wait(LONG_S)
    assert stored_steps(third) == [1, 2]
    assert third.status().stored_step == 2
    assert [step for step, _ in reported_uploads(third)] == [2, 1]


def test_a_run_that_went_back_resumes_from_its_own_disk(
    opened: Opener, tmp_path: Path, relay: Relay
) -> None:
    first = opened()
    for step in (4, 5):
        save(first, tmp_path, step)
    first.wait(LONG_S)
    relay.set("refuse")
    save(first, tmp_path, 3)  # deletes the later steps on disk, and cannot yet in the store
    first.close()
    relay.set("forward")
    opened().restore_newest(tmp_path)
    assert manifest.newest(tmp_path)[0].name == "step-00000003"


def test_what_another_machine_overtook_is_not_resumed(
    opened: Opener, tmp_path: Path, relay: Relay
) -> None:
    first, here, there = opened(), tmp_path / "here", tmp_path / "there"
    save(first, here, 1)
    first.wait(LONG_S)
    relay.set("refuse")
    save(first, here, 9)  # is never uploaded
    first.close()
    relay.set("forward")
    other = opened()
    other.restore_newest(there)
    save(other, there, 2)
    other.wait(LONG_S)
    opened().restore_newest(here)
    assert manifest.newest(here)[0].name == "step-00000002"


@pytest.mark.parametrize("damage", ["missing", "other bytes", "no manifest"])
def test_a_damaged_checkpoint_is_not_restored(opened: Opener, tmp_path: Path, damage: str) -> None:
    store = opened()
    for step in (1, 2):
        save(store, tmp_path / "one", step)
    store.wait(LONG_S)
    folder = ObjectFolder(store.url)
    (file, *_) = (o for o in folder.list("step-00000002") if o.name.endswith(".safetensors"))
    if damage == "missing":
        folder.delete([file.name])
    elif damage == "other bytes":
        folder.write(file.name, bytes(file.num_bytes))
    else:
        folder.write("step-00000002/manifest.json", b'{"step": 2, "fil')
    opened().restore_newest(tmp_path / "other")
    assert manifest.newest(tmp_path / "other")[0].name == "step-00000001"


@pytest.mark.parametrize("before", [None, 3])
@pytest.mark.parametrize("damage", ["other bytes", "missing"])
def test_a_checkpoint_that_is_damaged_on_this_host_is_restored_from_the_store(
    opened: Opener, tmp_path: Path, before: int | None, damage: str
) -> None:
    store = opened()
    for step in (1, 2):
        folder = save(store, tmp_path, step)
    store.wait(LONG_S)
    (file, *_) = folder.glob("*.safetensors")
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(bytes(file.stat().st_size))
    opened().restore_newest(tmp_path, before=before)
    assert manifest.newest(tmp_path, before=before) == (folder, {"step": 2})


def test_a_damaged_checkpoint_that_the_store_lacks_is_replaced_by_none(
    opened: Opener, tmp_path: Path, relay: Relay
) -> None:
    store = opened()
    older = save(store, tmp_path, 1)
    store.wait(LONG_S)
    relay.set("refuse")
    folder = save(store, tmp_path, 2)
    store.close()
    relay.set("forward")
    next(folder.glob("*.safetensors")).write_bytes(b"")
    opened().restore_newest(tmp_path, before=3)
    assert manifest.newest(tmp_path, before=3)[0] == older


def test_remains_of_uploads_are_deleted_when_they_are_old(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    folder = ObjectFolder(store.url)
    remains = ["step-00000001/upload_x/a.safetensors", "step-00000002/upload_y/a.safetensors"]
    for name in (*remains, "notes.txt"):
        folder.write(name, b"1")
    save(store, tmp_path, 2)
    store.wait(LONG_S)
    assert {stored.name for stored in folder.list()} >= {*remains}
    monkeypatch.setattr(checkpoints, "_REMAINS_AFTER", timedelta(seconds=-1))
    save(store, tmp_path, 3)
    store.wait(LONG_S)
    names = {stored.name for stored in folder.list()}
    assert not names & {*remains}
    assert "notes.txt" in names
    assert stored_steps(store) == [2, 3]


def test_each_rank_uploads_its_files(opened: Opener, tmp_path: Path) -> None:
    first, second = opened(rank=0, world_size=2), opened(rank=1, world_size=2)
    folder = save(first, tmp_path, 1)
    assert first.pending_steps() == {1}, "the file of the other rank is missing"
    second.submit(folder, keep=2, keep_steps=())
    first.wait(LONG_S)
    assert stored_steps(first) == [1]


def test_rank_0_uploads_the_files_of_a_rank_that_does_not(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_PEERS_S", 0.2)
    first = opened(rank=0, world_size=2)
    save(first, tmp_path, 1)
    first.wait(LONG_S)
    opened().restore_newest(tmp_path / "other")
    assert manifest.newest(tmp_path / "other")[1] == {"step": 1}


def test_a_deleted_checkpoint_is_gone(opened: Opener, tmp_path: Path) -> None:
    store = opened()
    save(store, tmp_path, 1)
    store.wait(LONG_S)
    for _ in range(2):  # may be repeated
        store.delete("step-00000001")
    assert ObjectFolder(store.url).list() == []


WRITER = """
import sys
from itertools import count
from pathlib import Path
from services.extras.objects.checkpoints import ObjectCheckpoints
from services.extras.objects.connection import ObjectFolder
from services.trainer.checkpoint import manifest
from tests.unit.extras.objects.test_checkpoints import save
url, root = sys.argv[1], Path(sys.argv[2])
store = ObjectCheckpoints(ObjectFolder(url))
store.restore_newest(root)
folders = manifest.published_in(root)
first = 1
if folders:
    first = manifest.newest(root)[1]["step"] + 1
    store.submit(folders[0], keep=None, keep_steps=())
print("resumed", first - 1, flush=True)
for step in count(first):
    manifest.remove_leftovers(root)
    save(store, root, step, size=200_000)
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.nightly)])
def test_readers_see_whole_checkpoints_whenever_the_writer_is_killed(
    bucket: str, relay: Relay, tmp_path: Path, kills: int
) -> None:
    """Kills a process at random points of restoring, saving, uploading and deleting."""
    url, seed = join_url(bucket, "run"), random.Random(7)
    resumed = -1
    for number in range(kills):
        # Every third life begins on another machine.
        root = tmp_path / str(number // 3)
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, url, str(root)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment(relay.port)},
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("resumed "), line
        assert int(line.split()[1]) >= resumed, "no confirmed step is lost"
        time.sleep(seed.uniform(0.0, 0.8))  # the moment of the kill is the input of this test
        process.send_signal(signal.SIGKILL)
        process.wait()
        resumed = _check_whole(url, tmp_path / f"read-{number}")
    assert resumed > 0


def _check_whole(url: str, root: Path) -> int:
    """Downloads every visible checkpoint; returns the newest step."""
    store = ObjectCheckpoints(ObjectFolder(url))
    checkpoints = stored_checkpoints(ObjectFolder(url).list())
    steps = [step for step, checkpoint in checkpoints.items() if checkpoint.is_published]
    for step in steps:
        store.restore_newest(root / str(step), before=step + 1)
        assert manifest.newest(root / str(step))[1] == {"step": step}
    return max(steps, default=0)
