"""One rank of a host creates the base model; the others load it."""

from pathlib import Path

import pytest
import torch
from torch import distributed

from services.common.models.loading import load_folder
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec
from services.trainer.model.warm_start import base_folder
from tests.helpers.ranks import run_ranks

_CPU = torch.device("cpu")
_TASK = 'def pairs(count, seed):\n    return [("1=", "1")] * count\n'


@pytest.mark.parametrize("preset", ["qwen2-0.4m", "qwen3_moe-0.7m"])
def test_a_rank_that_is_not_the_first_makes_a_whole_model(tmp_path: Path, preset: str) -> None:
    (tmp_path / "task.py").write_text(_TASK)
    run_ranks(_make, str(tmp_path), preset, count=2)
    (weight_file,) = (tmp_path / "cache").glob("*/model.safetensors")
    load_folder(weight_file.parent, dtype=torch.float32, device=_CPU)


def _make(rank: int, folder: str, preset: str) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    if rank == 1:
        warm_start = {"examples": f"{folder}/task.py:pairs", "steps": 1}
        model = ModelSpec.model_validate(
            {"path": f"tiny:{preset}", "tokenizer": "chars:0123456789=", "warm_start": warm_start}
        )
        base_folder(
            model,
            load_tokenizer(model),
            seed=0,
            device=_CPU,
            cache=Path(folder) / "cache",
            progress=lambda activity: None,
        )
    distributed.barrier()
    distributed.destroy_process_group()
