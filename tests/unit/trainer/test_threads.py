"""Beside a GPU the trainer leaves the host's processors to others, unless it computes there."""

from typing import Any

import pytest
import torch

from services.common.spec.trainer import TrainerSpec
from services.trainer.model.parallel import use_few_threads


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("cuda", {}, [1]),
        ("cuda", {"cpu_offload": "optimizer"}, [1]),
        ("cuda", {"cpu_offload": True}, []),
        ("cpu", {}, []),
    ],
)
def test_threads_are_kept_where_the_host_computes(
    monkeypatch: pytest.MonkeyPatch, device: str, settings: dict[str, Any], expected: list[int]
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    spec = TrainerSpec.model_validate({"steps": 1, "prompts_per_step": 1, **settings})
    use_few_threads(spec, torch.device(device))
    assert asked == expected
