"""Optimizers over two ranks update like one rank, and one rank resumes from their checkpoint."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from services.trainer.engines.fsdp.checkpoint import ModelCheckpoint
from services.trainer.engines.fsdp.optim import build_optimizer
from tests.helpers.optimizers import (
    EIGHT_BITS,
    MUON,
    Matrices,
    update,
    updated,
    values_of,
    whole_model,
)
from tests.helpers.ranks import run_ranks

MODELS = {"muon": (whole_model, MUON), "adamw_8bit": (Matrices, EIGHT_BITS)}


def _sharded(rank: int, world_size: int, folder: str, kind: str) -> None:
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    make, spec = MODELS[kind]
    model = make()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = build_optimizer(model, spec)
    topology: Any = SimpleNamespace(rank=rank, world_size=world_size)
    checkpoint = ModelCheckpoint(model, optimizer, topology=topology)
    update(model, make(), optimizer, range(2))
    checkpoint.save().write(Path(folder) / "checkpoint")
    update(model, make(), optimizer, [2])
    values = values_of(model)
    if rank == 0:
        torch.save(values, f"{folder}/found.pt")
    distributed.destroy_process_group()


@pytest.mark.parametrize("kind", MODELS)
def test_updates_on_two_ranks_are_those_on_one(tmp_path: Path, kind: str) -> None:
    run_ranks(_sharded, 2, str(tmp_path), kind, count=2)
    content = torch.load(tmp_path / "found.pt", weights_only=True)
    make, spec = MODELS[kind]
    for name, value in updated(make(), make(), spec).items():
        torch.testing.assert_close(content[name], value, atol=1e-7, rtol=0, msg=name)

    resumed = make()
    optimizer = build_optimizer(resumed, spec)
    topology: Any = SimpleNamespace(rank=0, world_size=1)
    checkpoint = ModelCheckpoint(resumed, optimizer, topology=topology)
    checkpoint.load(tmp_path / "checkpoint", num_updates=2)
    update(resumed, make(), optimizer, [2])
    for name, value in values_of(resumed).items():
        torch.testing.assert_close(value, content[name], atol=1e-7, rtol=0, msg=name)
