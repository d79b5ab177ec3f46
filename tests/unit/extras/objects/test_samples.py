"""Tests that samples in a store are those of their file, whatever fails, and are read back by a query."""

import gzip
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from services.common.errors import NotFoundError
from services.common.stores import join_url
from services.extras.objects import sample_records, transfers
from services.extras.objects.connection import ObjectFolder
from services.extras.objects.sample_records import ObjectSamples
from services.transferqueue.records.store import SampleStore
from services.wire.transferqueue.types import SampleRecordQuery
from tests.helpers.s3 import Relay, needs_s3
from tests.unit.transferqueue.test_sample_store import NO_BOUND, made, trained

pytestmark = needs_s3
LONG_S = 60.0
WHOLE = SampleRecordQuery(with_turns=True, with_tokens=True)
Opener = Callable[[], ObjectSamples]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(transfers, "_MAX_PAUSE_S", 0.2)
    monkeypatch.setattr(sample_records, "_EVERY_S", 0.05)


@pytest.fixture
def url(bucket: str) -> str:
    return join_url(bucket, "run", "samples")


@pytest.fixture
def opened(url: str) -> Iterator[Opener]:
    with ExitStack() as stack:

        def open_() -> ObjectSamples:
            uploads = ObjectSamples(url)
            stack.callback(uploads._patience.cancel)
            return uploads

        yield open_


def lines(path: Path) -> list[bytes]:
    return [line for batch in SampleStore(path).lines(WHOLE) for line in batch]


def names(url: str) -> list[str]:
    return sorted(ObjectFolder(url).sizes())


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end, "the condition is not met in time"
        time.sleep(0.05)


def upload(uploads: ObjectSamples, path: Path, **limits: int) -> None:
    """Uploads what a file has, to the end."""
    uploads.follow(path, **{**NO_BOUND, **limits})
    uploads.finish()
    thread = uploads._thread
    if thread is not None:
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_samples_are_read_back_as_they_were_stored(
    opened: Opener, tmp_path: Path, url: str
) -> None:
    path = tmp_path / "run.db"
    store, uploads = SampleStore(path), opened()
    uploads.follow(path, **NO_BOUND)
    store.write([made(1), made(2, response="two\nlines \u2028 \U0001f600")], **NO_BOUND)
    until(lambda: len(names(url)) == 1)
    store.write([trained(1, 3), made(3), trained(3, 4)], **NO_BOUND)
    uploads.finish()
    until(lambda: len(names(url)) == 2)
    opened().restore(tmp_path / "copy.db")
    assert lines(tmp_path / "copy.db") == lines(path)
    query = SampleRecordQuery(step=3)
    assert [len(batch) for batch in SampleStore(tmp_path / "copy.db").lines(query)] == [1]


@pytest.mark.parametrize("mode", ["refuse", "full"])
def test_a_store_that_fails_holds_nothing_up_and_gets_all_samples(
    opened: Opener, tmp_path: Path, relay: Relay, url: str, mode: str
) -> None:
    path = tmp_path / "run.db"
    store, uploads = SampleStore(path), opened()
    relay.set(mode)  # type: ignore[arg-type]
    begin = time.monotonic()
    uploads.follow(path, **NO_BOUND)
    for number in range(5):
        store.write([made(number)], **NO_BOUND)
    uploads.finish()
    assert time.monotonic() - begin < 30, "recording does not wait for the store"
    uploads.wait(0.3)
    until(lambda: uploads.failing_s > 0)
    assert uploads.cause
    relay.set("forward")
    until(lambda: bool(names(url)) and uploads.failing_s == 0)
    assert uploads.cause == ""
    opened().restore(tmp_path / "copy.db")
    assert lines(tmp_path / "copy.db") == lines(path)


def test_a_run_that_ended_may_go_on_with_the_same_uploads(
    opened: Opener, tmp_path: Path, url: str
) -> None:
    path, uploads = tmp_path / "run.db", opened()
    for number in range(3):
        SampleStore(path).write([made(number)], **NO_BOUND)
        upload(uploads, path)
    assert len(names(url)) == 3
    opened().restore(tmp_path / "copy.db")
    assert lines(tmp_path / "copy.db") == lines(path)


def test_another_process_goes_on_after_what_the_store_has(
    opened: Opener, tmp_path: Path, url: str
) -> None:
    path = tmp_path / "run.db"
    SampleStore(path).write([made(1)], **NO_BOUND)
    upload(opened(), path)
    SampleStore(path).write([made(2)], **NO_BOUND)
    upload(opened(), path)
    assert [name[:8] for name in names(url)] == ["00000001", "00000002"]
    opened().restore(tmp_path / "copy.db")
    assert lines(tmp_path / "copy.db") == lines(path)


def test_a_process_without_the_file_shows_earlier_samples_as_older(
    opened: Opener, tmp_path: Path, url: str
) -> None:
    first, second = tmp_path / "first.db", tmp_path / "second.db"
    SampleStore(first).write([made(1), made(2), trained(1, 5), trained(2, 5)], **NO_BOUND)
    upload(opened(), first)
    uploads = opened()
    SampleStore(second).write([made(3), made(2, response="again")], **NO_BOUND)
    upload(uploads, second)
    query = SampleRecordQuery()
    lines_of_group = [line for batch in SampleStore(second).lines(query) for line in batch]
    assert [line.split(b'"')[3] for line in lines_of_group] == [b"g2.0", b"g3.0", b"g1.0"]
    assert b"again" in lines_of_group[0]
    assert b'"step":5' not in lines_of_group[0], (
        "the earlier training is not that of the new sample"
    )
    assert b'"step":5' in lines_of_group[2]
    opened().restore(tmp_path / "copy.db")
    again = SampleRecordQuery(sample_id="g2.0")
    (restored,) = [
        line for batch in SampleStore(tmp_path / "copy.db").lines(again) for line in batch
    ]
    assert b"again" in restored


def test_the_oldest_objects_beyond_the_limits_are_deleted(
    opened: Opener, tmp_path: Path, url: str
) -> None:
    path, uploads = tmp_path / "run.db", opened()
    for number in range(6):
        SampleStore(path).write([made(number, version=number)], **NO_BOUND)
        upload(uploads, path, max_steps=2)
    assert [name[14:22] for name in names(url)] == ["00000005", "00000006"]
    size = max(ObjectFolder(url).sizes().values())
    SampleStore(path).write([made(6, version=6)], **NO_BOUND)
    upload(uploads, path, max_bytes=size + 10)
    assert [name[14:22] for name in names(url)] == ["00000007"]


def test_objects_have_a_bounded_size(
    opened: Opener, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_records, "_OBJECT_BYTES", 1000)
    path = tmp_path / "run.db"
    SampleStore(path).write([made(number) for number in range(20)], **NO_BOUND)
    upload(opened(), path)
    assert len(names(url)) > 5
    opened().restore(tmp_path / "copy.db")
    assert lines(tmp_path / "copy.db") == lines(path)


def test_nothing_is_written_while_the_records_of_an_object_are_read(
    opened: Opener, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.db"
    SampleStore(path).write([made(1), trained(1, 5)], **NO_BOUND)
    open_file, refusals = sample_records._opened, []

    def write(statement: str) -> None:
        if "FROM training" in statement and "position" in statement:
            with closing(sqlite3.connect(path, timeout=0)) as database:
                database.execute("DELETE FROM samples")
                with pytest.raises(sqlite3.OperationalError) as refusal:
                    database.commit()
            refusals.append(str(refusal.value))

    @contextmanager
    def open_traced(path: Path) -> Iterator[sqlite3.Connection]:
        with open_file(path) as database:
            database.set_trace_callback(write)
            yield database

    uploads = opened()
    uploads._continue(path)
    monkeypatch.setattr(sample_records, "_opened", open_traced)
    assert uploads._upload_next(path)
    assert refusals == ["database is locked"]


def test_a_damaged_object_is_left_out(opened: Opener, tmp_path: Path, url: str) -> None:
    path, uploads = tmp_path / "run.db", opened()
    for number in range(2):
        SampleStore(path).write([made(number)], **NO_BOUND)
        upload(uploads, path)
    ObjectFolder(url).write(names(url)[0], b"no gzip")
    opened().restore(tmp_path / "copy.db")
    (line,) = lines(tmp_path / "copy.db")
    assert line.startswith(b'{"id":"g1.0"')


def test_deletion_ends_the_uploads(opened: Opener, tmp_path: Path, url: str) -> None:
    path, uploads = tmp_path / "run.db", opened()
    SampleStore(path).write([made(1)], **NO_BOUND)
    uploads.follow(path, **NO_BOUND)
    until(lambda: bool(names(url)))
    uploads.delete()
    SampleStore(path).write([made(2)], **NO_BOUND)
    time.sleep(0.3)
    assert names(url) == []


def test_a_file_that_is_deleted_is_not_created_again(opened: Opener, tmp_path: Path) -> None:
    path, uploads = tmp_path / "run.db", opened()
    SampleStore(path).write([made(1)], **NO_BOUND)
    upload(uploads, path)
    path.unlink()
    uploads._upload_all(path)
    assert not path.exists()


def test_a_file_in_use_is_uploaded_later(opened: Opener, tmp_path: Path, url: str) -> None:
    path = tmp_path / "run.db"
    SampleStore(path).write([made(1)], **NO_BOUND)
    uploads = opened()
    with closing(sqlite3.connect(path)) as database:
        database.execute("BEGIN EXCLUSIVE")
        uploads.follow(path, **NO_BOUND)
        time.sleep(0.3)
        database.rollback()
    until(lambda: bool(names(url)))


def test_an_object_whose_bytes_were_changed_is_left_out(
    opened: Opener, tmp_path: Path, url: str
) -> None:
    path, uploads = tmp_path / "run.db", opened()
    for number in range(2):
        SampleStore(path).write([made(number)], **NO_BOUND)
        upload(uploads, path)
    damaged = names(url)[0]
    content = bytearray(ObjectFolder(url).read(damaged))
    content[12:16] = b"\xff\xff\xff\xff"
    no_sample = b'{"id": "a", "record": {"facts": {}}, "columns": {"response_ids": ""}}\n'
    for replacement in (bytes(content), gzip.compress(no_sample)):
        ObjectFolder(url).write(damaged, replacement)
        copy = tmp_path / f"{len(replacement)}.db"
        opened().restore(copy)
        (line,) = lines(copy)
        assert line.startswith(b'{"id":"g1.0"')


def test_samples_without_tokens_and_with_broken_characters_are_uploaded(
    opened: Opener, tmp_path: Path, url: str
) -> None:
    path, empty, broken = tmp_path / "run.db", made(1), made(2)
    empty.record["facts"].update(oldest_version=None, newest_version=None)
    broken.record["turns"][0]["tool_calls"] = [{"name": "say", "arguments": {"text": "\ud83d"}}]
    SampleStore(path).write([empty, broken], **NO_BOUND)
    upload(opened(), path)
    opened().restore(tmp_path / "copy.db")
    assert lines(tmp_path / "copy.db") == lines(path)


def test_training_is_uploaded_in_a_file_that_has_only_earlier_training(
    opened: Opener, tmp_path: Path, url: str
) -> None:
    first, second = tmp_path / "first.db", tmp_path / "second.db"
    SampleStore(first).write([made(1), made(2), trained(1, 5)], **NO_BOUND)
    upload(opened(), first)
    upload(opened(), second)
    SampleStore(second).write([trained(2, 6)], **NO_BOUND)
    upload(opened(), second)
    opened().restore(tmp_path / "copy.db")
    query = SampleRecordQuery(step=6)
    for path in (second, tmp_path / "copy.db"):
        assert [len(batch) for batch in SampleStore(path).lines(query)] == [1]


def test_training_that_arrives_before_the_earlier_samples_gives_their_step(
    opened: Opener, tmp_path: Path, url: str
) -> None:
    first, second = tmp_path / "first.db", tmp_path / "second.db"
    SampleStore(first).write([made(1)], **NO_BOUND)
    upload(opened(), first)
    SampleStore(second).write([trained(1, 6)], **NO_BOUND)
    upload(opened(), second)
    assert [len(batch) for batch in SampleStore(second).lines(SampleRecordQuery(step=6))] == [1]


def test_training_is_uploaded_after_the_newest_one_was_deleted(
    opened: Opener, tmp_path: Path, url: str
) -> None:
    path, uploads = tmp_path / "run.db", opened()
    SampleStore(path).write([made(1), made(2), trained(1, 5), trained(2, 6)], **NO_BOUND)
    upload(uploads, path)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM training WHERE step = 6")
    SampleStore(path).write([trained(2, 7)], **NO_BOUND)
    upload(uploads, path)
    opened().restore(tmp_path / "copy.db")
    query = SampleRecordQuery(step=7)
    assert [len(b) for b in SampleStore(tmp_path / "copy.db").lines(query)] == [1]


def test_a_run_that_goes_on_after_the_deadline_of_its_last_uploads_is_uploaded(
    opened: Opener, tmp_path: Path, relay: Relay, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_records, "_LAST_S", 0.1)
    path, uploads = tmp_path / "run.db", opened()
    SampleStore(path).write([made(1)], **NO_BOUND)
    relay.set("refuse")
    upload(uploads, path)
    relay.set("forward")
    assert names(url) == []
    uploads.follow(path, **NO_BOUND)
    until(lambda: bool(names(url)))


def test_deletion_ends_the_thread_of_a_run_that_goes_on(opened: Opener, tmp_path: Path) -> None:
    path, uploads = tmp_path / "run.db", opened()
    SampleStore(path).write([made(1)], **NO_BOUND)
    uploads.follow(path, **NO_BOUND)
    thread = uploads._thread
    assert thread is not None
    path.unlink()
    uploads.delete()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_a_folder_without_samples_is_refused_with_the_runs_below(
    opened: Opener, tmp_path: Path, url: str
) -> None:
    path = tmp_path / "run.db"
    with pytest.raises(NotFoundError):
        opened().restore(tmp_path / "copy.db")
    SampleStore(path).write([made(1)], **NO_BOUND)
    upload(opened(), path)
    with pytest.raises(NotFoundError, match="samples"):
        ObjectSamples(url.rpartition("/")[0]).restore(tmp_path / "copy.db")
