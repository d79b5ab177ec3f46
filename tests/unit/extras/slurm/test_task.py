"""Tests of the processes of a worker as tasks of a step, and of srun's processes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.host import interface_of
from services.common.parent import module_command
from services.controller.launch.worker_process import ChildProcess
from services.extras.slurm.identity import write_private
from services.extras.slurm.settings import step_environment
from services.extras.slurm.steps import StepProcess, StepRequest, srun_command

WORKER = """\
import json, os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
        "OMP_NUM_THREADS", "SLIPSTREAM_TRAINER_BIND", "SLIPSTREAM_TRAINER_RUN_TOKEN", "GLOO_SOCKET_IFNAME")
print(json.dumps({key: os.environ.get(key) for key in keys}), flush=True)
signal.sigwait({signal.SIGTERM})
sys.exit(3)
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "worker_of_test.py").write_text(WORKER)
    document = {
        "module": "worker_of_test",
        "prefix": "SLIPSTREAM_TRAINER_",
        "environment": {"SLIPSTREAM_TRAINER_RUN_TOKEN": "secret"},
        "ranks": 4,
        "master": "127.0.0.11",
        "port": 23456,
        "nodes": {"n2": {"address": "127.0.0.12", "gpus": ["2", "3"], "threads": 5}},
    }
    file = tmp_path / "trainer-0.plan"
    write_private(file, json.dumps(document).encode())
    return file


def started(plan: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    path = f"{plan.parent}:{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[4]}"
    return subprocess.Popen(
        module_command("services.extras.slurm.task", str(plan)),
        env={**environment, "PYTHONPATH": path, **variables},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_task_is_a_rank_on_its_node_and_ends_with_its_worker(plan):
    task = started(plan, SLURMD_NODENAME="n2", SLURM_PROCID="3", SLURM_LOCALID="1")
    assert json.loads(task.stdout.readline()) == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.11",
        "MASTER_PORT": "23456",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "OMP_NUM_THREADS": "5",
        "SLIPSTREAM_TRAINER_BIND": "127.0.0.12:0",
        "SLIPSTREAM_TRAINER_RUN_TOKEN": "secret",
        "GLOO_SOCKET_IFNAME": interface_of("127.0.0.12"),
    }
    for number in (signal.SIGUSR1, signal.SIGTERM):  # of Slurm, for all processes of the step
        task.send_signal(number)
    assert task.poll() is None
    task.send_signal(signal.SIGUSR2)
    assert task.wait(timeout=30) == 3
    assert plan.stat().st_mode & 0o777 == 0o600


def test_a_step_asks_for_its_nodes_and_shares_them_with_the_other_steps():
    request = StepRequest(
        name="run.trainer-0",
        group=1,
        nodes=["n1", "n2"],
        tasks_per_node=4,
        module="m",
        arguments=["plan"],
    )
    command = srun_command(request, job_id="7", extra=["--container-image=image"])
    options = {
        "--jobid=7",
        "--het-group=1",
        "--overlap",
        "--nodelist=n1,n2",
        "--nodes=2",
        "--ntasks=8",
    }
    assert options <= {*command}
    assert command[-6:] == ["--container-image=image", sys.executable, "-P", "-m", "m", "plan"]


def test_a_step_gets_no_requests_of_the_batch_script_and_no_key(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_1", "n2")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("SLIPSTREAM_CONTROLLER_SERVICE_KEY_FILE", "/key")
    variables = step_environment()
    assert {"SLURM_CONF", "SLURM_JOB_NODELIST_HET_GROUP_1"} <= variables.keys()
    assert (
        not {"SLURM_NTASKS_PER_NODE", "SLIPSTREAM_CONTROLLER_SERVICE_KEY_FILE"} & variables.keys()
    )


async def shell(text: str) -> StepProcess:
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", text, stdout=asyncio.subprocess.PIPE
    )
    await process.stdout.readline()  # its traps are set
    return StepProcess(ChildProcess(process))


async def test_a_worker_that_srun_reports_as_killed_has_the_signal_as_its_code():
    step = await shell("echo; exit 137")
    assert await step.wait() == -signal.SIGKILL


async def test_a_worker_is_stopped_by_the_signal_that_srun_forwards():
    step = await shell("trap 'exit 5' USR2; echo; while :; do sleep 0.05; done")
    step.stop()
    assert await step.wait() == 5


async def test_a_step_on_a_dead_node_is_given_up():
    deaf = await shell("trap '' TERM; echo; while :; do sleep 0.05; done")
    assert not await deaf.kill(0.2)
    willing = await shell("trap 'exit 1' TERM; echo; while :; do sleep 0.05; done")
    assert await willing.kill(30)
