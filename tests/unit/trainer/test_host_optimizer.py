"""Tests that an optimizer with moments in host memory makes bit-identical updates."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from services.extras.optimizers import eight_bit
from services.extras.optimizers.eight_bit import AdamW8bit
from services.extras.optimizers.host import HostAdamW, HostAdamW8bit
from services.wire.step_command import StepCommand
from tests.helpers.batches import policy_of, random_queue, rank_of, spec_of


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (5,), (64, 3), (1,), (9, 2)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def _check_updates(
    usual: torch.optim.Optimizer,
    host: torch.optim.Optimizer,
    first: list[nn.Parameter],
    other: list[nn.Parameter],
) -> None:
    """Checks that four updates by two optimizers give equal parameters."""
    for update in range(4):
        for number, (a, b) in enumerate(zip(first, other, strict=True)):
            a.grad = b.grad = None
            if number != update:  # each update leaves one parameter without a gradient
                a.grad = torch.sin(a.detach() * (update + 1))
                b.grad = a.grad.clone()
        usual.step()
        host.step()
    for a, b in zip(first, other, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("part_bytes", [1, 300, 1 << 20])
def test_parts_of_any_size_update_as_one(part_bytes: int) -> None:
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    first, other = _parameters(), _parameters()
    groups = [{"params": other[:3]}, {"params": other[3:]}]
    usual = torch.optim.AdamW(first, fused=True, **options)
    host = HostAdamW(groups, part_bytes=part_bytes, **options)
    _check_updates(usual, host, first, other)
    for a, b in zip(first, other, strict=True):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(usual.state[a][name], host.state[b][name])


@pytest.mark.parametrize("part_values", [1, 5000, 1 << 24])
def test_moments_in_8_bits_update_in_host_memory_as_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, part_values: int
) -> None:
    monkeypatch.setattr(eight_bit, "_PART_VALUES", part_values)
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 128), (3, 20, 256), (7, 5), (9,)]
    first = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    other = [nn.Parameter(weight.detach().clone()) for weight in first]
    usual = AdamW8bit([{"params": first[:2]}, {"params": first[2:]}], **options)
    host = HostAdamW8bit([{"params": other[:2]}, {"params": other[2:]}], **options)
    _check_updates(usual, host, first, other)
    for a, b in zip(first, other, strict=True):
        assert usual.state[a].keys() == host.state[b].keys()
        assert all(torch.equal(usual.state[a][name], host.state[b][name]) for name in host.state[b])


def test_an_update_without_gradients_does_nothing() -> None:
    parameters = _parameters()
    HostAdamW([{"params": parameters}], lr=1.0).step()
    assert all(map(torch.equal, parameters, _parameters()))


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_a_checkpoint_loads_with_moments_on_host_or_device(tmp_path: Path, kind: str) -> None:
    rate = {"optimizer": {"learning_rate": 1e-2, "kind": kind}}
    weights = []
    for offload in (False, "optimizer"):
        spec = spec_of(trainer={"cpu_offload": offload, **rate})
        queue = random_queue(policy_of(spec))
        root = tmp_path / str(offload)
        rank = rank_of(spec, policy_of(spec), queue, root=root)
        rank.train(StepCommand(1, queue.meta))
        rank.checkpointer.write(rank.snapshot(1))
        policy = policy_of(spec, seed=1)
        resumed = rank_of(spec, policy, queue, root=root)
        assert resumed.restore() == 1
        resumed.train(StepCommand(2, queue.meta))
        weights.append(list(policy.parameters()))
    assert all(map(torch.equal, *weights))
