"""Quantized weights: exact where the format says so, and the same bits after each repetition."""

import pytest
import torch

from services.common.models.quantization import (
    BLOCK,
    base_bytes,
    dequantize,
    is_quantized,
    levels,
    quantize,
    quantized_bytes,
    rounded,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantized_weight_has_the_counted_bytes_and_its_shape(kind, dtype) -> None:
    weight = torch.randn(7, 13, generator=torch.Generator().manual_seed(0)).to(dtype)
    values, scales = quantize(weight, kind)
    held = values.nbytes + scales.nbytes
    assert held == quantized_bytes(weight.numel(), kind, item=dtype.itemsize)
    again = dequantize(values, scales, (7, 13))
    assert (again.shape, again.dtype) == (weight.shape, dtype)
    assert torch.equal(again, rounded(weight, kind))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_error_of_a_value_is_at_most_half_a_step_of_its_block(kind) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    largest = weight.view(-1, BLOCK).abs().amax(1, keepdim=True)
    step = 1 / 127 if kind == "int8" else levels(CPU).diff().max()
    error = (rounded(weight, kind) - weight).view(-1, BLOCK).abs()
    assert (error <= largest * step / 2 * 1.0001).all()
    assert error.max() > 0


def test_the_levels_of_nf4_are_kept_exactly() -> None:
    weight = levels(CPU).repeat(4) * 3.0
    assert torch.equal(rounded(weight, "nf4"), weight)


def test_nf4_packs_as_bitsandbytes_does() -> None:
    """The bytes are those of bitsandbytes 0.50.2 (``quantize_4bit``, blocks of 64)."""
    values, scales = quantize(torch.linspace(-1, 1, 64) ** 3 * 0.3, "nf4")
    packed = "001112223344455566666777777777777777777777788888999aabbccddeeeff"
    assert values.numpy().tobytes().hex() == packed
    assert scales.item() == pytest.approx(0.3)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_zeros_and_the_largest_value_of_a_block_are_kept(kind) -> None:
    weight = torch.zeros(2, BLOCK)
    weight[1, 5] = 0.37
    assert torch.equal(rounded(weight, kind), weight)


def test_matrices_of_decoder_layers_are_quantized_and_nothing_else() -> None:
    assert is_quantized("model.layers.0.mlp.up_proj.weight", (8, 4))
    assert not is_quantized("model.layers.0.input_layernorm.weight", (8,))
    assert not is_quantized("model.layers.0.self_attn.q_proj.bias", (8,))
    assert not is_quantized("model.embed_tokens.weight", (8, 4))
    assert not is_quantized("lm_head.weight", (8, 4))
    shapes = {"model.layers.0.mlp.up_proj.weight": (8, 64), "lm_head.weight": (8, 4)}
    assert base_bytes(shapes, None, item=2) == 2 * (512 + 32)
    assert base_bytes(shapes, "nf4", item=2) == 8 * (32 + 2) + 2 * 32
