"""Tests of the progress that the trainer's server reports."""

import asyncio
from collections.abc import Collection, Mapping
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


async def on_uploaded() -> None:
    """Reports nothing."""


async def test_uploads_are_told_before_the_answer_that_ends_the_wait_for_them() -> None:
    calls: list[str] = []

    class Uploads:
        async def await_uploads(self, timeout_s: float) -> None:
            calls.append(f"awaited for {timeout_s:.0f} s")

    async def tell() -> None:
        calls.append("told")

    servicer = server.TrainerServicer(
        Uploads(),  # type: ignore[arg-type]
        "r",
        lambda step, result: None,
        lambda activity, gauges: None,
        tell,
    )
    await servicer.AwaitUploads(pb.AwaitUploadsRequest(timeout_s=9), None)  # type: ignore[arg-type]
    assert calls == ["awaited for 9 s", "told"]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_save_reports_its_progress_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    monkeypatch.setattr(server, "_REPORT_INTERVAL_S", 0.0)
    reported: list[tuple[str, Mapping[str, float]]] = []
    leader = Leader(fails=fails)
    servicer = server.TrainerServicer(
        leader,  # type: ignore[arg-type]
        "r",
        lambda step, result: None,
        lambda activity, gauges: reported.append((activity, gauges)),
        on_uploaded,
    )
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
