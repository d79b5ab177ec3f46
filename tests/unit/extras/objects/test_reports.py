"""Tests that uploads are reported once: a failure with its cause, its end, and success."""

import asyncio
from unittest.mock import Mock

import pytest

from services.common.errors import UnavailableError
from services.common.stores import report_function
from services.controller.membership import Worker
from services.controller.store.records import Note
from services.extras.objects.reports import CheckpointReports
from services.wire.controller import UPLOAD_FAILING_GAUGE, UPLOADED_STEP_GAUGE

URL = "s3://bucket/run"


def trainer() -> Worker:
    return Worker(
        run_id="run",
        worker_id="trainer-0",
        incarnation="1",
        role="trainer",
        address="a:1",
        host_id="h",
        last_heartbeat=0.0,
    )


async def ignore(note: Note) -> None:
    """Takes an event."""


def test_a_failure_is_reported_once_with_its_cause_and_once_when_it_ends() -> None:
    worker = trainer()
    reports = CheckpointReports(URL, [worker], record=ignore)
    assert [*reports.notes(worker)] == [], "nothing is uploaded yet"
    worker.gauges = {UPLOAD_FAILING_GAUGE: 2.0}
    assert [*reports.notes(worker)] == [], "a short failure is no event"
    worker.gauges = {UPLOAD_FAILING_GAUGE: 12.0}
    worker.activity = "cannot upload the checkpoint of step 4 for 12 s: no route to the store"
    (note,) = reports.notes(worker)
    assert note.type == "CheckpointUploadFailing"
    assert "no route to the store" in note.message
    assert note.data["url"] == URL
    assert [*reports.notes(worker)] == []
    worker.gauges = {UPLOAD_FAILING_GAUGE: 0.0, UPLOADED_STEP_GAUGE: 4.0}
    assert [n.type for n in reports.notes(worker)] == [
        "CheckpointUploadResumed",
        "CheckpointUploaded",
    ]
    assert [*reports.notes(worker)] == []


def test_the_cause_is_told_though_a_save_hides_it_for_a_moment() -> None:
    worker = trainer()
    reports = CheckpointReports(URL, [worker], record=ignore)
    worker.gauges = {UPLOAD_FAILING_GAUGE: 11.0}
    for activity in ("saving the checkpoint of step 9", ""):
        worker.activity = activity
        assert [*reports.notes(worker)] == []
    worker.activity = "cannot upload the checkpoint of step 4 for 12 s: 507 Insufficient Storage"
    (note,) = reports.notes(worker)
    assert "507 Insufficient Storage" in note.message


def test_a_failure_whose_cause_stays_hidden_is_told_without_it() -> None:
    worker = trainer()
    reports = CheckpointReports(URL, [worker], record=ignore)
    worker.gauges = {UPLOAD_FAILING_GAUGE: 61.0}
    worker.activity = "saving the checkpoint of step 9"
    (note,) = reports.notes(worker)
    assert "cannot upload for 61 s" in note.message


def test_each_uploaded_step_is_reported_even_after_the_run_was_rewound() -> None:
    worker = trainer()
    reports = CheckpointReports(URL, [worker], record=ignore)
    reported_steps = []
    for step in (2, 4, 4, 3):
        worker.gauges = {UPLOADED_STEP_GAUGE: float(step)}
        reported_steps += [note.data["step"] for note in reports.notes(worker)]
    assert reported_steps == [2, 4, 3]


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[tuple[float, str] | Exception]:
    """Answers of a transferqueue, in their order."""
    monkeypatch.setattr("services.extras.objects.reports._SAMPLES_EVERY_S", 0.0)
    return asyncio.Queue()


async def test_a_failure_of_samples_is_reported_once_with_its_cause_and_once_when_it_ends(
    failures: asyncio.Queue[tuple[float, str] | Exception],
) -> None:
    async def failure() -> tuple[float, str]:
        answer = await failures.get()
        failures.task_done()
        if isinstance(answer, Exception):
            raise answer
        return answer

    events: asyncio.Queue[Note] = asyncio.Queue()
    report = report_function(URL, "sample_reports")
    assert report is not None
    watch = asyncio.create_task(report(failure, events.put))
    outage = [(9.0, "no route"), (12.0, "no route"), UnavailableError("gone"), (17.0, "no route")]
    for answer in (*outage, (0.0, ""), (0.0, "")):
        failures.put_nowait(answer)
    async with asyncio.timeout(10):
        await failures.join()
        failing, resumed = await events.get(), await events.get()
    watch.cancel()
    await asyncio.wait([watch])
    assert (failing.type, failing.data["url"]) == ("SampleUploadFailing", URL)
    assert "for 12 s: no route" in failing.message
    assert resumed.type == "SampleUploadResumed"
    assert events.empty()


@pytest.mark.parametrize("url", [None, "/folder", "file:///folder"])
def test_a_folder_has_no_uploads_to_report(url: str | None) -> None:
    for reports in ("checkpoint_reports", "sample_reports"):
        assert report_function(url, reports) is None


def test_a_store_whose_package_reports_nothing_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = {"s3": Mock(checkpoint_reports="", sample_reports="")}
    monkeypatch.setattr("services.common.stores.STORES", stores)
    assert report_function(URL, "sample_reports") is None
