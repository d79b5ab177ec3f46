"""Transfers of weights from a trainer to a rollout within one GPU, which arrive bit by bit."""

import json
from pathlib import Path

import pytest
import torch

from services.weightsync import shared_buffers
from services.weightsync.shared_buffers import CudaMemoryError, open_handle
from tests.helpers.cli import run_module
from tests.helpers.forks import PROCESSES
from tests.helpers.gpu_runs import train_on_gpus, use_one_gpu
from tests.helpers.weight_session import session_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
]


def test_a_shared_buffer_on_a_gpu_is_the_same_memory_in_another_process() -> None:
    device = torch.device("cuda", 0)
    buffer = shared_buffers.export_buffer(1 << 24, device)
    buffer.memory.fill_(7)
    torch.cuda.synchronize()
    process = PROCESSES.Process(target=_write, args=(buffer.handle,))
    process.start()
    process.join(300)
    assert process.exitcode == 0
    assert buffer.memory.eq(8).all()


def _write(handle: str) -> None:
    memory = shared_buffers.open_buffer(handle, torch.device("cuda", 0))
    assert memory.eq(7).all()
    memory.fill_(8)
    torch.cuda.synchronize()


def test_a_handle_of_nothing_is_refused() -> None:
    with pytest.raises(CudaMemoryError, match="cuIpcOpenMemHandle"):
        open_handle(bytes(64), 1 << 20, torch.device("cuda", 0))


def test_three_gigabytes_arrive_bit_by_bit_and_sooner_than_through_host_memory() -> None:
    output = run_module("bench.weightsync.shared", "--rounds", "5")
    print(output)
    ((_, figures),) = json.loads(output[output.index("{") :]).items()
    assert figures["by handle"]["gb"] > 3
    assert figures["by handle"]["total_ms"] < figures["host memory, by sockets"]["total_ms"] / 3


async def test_a_session_of_one_gpu_continues_without_a_killed_member() -> None:
    options = {"num_bytes": 1 << 30, "use_gpu": True, "devices": [0, 0, 0]}
    async with session_of("trainer", "rollout-0", "rollout-1", **options) as (session, members, _):
        assert session._backend == "handle"
        await session.publish(lambda: 0)
        assert len({await members[name].serves() for name in ("rollout-0", "rollout-1")}) == 1
        members["rollout-0"].process.kill()
        report = await session.publish(lambda: 1)
        assert report.lost == ("rollout-0",)
        assert await members["rollout-1"].serves_version(1)
        print(f"{report.num_bytes / 1e9:.2f} GB in {report.transfer_s * 1000:.1f} ms")


@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_a_run_on_one_gpu_takes_weights_by_handle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, placement: str
) -> None:
    use_one_gpu(monkeypatch)
    settings = (f"topology.placement={placement}", "trainer.steps=4")
    train_on_gpus(tmp_path, engine, *settings, timeout=800)
    (log,) = (tmp_path / "runs").glob("*/logs/trainer-0.log")
    formed = [line for line in log.read_text().splitlines() if "weight group formed" in line]
    assert formed
    assert all("backend=handle" in line for line in formed)
    (metrics,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    print(engine, placement, "sync", [round(step["sync_ms"], 1) for step in steps])
