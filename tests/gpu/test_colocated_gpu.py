"""Colocated runs on one GPU: trainer and engine take turns, and each sleeps while the other works."""

import json
import math
from pathlib import Path

import pytest
import torch

from services.trainer.engines.fsdp.host_copy import OffloadedState
from tests.helpers.gpu_runs import train_on_gpus, use_one_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("engine", "max_staleness", "cache"),
    [("torch", 0, 0.0), ("torch", 1, 0.0), ("vllm", 0, 0.0), ("vllm", 1, 0.84), ("sglang", 1, 0.0)],
)
def test_a_run_trains_in_turns_on_one_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    max_staleness: int,
    cache: float,
) -> None:
    """With a large KV cache both sides release their memory; without it, the small model stays on the GPU."""
    use_one_gpu(monkeypatch)
    cache_bytes = int(cache * torch.cuda.get_device_properties(0).total_memory)
    settings = (
        *((f"rollout.engine_arguments.kv_cache_memory_bytes={cache_bytes}",) if cache else ()),
        "topology.placement=colocated",
        f"algorithm.max_staleness={max_staleness}",
        "trainer.steps=6",
        "trainer.checkpoint.every=3",
        "validation.every=3",
    )
    finished = train_on_gpus(tmp_path, engine, *settings, timeout=800)
    assert finished.summary["state"] == "SUCCEEDED"
    assert finished.summary["steps"] == 6
    assert finished.summary["staleness"]["max"] <= max_staleness
    (metrics,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    print(engine, max_staleness, [round(step["gpu_switch_s"], 3) for step in steps])
    for step in steps:
        assert {"rollouts_sleep_s", "trainer_wake_s", "gpu_switch_s"} <= step.keys()


def test_a_trainer_that_sleeps_leaves_the_gpu_and_trains_on_as_before() -> None:
    device = torch.device("cuda", 0)
    module = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)

    def step() -> float:
        torch.manual_seed(0)
        loss = module(torch.randn(16, 2048, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    step()
    expected = [p.detach().clone().cpu() for p in module.parameters()]
    state = OffloadedState([module], [optimizer], device=device)
    before = torch.cuda.memory_allocated(device)
    state.offload()
    # Workspaces of matrix products stay on the GPU.
    assert torch.cuda.memory_allocated(device) < before / 4
    read = [state.read(p) for p in module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(read, expected, strict=True))
    state.reload()
    assert all(torch.equal(p.cpu(), b) for p, b in zip(module.parameters(), expected, strict=True))
    assert math.isfinite(step())
