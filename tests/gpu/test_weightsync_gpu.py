"""Checksums on a GPU match their definition, and models built there equal loaded ones, buffers included."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.common.models.loading import build_model, load_config, load_folder
from services.common.models.tokenizer import load_tokenizer
from services.extras.replay.recorder import start_digests
from services.weightsync.checksum import WORDS_PER_ROW, write_checksum, write_tensor_checksums
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


def _as_words(tensor: Tensor) -> Tensor:
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(-1).view(sizes[tensor.element_size()]).long()


def test_checksums_of_tensors_are_the_weighted_sums_of_their_elements() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(), (1,), (0,), (1_023,), (4_097,), (577, 1_531), (3_000, 2_000)]
    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.int64]
    tensors = [
        (1e3 * torch.randn(shape, device="cuda", generator=generator)).to(dtype)
        for shape in shapes
        for dtype in dtypes
    ]
    tensors += [tensors[-4].T, tensors[-3].view(-1)[1:], tensors[-4][:, ::3]]
    sums = torch.zeros(len(tensors), 2, dtype=torch.int64, device="cuda")
    write_tensor_checksums(tensors, sums)
    for tensor, checksum in zip(tensors, sums, strict=True):
        words = _as_words(tensor)
        positions = torch.arange(len(words), device="cuda")
        factors = 2 * (positions // WORDS_PER_ROW) + 1, 2 * (positions % WORDS_PER_ROW) + 1
        assert checksum.tolist() == [int((words * factor).sum()) for factor in factors]


def test_digests_are_of_the_weights_when_they_started() -> None:
    weights = torch.randn(64 << 20, device="cuda")
    expected = start_digests([("weights", weights.clone())])()
    finished = start_digests([("weights", weights)])
    weights.add_(1)
    assert finished() == expected
    assert start_digests([("weights", weights)])() != expected


def test_a_model_built_on_a_gpu_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    spec = spec_of(model={"path": "tiny:qwen2-3m"})
    config = load_config(spec.model, load_tokenizer(spec.model))
    built = build_model(config, dtype=torch.bfloat16, device="cuda")
    built.save_pretrained(tmp_path)
    loaded = load_folder(tmp_path, dtype=torch.bfloat16, device="cuda")
    for (name, buffer), (_, other_buffer) in zip(
        built.named_buffers(), loaded.named_buffers(), strict=True
    ):
        assert buffer.dtype == other_buffer.dtype == torch.float32
        assert torch.equal(buffer, other_buffer), name
    for (name, parameter), (_, other_parameter) in zip(
        built.named_parameters(), loaded.named_parameters(), strict=True
    ):
        assert torch.equal(parameter, other_parameter), name
