"""On a GPU: checksums are what their definition says, and models have the same frequencies wherever built."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.common.models.loading import build_model, load_config, load_folder
from services.common.models.tokenizer import load_tokenizer
from services.weightsync.checksum import WORDS_PER_ROW, write_checksum
from tests.helpers.batches import spec_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _checksum(words: Tensor, *, alone: bool) -> Tensor:
    sums = torch.zeros(2, dtype=torch.int64, device="cuda")
    write_checksum(words.flatten().view(torch.uint8), sums, alone=alone)
    return sums


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 64, 1_001, 40_000])
def test_a_checksum_is_the_weighted_sums_of_its_words(num_rows: int, *, alone: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(num_rows)
    shape = (num_rows, WORDS_PER_ROW)
    words = torch.randint(
        -(2**63), 2**63 - 1, shape, dtype=torch.int64, device="cuda", generator=generator
    )
    row = torch.arange(num_rows, device="cuda")[:, None]
    column = torch.arange(WORDS_PER_ROW, device="cuda")
    expected = torch.stack([(words * (2 * row + 1)).sum(), (words * (2 * column + 1)).sum()])
    assert torch.equal(_checksum(words, alone=alone), expected)


def test_one_changed_bit_and_two_exchanged_words_change_a_checksum() -> None:
    words = torch.arange(9 * WORDS_PER_ROW, device="cuda").view(9, WORDS_PER_ROW)
    before = _checksum(words, alone=False)
    flipped = words.clone()
    flipped[8, -1] ^= 1
    assert (_checksum(flipped, alone=False) != before).all()
    exchanged = words.clone()
    exchanged[0, 5], exchanged[8, 5] = words[8, 5], words[0, 5]
    assert not torch.equal(_checksum(exchanged, alone=False), before)


def test_a_model_built_on_a_gpu_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    spec = spec_of(model={"path": "tiny:qwen2-3m"})
    config = load_config(spec.model, load_tokenizer(spec.model))
    built = build_model(config, dtype=torch.bfloat16, device="cuda")
    built.save_pretrained(tmp_path)
    loaded = load_folder(tmp_path, dtype=torch.bfloat16, device="cuda")
    for (name, one), (_, other) in zip(built.named_buffers(), loaded.named_buffers(), strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert torch.equal(one, other), name
    for (name, one), (_, other) in zip(
        built.named_parameters(), loaded.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
