"""Tests that a record in a store has all steps of one history, whatever is killed, and is read whole."""

import json
import os
import random
import time
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.errors import DataLossError, NotFoundError
from services.common.stores import fetch, join_url
from services.extras.objects import records
from services.extras.objects.checkpoints import ObjectCheckpoints
from services.extras.objects.connection import ObjectFolder
from services.extras.replay import command, files
from services.trainer.checkpoint import manifest
from tests.helpers.forks import PROCESSES
from tests.helpers.s3 import Relay, environment, needs_s3
from tests.unit.extras.objects.test_checkpoints import (  # noqa: F401
    LONG_S,
    Opener,
    _no_pauses,
    opened,
    save,
    stored_steps,
)

pytestmark = needs_s3


def start(root: Path, step: int) -> None:
    """Begins a record after a step, as the trainer's recorder does."""
    record = root / files.FOLDER
    files.forget_after(record, step)
    files.write_start(record, step, {"spec": {}})
    if not files.rank_file(record, step, 0).exists():
        write(root, step, content=b"initial weights")


def write(root: Path, step: int, *, content: bytes | None = None) -> bytes:
    file = files.rank_file(root / files.FOLDER, step, 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    content = random.randbytes(1000) if content is None else content
    file.write_bytes(content)
    return content


def record(store: ObjectCheckpoints, root: Path, steps: range) -> dict[int, bytes]:
    """Records steps and saves a checkpoint after each; returns the records."""
    contents = {}
    for step in steps:
        contents[step] = write(root, step)
        save(store, root, step)
    store.wait(LONG_S)
    return contents


def fetched(store: ObjectCheckpoints, cache: Path) -> dict[int, bytes]:
    """Returns the record of each step in the store, as a replay reads it."""
    return contents_of(fetch(join_url(store.url, files.FOLDER), "record", cache=cache))


def contents_of(folder: Path) -> dict[int, bytes]:
    steps = files.recorded_steps(folder)
    return {step: files.rank_file(folder, step, 0).read_bytes() for step in steps}


def test_the_folder_is_that_of_the_recorder():
    assert records.FOLDER == files.FOLDER


def test_a_record_is_read_whole_after_the_disk_was_lost_twice(opened: Opener, tmp_path: Path):  # noqa: F811
    contents: dict[int, bytes] = {0: b"initial weights"}
    for number, steps in enumerate((range(1, 4), range(4, 6), range(6, 8))):
        store, root = opened(), tmp_path / str(number)
        store.restore_newest(root)
        start(root, steps.start - 1)
        contents |= record(store, root, steps)
    assert fetched(store, tmp_path / "cache") == contents
    folder = fetch(join_url(store.url, files.FOLDER), "record", cache=tmp_path / "cache")
    assert [s["step"] for s in files.read_starts(folder)] == [0, 3, 5]
    assert files.has_all_steps(folder, 7)
    assert not files.has_all_steps(root / files.FOLDER, 7), "the last disk has the last steps only"


def test_a_replay_reads_the_steps_of_the_store_and_then_those_of_the_disk(
    opened: Opener,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(command, "fetch", partial(fetch, cache=tmp_path / "cache"))
    first = opened()
    start(tmp_path / "0", 0)
    contents = {0: b"initial weights", **record(first, tmp_path / "0", range(1, 4))}
    monkeypatch.chdir(tmp_path)
    state, store = Path("state"), opened()  # relative, as the default is
    root = state / "run_1" / "checkpoints"
    store.restore_newest(root)
    start(root, 3)
    contents |= {step: write(root, step) for step in (4, 5)}  # of no checkpoint yet
    spec = {"trainer": {"checkpoint": {"directory": store.url}}}
    run: Any = SimpleNamespace(id="run_1", step=5, spec=spec)
    folder = command.record_folder(run, state)
    assert contents_of(folder) == contents
    assert [s["step"] for s in files.read_starts(folder)] == [0, 3]
    # The run goes back to a step that the store has: what the store has after it is left.
    files.forget_after(root / files.FOLDER, 3)
    contents = {step: content for step, content in contents.items() if step <= 3}
    record(first, tmp_path / "0", range(4, 6))
    start(root, 3)
    run.step = 3
    assert contents_of(command.record_folder(run, state)) == contents
    # Another machine goes on: this disk is of no history of the run.
    third = opened()
    third.restore_newest(tmp_path / "2")
    start(tmp_path / "2", 5)
    record(third, tmp_path / "2", range(6, 7))
    run.step = 6
    assert [s["step"] for s in files.read_starts(command.record_folder(run, state))] == [0, 5]


def test_steps_that_are_trained_again_replace_those_of_the_left_history(
    opened: Opener,  # noqa: F811
    tmp_path: Path,
):
    store, root = opened(), tmp_path / "root"
    start(root, 0)
    contents = record(store, root, range(1, 5))
    start(root, 2)
    again = record(store, root, range(3, 4))
    assert fetched(store, tmp_path / "cache") == {
        0: b"initial weights",
        **{step: contents[step] for step in (1, 2)},
        **again,
    }
    names = [stored.name for stored in ObjectFolder(store.url).list(files.FOLDER)]
    assert len(names) == 1 + 4 + 1, "index, steps 0 to 3, and the starts"
    assert stored_steps(store) == [3]


def test_a_full_store_holds_no_step_and_gets_the_record_later(
    opened: Opener,  # noqa: F811
    tmp_path: Path,
    relay: Relay,
):
    store, root = opened(), tmp_path / "root"
    start(root, 0)
    contents = record(store, root, range(1, 2))
    relay.set("full")
    for step in (2, 3):
        contents[step] = write(root, step)
        since = time.monotonic()
        save(store, root, step)
        assert time.monotonic() - since < 30
    relay.set("forward")
    store.wait(LONG_S)
    assert fetched(store, tmp_path / "cache") == {0: b"initial weights", **contents}


def test_records_are_deleted_with_the_last_checkpoint(opened: Opener, tmp_path: Path):  # noqa: F811
    store = opened()
    start(tmp_path, 0)
    record(store, tmp_path, range(1, 3))
    store.delete("step-00000001")
    assert ObjectFolder(store.url).list(files.FOLDER)
    store.delete("step-00000002")
    assert ObjectFolder(store.url).list() == []


def test_a_record_that_was_deleted_with_its_last_checkpoint_is_uploaded_again(
    opened: Opener,  # noqa: F811
    tmp_path: Path,
):
    """The controller deletes a checkpoint while the trainer goes on."""
    store = opened()
    start(tmp_path, 0)
    contents = record(store, tmp_path, range(1, 3))
    for step in (1, 2):
        ObjectCheckpoints(ObjectFolder(store.url)).delete(f"step-{step:08d}")
    contents |= record(store, tmp_path, range(3, 4))
    assert fetched(store, tmp_path / "cache") == {0: b"initial weights", **contents}


def test_a_damaged_index_does_not_hold_up_later_uploads(opened: Opener, tmp_path: Path):  # noqa: F811
    store, root = opened(), tmp_path / "root"
    start(root, 0)
    contents = record(store, root, range(1, 2))
    ObjectFolder(store.url).write(f"{files.FOLDER}/step-00000001.json", b"{")
    store.submit(root / "step-00000001", keep=3, keep_steps=())
    contents |= record(store, root, range(2, 3))
    assert fetched(store, tmp_path / "cache") == {0: b"initial weights", **contents}


@pytest.mark.parametrize("damage", ["missing", "index", "foreign path"])
def test_a_damaged_record_is_refused_and_does_not_keep_the_run_from_going_on(
    opened: Opener,  # noqa: F811
    tmp_path: Path,
    damage: str,
):
    store = opened()
    start(tmp_path / "one", 0)
    record(store, tmp_path / "one", range(1, 3))
    folder = ObjectFolder(store.url)
    index = f"{files.FOLDER}/step-00000002.json"
    if damage == "missing":
        folder.delete([o.name for o in folder.list(f"{files.FOLDER}/files/step-00000002")])
    elif damage == "index":
        folder.write(index, b'{"run.json": {"obj')
    else:
        names = json.loads(folder.read(index))
        folder.write(index, json.dumps({"../../escaped": names["run.json"]}).encode())
    with pytest.raises(DataLossError, match=files.FOLDER):
        fetched(store, tmp_path / "cache")
    other = opened()
    other.restore_newest(tmp_path / "other")
    assert manifest.newest(tmp_path / "other")[0].name == "step-00000002"
    assert not (tmp_path.parent / "escaped").exists()


def test_a_store_without_a_record_is_told(opened: Opener, tmp_path: Path):  # noqa: F811
    store = opened()
    save(store, tmp_path, 1)
    store.wait(LONG_S)
    with pytest.raises(NotFoundError, match="record: full"):
        fetched(store, tmp_path / "cache")


def _run_until_killed(url: str, root: Path, environment: dict[str, str], started: Event) -> None:
    """Records steps as a trainer that resumes from the store."""
    os.environ.update(environment)
    store = ObjectCheckpoints(ObjectFolder(url))
    store.restore_newest(root)
    try:
        step = manifest.newest(root)[1]["step"]
    except NotFoundError:
        step = 0
    start(root, step)
    manifest.remove_leftovers(root)
    started.set()
    record(store, root, range(step + 1, step + 30))


@pytest.mark.timeout(300)
def test_every_checkpoint_of_a_killed_process_has_the_records_of_its_steps(
    bucket: str, relay: Relay, tmp_path: Path
):
    url, rng = join_url(bucket, "killed"), random.Random(3)
    newest = number = 0
    while number < 6 or newest <= 3:  # on a busy machine, more lives until as many steps are stored
        root = tmp_path / f"root-{number // 2}"  # every second process has a new disk
        number += 1
        started = PROCESSES.Event()
        process = PROCESSES.Process(
            target=_run_until_killed, args=(url, root, environment(relay.port), started)
        )
        process.start()
        assert started.wait(LONG_S)
        time.sleep(rng.uniform(0.1, 1.5))  # the moment of the kill is the input of this test
        process.kill()
        process.join()
        store = ObjectCheckpoints(ObjectFolder(url))
        if steps := stored_steps(store):
            newest = max(steps)
            assert {*range(newest + 1)} <= {*fetched(store, tmp_path / "cache")}
