"""The ranks of a worker end together, and the launcher reports which one ended first."""

import asyncio
import signal
import sys

from services.controller.launch.launcher import WorkerExit
from services.controller.launch.worker_process import ChildProcess, ProcessGroup


async def _waiting() -> ChildProcess:
    command = (sys.executable, "-c", "import signal; signal.pause()")
    return ChildProcess(await asyncio.create_subprocess_exec(*command))


async def test_the_rank_that_was_killed_first_is_reported() -> None:
    ranks = [await _waiting() for _ in range(3)]
    group = ProcessGroup(ranks)
    ranks[1].send_signal(signal.SIGKILL)
    code = await group.wait()
    assert (code, group.first_rank) == (-signal.SIGKILL, 1)
    end = WorkerExit(
        run_id="run_01",
        worker_id="trainer-0",
        code=code,
        last_lines="",
        log="t.log",
        rank=group.first_rank,
    )
    assert end.report() == "trainer-0 exited with signal 9, rank 1 first (log: t.log)"


async def test_a_worker_of_one_process_has_no_rank() -> None:
    process = await _waiting()
    group = ProcessGroup([process])
    process.send_signal(signal.SIGKILL)
    assert await group.wait() == -signal.SIGKILL
    assert group.first_rank is None
