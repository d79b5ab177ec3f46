"""Tests that uploads are reported once: a failure with its cause, its end, and success."""

import asyncio
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pytest

from services.common.errors import UnavailableError
from services.common.stores import sample_reports
from services.controller.store.records import Note
from services.extras.objects.upload_reports import UploadReports, UploadStatus, activity

URL = "s3://bucket/run"


@dataclass
class Session:
    """A worker's session that keeps what it is to report."""

    run_id: str = "run"
    activities: list[str | None] = field(default_factory=list)
    events: list[tuple[str, str, int, str]] = field(default_factory=list)

    def report(self, **content: Any) -> None:
        self.activities.append(content["activity"])

    def report_event(self, kind: str, message: str, *, step: int = 0, key: str = "") -> None:
        self.events.append((kind, message, step, key))

    def taken(
        self, reports: UploadReports, status: UploadStatus
    ) -> list[tuple[str, str, int, str]]:
        """Returns the events of one report."""
        self.events.clear()
        reports.report(self, status)  # type: ignore[arg-type]
        return [*self.events]


def test_each_upload_is_reported_once_however_many_come_between_two_reports() -> None:
    session, reports = Session(), UploadReports(URL)
    assert session.taken(reports, UploadStatus()) == []
    reports.add((2, "upload_a"))
    reports.add((4, "upload_b"), (3, "upload_c"))  # the run was rewound
    uploads = session.taken(reports, UploadStatus(stored_step=3))
    assert [(kind, step, key) for kind, _, step, key in uploads] == [
        ("CheckpointUploaded", 2, "upload_a"),
        ("CheckpointUploaded", 4, "upload_b"),
        ("CheckpointUploaded", 3, "upload_c"),
    ]
    assert URL in uploads[0][1]
    assert session.taken(reports, UploadStatus(stored_step=3)) == []


def test_a_failure_is_reported_once_with_its_cause_and_once_when_it_ends() -> None:
    session, reports = Session(), UploadReports(URL)
    for failing_s in (2.0, 9.9):
        status = UploadStatus(step=4, failing_s=failing_s, cause="no route to the store")
        assert session.taken(reports, status) == [], "a short failure is no event"
    status = UploadStatus(step=4, failing_s=12.0, cause="no route to the store")
    ((kind, message, step, _),) = session.taken(reports, status)
    assert (kind, step) == ("CheckpointUploadFailing", 4)
    assert "no route to the store" in message
    assert session.taken(reports, status) == []
    reports.add((4, "upload_a"))
    events = session.taken(reports, UploadStatus(stored_step=4))
    assert [kind for kind, *_ in events] == ["CheckpointUploadResumed", "CheckpointUploaded"]
    assert session.taken(reports, UploadStatus(stored_step=4)) == []


def test_the_activity_keeps_other_lines_while_nothing_is_uploaded() -> None:
    session, reports = Session(), UploadReports(URL)
    for step in (0, 4, 0, 0):
        session.taken(reports, UploadStatus(step=step, total_bytes=2))
    assert session.activities == [None, "uploading the checkpoint of step 4: 0 B of 2 B", "", None]


def test_an_upload_is_described_with_its_progress_or_its_failure() -> None:
    assert activity(UploadStatus(stored_step=3)) == ""
    going = UploadStatus(step=4, done_bytes=500_000_000, total_bytes=2_000_000_000, num_waiting=1)
    assert activity(going).startswith("uploading the checkpoint of step 4: ")
    assert activity(going).endswith(", 1 more wait")
    failing = UploadStatus(step=4, failing_s=45.2, cause="s3://b: no route")
    assert activity(failing) == "cannot upload the checkpoint of step 4 for 45 s: s3://b: no route"


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[tuple[float, str] | Exception]:
    """Answers of a transferqueue, in their order."""
    monkeypatch.setattr("services.extras.objects.reports._EVERY_S", 0.0)
    return asyncio.Queue()


async def test_a_failure_of_samples_is_reported_once_with_its_cause_and_once_when_it_ends(
    failures: asyncio.Queue[tuple[float, str] | Exception],
) -> None:
    async def sample_upload() -> tuple[bool, float, str]:
        answer = await failures.get()
        failures.task_done()
        if isinstance(answer, Exception):
            raise answer
        return (False, *answer)

    events: asyncio.Queue[Note] = asyncio.Queue()
    reports = sample_reports(URL)
    assert reports is not None
    watch = asyncio.create_task(reports(sample_upload, events.put).watch())
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
    assert sample_reports(url) is None


def test_a_store_whose_package_reports_nothing_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = {"s3": Mock(sample_reports="")}
    monkeypatch.setattr("services.common.stores.STORES", stores)
    assert sample_reports(URL) is None


@pytest.mark.parametrize(
    ("answer", "kind", "phrase"),
    [
        ((False, 0.0, ""), "SamplesUploaded", URL),
        ((True, 7.0, "no route"), "SamplesNotUploaded", "no route"),
        ((True, 0.0, ""), "SamplesNotUploaded", "more than 10 s"),
        (UnavailableError("the transferqueue is gone"), "SamplesNotUploaded", "queue is gone"),
    ],
)
async def test_the_end_of_a_run_says_if_the_store_has_its_samples(
    answer: tuple[bool, float, str] | Exception, kind: str, phrase: str
) -> None:
    waits: list[float] = []

    async def sample_upload(*, wait_s: float = 0.0) -> tuple[bool, float, str]:
        waits.append(wait_s)
        if isinstance(answer, Exception):
            raise answer
        return answer

    notes: asyncio.Queue[Note] = asyncio.Queue()
    reports = sample_reports(URL)
    assert reports is not None
    await reports(sample_upload, notes.put).record_end()
    note = notes.get_nowait()
    assert notes.empty()
    assert note.type == kind
    assert phrase in note.message
    assert waits == [10.0]
