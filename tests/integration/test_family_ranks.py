"""Tensor-parallel ranks compute the logprobs and gradients of one rank for each family."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from services.common.models.families import FAMILIES
from services.common.models.loading import build_model
from services.common.runspec.trainer import TrainerSpec
from services.trainer.batch.packing import pack
from services.trainer.engines.fsdp.parallel import build_topology, distribute
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged
from tests.helpers.mixtures import tiny_config
from tests.helpers.ranks import run_ranks

_CPU = torch.device("cpu")
_DIVIDED = [name for name, family in FAMILIES.items() if family.tensor_parallel]


@pytest.mark.timeout(300)
def test_divided_layers_of_every_family_are_exact(tmp_path: Path) -> None:
    run_ranks(_compare, str(tmp_path / "store"), count=2)


def _compare(rank: int, store: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    spec = TrainerSpec(steps=1, prompts_per_step=1, world_size=2, tensor_parallel=2)
    topology = build_topology(spec, device=_CPU, rank=rank, world_size=2)
    for name in _DIVIDED:
        expected, own_gradients = _run(_policy(name))
        divided = _policy(name)
        distribute(divided, spec, topology)
        actual, gradients = _run(divided)
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
        for key, value in own_gradients.items():
            error = (gradients[key] - value).norm() / value.norm().clamp(min=1e-6)
            assert error <= 1e-5, f"{name}: gradient of {key} differs by {error}"
    distributed.destroy_process_group()


def _policy(name: str) -> Policy:
    config = tiny_config(name, sliding_window=6, initializer_range=0.02)
    return Policy(build_model(config, dtype=torch.float32, device=_CPU, seed=3), temperature=1.0)


def _run(policy: Policy) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 61, (size,), generator=generator) for size in (3, 5)]
    responses = [torch.randint(3, 61, (size,), generator=generator) for size in (11, 4)]
    packed = pack(Jagged.from_list(prompts), Jagged.from_list(responses), device=_CPU)
    logprobs, _ = policy(packed)
    logprobs.square().sum().backward()
    return logprobs.detach(), {
        name: _whole(parameter.grad) for name, parameter in policy.named_parameters()
    }


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
