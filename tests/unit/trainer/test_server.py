"""Tests of the progress that the trainer's server reports."""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.common.errors import FailedPreconditionError
from services.trainer import server
from services.trainer.ranks.leader import SavedCheckpoint
from slipstream.trainer.v1 import trainer_pb2 as pb
from tests.helpers.engines import until


class Leader:
    """Fake leader whose save ends when the test permits it."""

    def __init__(self, *, fails: bool = False) -> None:
        self.may_end = asyncio.Event()
        self.fails = fails
        self.progress = (0, 0)

    def save_progress(self) -> tuple[int, int]:
        return self.progress

    async def save(self, step: int, keep_steps: Collection[int]) -> SavedCheckpoint:
        await self.may_end.wait()
        if self.fails:
            raise FailedPreconditionError("the disk is full")
        return SavedCheckpoint(
            folder=Path("x"), location="x", seconds={}, num_bytes=7, free_bytes=1
        )


@dataclass
class Session:
    """Fake session of the trainer, which keeps what it reports."""

    reported: list[tuple[str, Mapping[str, float]]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def report(self, *, activity: str, gauges: Mapping[str, float]) -> None:
        self.reported.append((activity, gauges))

    async def send_events(self) -> None:
        self.calls.append("told")


def _servicer(leader: object, session: Session) -> server.TrainerServicer:
    return server.TrainerServicer(
        leader,  # type: ignore[arg-type]
        "r",
        lambda run, step, result: None,
        lambda: session,  # type: ignore[arg-type, return-value]
    )


async def test_uploads_are_told_before_the_answer_that_ends_the_wait_for_them() -> None:
    session = Session()

    class Uploads:
        store = None

        async def await_uploads(self, timeout_s: float) -> None:
            session.calls.append(f"awaited for {timeout_s:.0f} s")

    servicer = _servicer(Uploads(), session)
    await servicer.AwaitUploads(pb.AwaitUploadsRequest(timeout_s=9), None)  # type: ignore[arg-type]
    assert session.calls == ["awaited for 9 s", "told"]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_save_reports_its_progress_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    monkeypatch.setattr(server, "_REPORT_INTERVAL_S", 0.0)
    leader, session = Leader(fails=fails), Session()
    reported = session.reported
    servicer = _servicer(leader, session)
    request = pb.SaveCheckpointRequest(step=5)
    saving = asyncio.ensure_future(servicer.SaveCheckpoint(request, None))  # type: ignore[arg-type]
    await until(lambda: bool(reported))
    leader.progress = (3_000_000_000, 12_500_000_000)
    await until(lambda: reported[-1][0] != "saving step 5")
    assert reported[-1][0] == "saving step 5: 3.0 GB of 12.5 GB"
    assert reported[-1][1]["checkpoint_bytes"] == 12_500_000_000
    leader.may_end.set()
    if fails:
        with pytest.raises(FailedPreconditionError, match="full"):
            await saving
    else:
        assert (await saving).size_bytes == 7
    assert reported[-1] == ("", {"checkpoint_written_bytes": 0, "checkpoint_bytes": 0})
