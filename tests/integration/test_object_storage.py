"""Runs with data, model and checkpoints in an object store."""

import json
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from services.extras.objects.connection import ObjectFolder
from services.extras.objects.layout import stored_checkpoints
from tests.helpers.cli import slipstream, started, train
from tests.helpers.s3 import Relay, environment, needs_s3, new_bucket, s3_server

pytestmark = [needs_s3, pytest.mark.timeout(400)]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_server() as port:
        for name, value in environment(port).items():
            monkeypatch.setenv(name, value)
        yield new_bucket(port)


def event_types(state: Path) -> set[str]:
    with closing(sqlite3.connect(state / "slipstream.db")) as connection:
        return {kind for (kind,) in connection.execute("SELECT type FROM events")}


def uploaded_steps(state: Path) -> list[int]:
    """Returns the steps of the events that a checkpoint was uploaded, in their order."""
    query = "SELECT data_json FROM events WHERE type = 'CheckpointUploaded' ORDER BY seq"
    with closing(sqlite3.connect(state / "slipstream.db")) as connection:
        return [json.loads(text)["step"] for (text,) in connection.execute(query)]


def steps_of(state: Path) -> list[int]:
    with closing(sqlite3.connect(state / "slipstream.db")) as connection:
        return [step for (step,) in connection.execute("SELECT step FROM steps ORDER BY step")]


def stored_steps(url: str) -> list[int]:
    checkpoints = stored_checkpoints(ObjectFolder(url).list()).values()
    return sorted(checkpoint.step for checkpoint in checkpoints if checkpoint.is_published)


def test_a_run_lives_in_a_bucket_and_another_starts_from_its_checkpoint(
    bucket, plumbing, tmp_path
) -> None:
    rows = (tmp_path / "prompts.jsonl").read_bytes()
    ObjectFolder(bucket).write("data/prompts.jsonl", rows)
    (tmp_path / "prompts.jsonl").unlink()
    data = f"data.train={{source: jsonl, path: {bucket}/data/prompts.jsonl}}"
    first = train(
        plumbing,
        tmp_path / "one",
        data,
        f"trainer.checkpoint={{every: 1, keep: 2, directory: {bucket}/runs/first}}",
    )
    assert first.code == 0, first.out + first.err
    assert stored_steps(f"{bucket}/runs/first") == [2, 3]
    reported_steps = uploaded_steps(tmp_path / "one")
    assert {*reported_steps} >= {2, 3}, "each upload is reported before the run ends"
    assert len({*reported_steps}) == len(reported_steps)
    assert event_types(tmp_path / "one") >= {"CheckpointSaved", "CheckpointsUploaded"}
    assert not event_types(tmp_path / "one") & {"CheckpointUploadFailing", "CheckpointNotUploaded"}
    # Everything that the first run has on this machine is lost, except for its record.
    run_id = first.folder.name
    shutil.rmtree(tmp_path / "one" / run_id / "checkpoints")
    exported = slipstream(
        "export",
        run_id,
        tmp_path / "model",
        "--push",
        f"{bucket}/model",
        "--state-directory",
        tmp_path / "one",
    )
    assert exported.code == 0, exported.out + exported.err
    second = train(
        plumbing,
        tmp_path / "two",
        data,
        f"model={{path: {bucket}/model, tokenizer: bytes}}",
        "trainer.steps=4",
        f"trainer.checkpoint={{start_from: {bucket}/runs/first/step-00000003}}",
    )
    assert second.code == 0, second.out + second.err
    assert steps_of(tmp_path / "two") == [4]


def test_record_and_samples_are_read_from_the_bucket_after_the_disk_was_lost(
    bucket, plumbing, tmp_path
) -> None:
    run = train(
        plumbing,
        tmp_path / "one",
        "record=full",
        f"samples.directory={bucket}/runs/first/samples",
        f"trainer.checkpoint={{every: 2, directory: {bucket}/runs/first}}",
    )
    assert run.code == 0, run.out + run.err
    assert "SamplesUploaded" in event_types(tmp_path / "one")
    shutil.rmtree(run.folder / "checkpoints")
    state = ("--state-directory", tmp_path / "one")
    replayed = slipstream("replay", run.folder.name, "--json", *state)
    assert replayed.code == 0, replayed.out + replayed.err
    steps = [json.loads(line) for line in replayed.out.splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert not any(step["tensors"] for step in steps)

    exported = slipstream("samples", run.folder.name, "--export", f"{bucket}/all.jsonl", *state)
    assert exported.code == 0, exported.out + exported.err
    lines = ObjectFolder(bucket).read("all.jsonl").splitlines()
    assert lines
    assert all(json.loads(line)["id"] for line in lines)
    assert f"wrote {len(lines)} samples" in exported.err
    (tmp_path / "one" / "samples" / f"{run.folder.name}.db").unlink()
    url = f"{bucket}/runs/first/samples/{run.folder.name}"
    for source in (run.folder.name, url):
        restored = slipstream("samples", source, "--export", str(tmp_path / "all.jsonl"), *state)
        assert restored.code == 0, restored.out + restored.err
        assert sorted((tmp_path / "all.jsonl").read_bytes().splitlines()) == sorted(lines)
    trained = slipstream("samples", url, "--step", "2", "--json", *state)
    assert {json.loads(line)["step"] for line in trained.out.splitlines()} == {2}
    refused = slipstream("samples", run.folder.name, "--export", f"{bucket}-absent/a.jsonl", *state)
    assert refused.code == 1
    assert "absent/a.jsonl" in refused.err


def message_of(state: Path, event: str) -> str:
    """Waits for an event of the only run; returns its message."""
    end = time.monotonic() + 120
    with closing(sqlite3.connect(state / "slipstream.db")) as connection:
        query = "SELECT message FROM events WHERE type = ?"
        while (row := connection.execute(query, (event,)).fetchone()) is None:
            assert time.monotonic() < end, f"no {event} among {event_types(state)}"
            time.sleep(0.2)
    return str(row[0])


def test_a_run_tells_why_its_samples_are_not_uploaded_and_when_they_are_again(
    plumbing, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server() as port, Relay(port) as relay:
        for name, value in environment(relay.port).items():
            monkeypatch.setenv(name, value)
        samples = f"samples.directory={new_bucket(port)}/samples"
        settings = ("--set", samples, "--set", "trainer.steps=100000")
        command = ("run", plumbing, "--state-directory", tmp_path / "one", *settings)
        with started(*command, until=r"step +2/") as (process, _):
            relay.set("refuse")
            assert "cannot upload samples for" in message_of(
                tmp_path / "one", "SampleUploadFailing"
            )
            relay.set("forward")
            message_of(tmp_path / "one", "SampleUploadResumed")
            process.terminate()
