"""Tests that a trainer with a GPU uses few CPU threads."""

from typing import Any

import pytest
import torch

from services.common.runspec.trainer import TrainerSpec
from services.trainer.engines.fsdp import parallel


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("cuda", {}, [1]),
        ("cuda", {"cpu_offload": "optimizer"}, [1]),
        ("cuda", {"cpu_offload": True}, []),
        ("cpu", {}, []),
    ],
)
def test_threads_are_kept_if_the_host_computes(
    monkeypatch: pytest.MonkeyPatch, device: str, settings: dict[str, Any], expected: list[int]
) -> None:
    thread_counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", thread_counts.append)
    monkeypatch.setattr(parallel, "join_processes", lambda **_: None)
    monkeypatch.setattr(parallel, "_meshes", _no_mesh)
    spec = TrainerSpec.model_validate(
        {"steps": 1, "prompts_per_step": 1, "dtype": "bfloat16", **settings}
    )
    with pytest.raises(_MeshError):
        parallel.build_topology(spec, device=torch.device(device), rank=0, world_size=1)
    assert thread_counts == expected, "set before a model is loaded, and compiled"


class _MeshError(Exception):
    pass


def _no_mesh(*_: Any) -> None:
    raise _MeshError
