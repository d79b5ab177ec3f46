"""Tests that each upload of a checkpoint is reported once: a failure with its cause, its end, and success."""

from services.controller.membership import Worker
from services.controller.run.train.checkpoints import UploadReports
from services.controller.store.records import Note
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
    reports = UploadReports(URL, [worker], record=ignore)
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
    reports = UploadReports(URL, [worker], record=ignore)
    worker.gauges = {UPLOAD_FAILING_GAUGE: 11.0}
    for activity in ("saving the checkpoint of step 9", ""):
        worker.activity = activity
        assert [*reports.notes(worker)] == []
    worker.activity = "cannot upload the checkpoint of step 4 for 12 s: 507 Insufficient Storage"
    (note,) = reports.notes(worker)
    assert "507 Insufficient Storage" in note.message


def test_a_failure_whose_cause_stays_hidden_is_told_without_it() -> None:
    worker = trainer()
    reports = UploadReports(URL, [worker], record=ignore)
    worker.gauges = {UPLOAD_FAILING_GAUGE: 61.0}
    worker.activity = "saving the checkpoint of step 9"
    (note,) = reports.notes(worker)
    assert "cannot upload for 61 s" in note.message


def test_each_uploaded_step_is_reported_even_after_the_run_was_rewound() -> None:
    worker = trainer()
    reports = UploadReports(URL, [worker], record=ignore)
    reported_steps = []
    for step in (2, 4, 4, 3):
        worker.gauges = {UPLOADED_STEP_GAUGE: float(step)}
        reported_steps += [note.data["step"] for note in reports.notes(worker)]
    assert reported_steps == [2, 4, 3]
