"""Tests of workers that run as processes on this host."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from services.common.errors import FailedPreconditionError
from services.common.runspec.run import RunSpec
from services.common.task_group import TaskGroup
from services.controller.launch import process, worker_process
from services.controller.launch.process import ProcessLauncher
from services.controller.launch.worker_process import ChildProcess
from services.controller.settings import ControllerSettings
from services.rollout.settings import RolloutSettings
from services.trainer.settings import TrainerSettings
from tests.helpers.rest import SPEC


class Exited:
    """Fake process that has exited."""

    pid = os.getpid()

    async def wait(self) -> int:
        return 0

    def send_signal(self, number: int) -> None:
        """Does nothing."""


class Running(Exited):
    """Fake process that runs until a test sets ``ended``."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def wait(self) -> int:
        await self.ended.wait()
        return 0

    def send_signal(self, number: int) -> None:
        self.ended.set()


class FakeForkServer:
    """Fake fork server that records the modules and environments that it should start."""

    def __init__(self, process=None) -> None:
        self.process = process
        self.started = {}

    async def start(self, module, environment, log):
        self.started[log.stem] = (module, environment)
        return self.process


def launcher_of(tmp_path, tasks, forks=None, **options) -> ProcessLauncher:
    return ProcessLauncher(
        controller_address="127.0.0.1:1",
        state_directory=tmp_path,
        on_exit=lambda targets: None,
        tasks=tasks,
        forks=forks,
        **options,
    )


async def test_workers_inherit_nothing_of_the_controllers_own(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CONTROLLER_DATABASE_URL", "postgresql://user:password@host/db")
    monkeypatch.setenv("SLIPSTREAM_TRACE_RATIO", "0.5")
    forks = FakeForkServer(Exited())
    async with TaskGroup() as tasks:
        await launcher_of(tmp_path, tasks, forks).start("run_a", RunSpec.model_validate(SPEC))
    assert forks.started.keys() == {"trainer-0", "rollout-0", "rollout-1"}
    for module, environment in forks.started.values():
        prefix = module.replace("services.", "slipstream_").upper()
        assert environment[f"{prefix}_RUN_ID"] == "run_a"
        assert environment["SLIPSTREAM_TRACE_RATIO"] == "0.5"
        assert not [name for name in environment if name.startswith("SLIPSTREAM_CONTROLLER_")]


async def test_workers_judge_a_specification_by_the_controllers_policy(tmp_path, monkeypatch):
    outputs, state = tmp_path / "outputs", tmp_path / "state"
    outputs.mkdir()
    (state / "run_a").mkdir(parents=True)
    (outputs / "link").symlink_to(state)
    settings = ControllerSettings(
        transferqueue_address="127.0.0.1:1",
        state_directory=state,
        allowed_roots=(tmp_path,),
        allowed_urls=("s3://bucket/team",),
        code_roots=(tmp_path / "code",),
        allowed_commands=(("server", "--stdio"),),
        reward_hosts=("judge.internal",),
    )
    forks = FakeForkServer(Exited())
    async with TaskGroup() as tasks:
        launcher = launcher_of(tmp_path, tasks, forks, allowance=settings.allowance)
        await launcher.start("run_a", RunSpec.model_validate(SPEC))
    spec = RunSpec.model_validate(
        SPEC | {"trainer": {**SPEC["trainer"], "checkpoint": {"directory": str(outputs / "link")}}}
    )
    for worker_settings, worker_id in (
        (TrainerSettings, "trainer-0"),
        (RolloutSettings, "rollout-0"),
    ):
        for name, value in forks.started[worker_id][1].items():
            monkeypatch.setenv(name, value)
        worker = worker_settings()
        assert worker.allowance == settings.allowance
        assert any("link" in problem for problem in worker.allowance.problems_here(spec))


async def test_the_log_of_a_worker_that_writes_without_end_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_process, "MAX_LOG_BYTES", 100)
    monkeypatch.setattr(worker_process, "_LOG_EVERY_S", 0.01)
    forks = FakeForkServer(Running())
    async with TaskGroup() as tasks, asyncio.timeout(20):
        await launcher_of(tmp_path, tasks, forks).start("run_a", RunSpec.model_validate(SPEC))
        path = tmp_path / "run_a" / "logs" / "rollout-0.log"
        with path.open("ab", buffering=0) as log:
            log.write(b"0" * 99)
            await asyncio.sleep(0.05)
            assert path.stat().st_size == 99
            log.write(b"11")
            while path.stat().st_size > 0:  # noqa: ASYNC110 -- a file has no event
                await asyncio.sleep(0.01)
            log.write(b"next")
        assert path.read_bytes() == b"next"
        assert path.with_name("rollout-0.log.1").read_bytes() == b"0" * 99 + b"11"
        forks.process.ended.set()


def vllm_spec(replicas: int, **arguments) -> RunSpec:
    rollout = {"engine": "vllm", "replicas": replicas, "engine_arguments": arguments}
    return RunSpec.model_validate({**SPEC, "rollout": {**SPEC["rollout"], **rollout}})


PARTS = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 8_000_000_000}


@pytest.mark.parametrize(
    ("gpus", "arguments"), [(("0",), PARTS), (("0", "1", "2"), {})], ids=["parts", "room"]
)
async def test_a_rollout_is_added_where_it_has_memory(tmp_path, gpus, arguments):
    forks = FakeForkServer(Running())
    async with TaskGroup() as tasks:
        launcher = launcher_of(tmp_path, tasks, forks, gpus=gpus)
        await launcher.start("run_a", vllm_spec(1, **arguments))
        await launcher.start("run_a", vllm_spec(2, **arguments))
        forks.process.ended.set()
    assert forks.started.keys() == {"trainer-0", "rollout-0", "rollout-1"}


async def test_a_rollout_next_to_one_with_all_memory_is_refused_before_it_starts(tmp_path):
    forks = FakeForkServer(Running())
    async with TaskGroup() as tasks:
        launcher = launcher_of(tmp_path, tasks, forks, gpus=("7",))
        await launcher.start("run_a", vllm_spec(1))
        for _ in range(2):
            with pytest.raises(FailedPreconditionError, match="GPU 7 with rollout-0") as targets:
                await launcher.start("run_a", vllm_spec(2))
        assert (
            "gpu_memory_utilization and rollout.engine_arguments.kv_cache" in targets.value.message
        )
        await launcher.start("run_a", vllm_spec(1))
        forks.process.ended.set()
    assert forks.started.keys() == {"trainer-0", "rollout-0"}


async def test_rollouts_that_were_planned_together_are_started_again(tmp_path):
    forks = FakeForkServer(Running())
    async with TaskGroup() as tasks:
        launcher = launcher_of(tmp_path, tasks, forks, gpus=("7",))
        await launcher.start("run_a", vllm_spec(2))
        del forks.started["rollout-1"]
        await launcher.end("run_a", "rollout-1")
        (tmp_path / "run_a" / "logs" / "rollout-1.process").unlink()
        await launcher.start("run_a", vllm_spec(2))
        forks.process.ended.set()
    assert "rollout-1" in forks.started


async def test_a_colocated_rollout_starts_with_the_trainer_and_waits_for_its_gpus(tmp_path):
    forks = FakeForkServer(Running())
    spec = RunSpec.model_validate({**SPEC, "topology": {"placement": "colocated"}})
    async with TaskGroup() as tasks:
        launcher = launcher_of(tmp_path, tasks, forks, gpus=("7",))
        await launcher.start("run_a", spec, later={"rollout-0": "trainer-0"})
        gate = Path(forks.started["rollout-0"][1]["SLIPSTREAM_ROLLOUT_GPUS_FREE_FILE"])
        assert [*gate.parent.glob("*.gpus-free")] == []
        await launcher.start("run_a", spec)
        assert gate in {*gate.parent.iterdir()}
        forks.process.ended.set()
    assert "SLIPSTREAM_TRAINER_GPUS_FREE_FILE" not in forks.started["trainer-0"][1]


async def test_workers_are_prometheus_targets_until_their_run_ends(tmp_path):
    forks, file = FakeForkServer(Exited()), tmp_path / "targets.json"
    async with TaskGroup() as tasks:
        launcher = launcher_of(tmp_path, tasks, forks, metric_targets=file)
        await launcher.start("run_a", RunSpec.model_validate(SPEC))
        targets = {entry["labels"]["pod"]: entry for entry in json.loads(file.read_text())}
        assert targets.keys() == {"trainer-0", "rollout-0", "rollout-1"}
        for worker_id, (module, environment) in forks.started.items():
            prefix = module.replace("services.", "slipstream_").upper()
            port = environment[f"{prefix}_METRICS_PORT"]
            assert targets[worker_id] == {
                "targets": [f"127.0.0.1:{port}"],
                "labels": {"run": "run_a", "pod": worker_id},
            }
        assert len({entry["targets"][0] for entry in targets.values()}) == 3
        for record in tmp_path.glob("run_a/logs/*.process"):
            record.unlink()  # it contains the id of the test's process, which stop() would signal
        await launcher_of(tmp_path, tasks, forks, metric_targets=file).stop("run_a")
        assert json.loads(file.read_text()) == []


@pytest.mark.parametrize("forks", [None, FakeForkServer()], ids=["none", "gave_up"])
async def test_a_worker_starts_without_the_fork_server(tmp_path, forks):
    (tmp_path / "worker.py").write_text("import os; print(os.environ['NAME']); raise SystemExit(3)")
    log = tmp_path / "worker.log"
    environment = {"PYTHONPATH": str(tmp_path), "NAME": "rollout-0"}
    async with TaskGroup() as tasks:
        launcher = launcher_of(tmp_path, tasks, forks)
        process = await launcher._start_process("worker", environment, log)
        assert isinstance(process, ChildProcess)
        assert await process.wait() == 3
    assert log.read_text() == "rollout-0\n"


async def test_the_ranks_that_were_started_end_with_a_start_that_fails(tmp_path):
    signals = []

    class Ranks(FakeForkServer):
        async def start(self, module, environment, log):
            if environment["RANK"] == "1":
                raise OSError("no room")
            return self.process

    process = Exited()
    process.send_signal = signals.append
    async with TaskGroup() as tasks:
        launcher = launcher_of(tmp_path, tasks, Ranks(process))
        with pytest.raises(OSError, match="no room"):
            await launcher._spawn("run_a", "trainer", "trainer-0", ranks=2, environment={})
    assert signals == [9]


async def test_what_is_started_is_written_down(tmp_path):
    async with TaskGroup() as tasks:
        spec = RunSpec.model_validate(SPEC)
        await launcher_of(tmp_path, tasks, FakeForkServer(Exited())).start("run_a", spec)
    (entry,) = json.loads((tmp_path / "run_a" / "logs" / "rollout-0.process").read_text())
    assert entry["pid"] == Exited.pid


def test_ranks_rendezvous_at_a_reserved_port():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    places = [process._places(2) for _ in range(20)]
    ports = [{rank["MASTER_PORT"] for rank in ranks} for ranks in places]
    assert all(len(worker_ports) == 1 for worker_ports in ports), (
        "all ranks of a worker meet at one"
    )
    assert max(int(port) for worker_ports in ports for port in worker_ports) < first


@pytest.mark.parametrize(
    ("gpus", "reproducible", "engine"),
    [
        (("0", "1", "2"), False, "torch"),
        (("0", "1", "2"), "batch_invariant", None),
        ((), False, None),
    ],
)
async def test_a_rollout_with_gpus_knows_its_engine_before_the_specification(
    tmp_path, gpus, reproducible, engine
):
    forks = FakeForkServer(Exited())
    rollout = {**SPEC["rollout"], "engine": "torch", "reproducible": reproducible}
    spec = RunSpec.model_validate({**SPEC, "rollout": rollout})
    async with TaskGroup() as tasks:
        await launcher_of(tmp_path, tasks, forks, gpus=gpus).start("run_a", spec)
    environments = {name: environment for name, (_, environment) in forks.started.items()}
    assert environments["rollout-0"].get("SLIPSTREAM_ROLLOUT_ENGINE") == engine
    assert "SLIPSTREAM_TRAINER_ENGINE" not in environments["trainer-0"]
