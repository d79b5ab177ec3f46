"""Tests of the launcher, with programs that behave like Slurm's."""

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.common.errors import FailedPreconditionError
from services.common.task_group import TaskGroup
from services.controller.launch.launcher import WorkerExit
from services.extras.slurm.allocation import Allocation, Component
from services.extras.slurm.launcher import SlurmLauncher
from services.extras.slurm.placement import Node
from services.extras.slurm.settings import SlurmSettings
from tests.helpers.specs import spec_with

# Like srun, it ends well at SIGUSR2, which it would forward, and kills its tasks at SIGTERM.
SRUN = """\
echo "srun $*"
touch "{folder}/started-$$"
trap 'exit 0' USR2
trap 'exit 137' TERM
while [ ! -e "{folder}/failed" ]; do sleep 0.05; done
case "$*" in
  *nodelist=n2*) echo 'Traceback: connection lost'; echo 'srun: error: Node failure on n2'; exit 0;;
esac
while :; do sleep 0.05; done
"""
SPEC = spec_with(rollout={"replicas": 2})


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs programs like those of Slurm; ``nodes`` has the job's nodes."""
    programs = {
        "srun": SRUN.format(folder=tmp_path),
        "squeue": f'cat "{tmp_path}/nodes"',
        "scontrol": 'echo "$3" | tr "," "\\n"',
        "scancel": f'echo "$*" >> "{tmp_path}/cancelled"',
    }
    folder = tmp_path / "programs"
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o700)
    (tmp_path / "nodes").write_text("n1,n2\n")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path


@asynccontextmanager
async def opened(folder: Path, exits: list[WorkerExit]) -> AsyncIterator[SlurmLauncher]:
    """Opens a launcher of a node with two GPUs and one with one; the slurmd of the first answers."""
    with (
        socket.create_server(("127.0.0.1", 0)) as daemon,
        socket.create_server(("127.0.0.1", 0)) as gone,
    ):
        ports = [server.getsockname()[1] for server in (daemon, gone)]
        gone.close()
        nodes = [
            Node(
                "n1",
                0,
                "127.0.0.11",
                ("0", "1"),
                1,
                ports=(20_001,),
                daemon=("127.0.0.1", ports[0]),
            ),
            Node("n2", 0, "127.0.0.12", ("0",), 1, ports=(20_002,), daemon=("127.0.0.1", ports[1])),
        ]
        async with TaskGroup() as tasks, asyncio.timeout(60):
            yield SlurmLauncher(
                Allocation("7", [Component("7", None, {"n1": 1, "n2": 1})]),
                nodes,
                SlurmSettings(),
                controller_address="127.0.0.11:1",
                state_directory=folder / "state",
                on_exit=exits.append,
                tasks=tasks,
            )


async def started(folder: Path, count: int) -> None:
    """Waits until so many steps have started in all."""
    while sum(name.startswith("started-") for name in os.listdir(folder)) < count:  # noqa: ASYNC110, PTH208
        await asyncio.sleep(0.02)


async def test_workers_run_until_they_are_stopped_and_leave_no_token(slurm):
    exits: list[WorkerExit] = []
    async with opened(slurm, exits) as launcher:
        await launcher.start("run_a", SPEC)
        await started(slurm, 3)
        logs = slurm / "state" / "run_a" / "logs"
        plans = sorted(logs.glob("*.plan"))
        assert [plan.stem for plan in plans] == ["rollout-0", "rollout-1", "trainer-0"]
        assert {stat.S_IMODE(plan.stat().st_mode) for plan in plans} == {0o600}
        assert launcher.gpus_for("run_a") == 3
        assert launcher.gpus_for("run_b") == 0
        await launcher.stop("run_a")
        assert not list(logs.glob("*.plan"))
        assert launcher.gpus_for("run_b") == 3
    assert not exits


async def test_a_later_controller_adopts_the_workers_with_their_gpus(slurm):
    async with opened(slurm, []) as first:
        await first.start("run_a", SPEC)
        await started(slurm, 3)
        async with opened(slurm, []) as second:
            await second.start("run_a", SPEC)
            assert len(list(slurm.glob("started-*"))) == 3
            assert second.gpus_for("run_b") == 0
            await second.stop("run_a")


async def test_a_killed_worker_starts_again_where_it_was(slurm):
    exits: list[WorkerExit] = []
    async with opened(slurm, exits) as launcher:
        await launcher.start("run_a", SPEC)
        await started(slurm, 3)
        plan = (slurm / "state" / "run_a" / "logs" / "rollout-1.plan").read_text()
        await launcher.end("run_a", "rollout-1")
        await launcher.start("run_a", SPEC)
        await started(slurm, 4)
        assert (slurm / "state" / "run_a" / "logs" / "rollout-1.plan").read_text() == plan
        await launcher.stop("run_a")
    assert not exits, "who kills a worker knows it"


async def test_a_failed_node_is_the_cause_and_its_rollout_waits_for_free_gpus(slurm):
    exits: list[WorkerExit] = []
    async with opened(slurm, exits) as launcher:
        await launcher.start("run_a", SPEC)
        await started(slurm, 3)
        (slurm / "nodes").write_text("n1\n")  # Slurm removes a failed node from the job
        (slurm / "failed").touch()
        while not exits:  # noqa: ASYNC110 -- the handler has no event
            await asyncio.sleep(0.02)
        (report,) = [exit_.report() for exit_ in exits]
        assert report.startswith("rollout-1 exited")
        assert "Node failure on n2" in report
        assert "connection lost" not in report
        await launcher.start("run_a", SPEC)
        assert launcher.queued("run_a") == {"rollout-1"}
        waiting = asyncio.ensure_future(launcher.admitted("run_a", {"rollout-1"}))
        await launcher.start("run_a", spec_with(rollout={"replicas": 1}))
        assert await waiting == {"rollout-1"}
        await launcher.stop("run_a")


async def test_a_node_that_does_not_answer_is_reported_before_slurm_notices(slurm):
    exits: list[WorkerExit] = []
    async with opened(slurm, exits) as launcher:
        await launcher.start("run_a", SPEC)
        await started(slurm, 3)
        await launcher.report_lost_hosts("run_a")
        (report,) = [exit_.report() for exit_ in exits]
        assert report.startswith("rollout-1 exited")
        assert "node n2 does not answer" in report
        await launcher.end("run_a", "rollout-1")
        await launcher.stop("run_a")


async def test_a_run_that_the_allocation_cannot_hold_is_refused(slurm):
    async with opened(slurm, []) as launcher:
        large = spec_with(rollout={"replicas": 8})
        (problem,) = launcher.problems(large)
        assert problem.startswith("rollout.replicas: ")
        assert not [*launcher.problems(SPEC)]
        with pytest.raises(FailedPreconditionError, match=r"^rollout.replicas: "):
            await launcher.start("run_a", large)
