"""Tests that every layout which the checks before a start accept is one whose ranks start."""

import random
from pathlib import Path

import pytest
import torch

from services.common.models.loading import build_model
from services.common.runspec.run import RunSpec
from tests.helpers.mixtures import tiny_config
from tests.helpers.random_layouts import accepted, random_options, start_ranks
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.timeout(600)

_PRESETS = (
    "tiny:qwen2-0.4m",
    "tiny:qwen3-0.4m",
    "tiny:qwen3_moe-0.7m",
    "tiny:qwen3_5-0.4m",
    "tiny:falcon_h1-0.5m",
)
_FAMILIES = {
    "llama": {"num_hidden_layers": 5},
    "qwen3_moe": {"num_experts": 6},
    "deepseek_v3": {"num_hidden_layers": 3},
    "gpt_oss": {},
    "qwen2_moe": {},
}
"""Families of models with a folder."""
_COUNT = 10
_BATCHES = [0, *(pytest.param(number, marks=pytest.mark.nightly) for number in range(1, 25))]


@pytest.mark.parametrize("batch", _BATCHES)
def test_ranks_of_every_accepted_layout_start(tmp_path: Path, batch: int) -> None:
    models = *_PRESETS, *_PRESETS[:3], *(_saved(tmp_path, family) for family in _FAMILIES)
    specs = []
    for number in range(_COUNT):
        source = random.Random(_COUNT * batch + number)
        spec = accepted(source, random_options(source, models), tmp_path)
        if spec is not None:
            specs.append(spec.model_dump_json())
    assert len(specs) > _COUNT / 2
    run_ranks(_start, specs, str(tmp_path), count=2)


def _saved(folder: Path, family: str) -> str:
    config = tiny_config(family, vocab_size=24, max_position_embeddings=4096, **_FAMILIES[family])
    build_model(config, dtype=torch.float32, device=torch.device("cpu")).save_pretrained(
        folder / family
    )
    return str(folder / family)


def _start(process: int, specs: list[str], folder: str) -> None:
    """Starts the first ranks of all layouts, or the last ones."""
    for document in specs:
        try:
            start_ranks(RunSpec.model_validate_json(document), Path(folder), is_first=process == 0)
        except Exception as error:
            raise AssertionError(f"an accepted layout does not start: {document}") from error
