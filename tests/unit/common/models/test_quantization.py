"""Quantized weights: values that the format represents exactly, error bounds, and idempotence."""

import pytest
import torch

from services.common.models.quantization import (
    BLOCK,
    base_bytes,
    dequantize,
    fp8_rounded,
    fp8_rounded_inputs,
    is_fp8,
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
    num_bytes = values.nbytes + scales.nbytes
    assert num_bytes == quantized_bytes(weight.numel(), kind, item=dtype.itemsize)
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


@pytest.mark.parametrize("kind", ["fp8", "fp8_block"])
@pytest.mark.parametrize("shape", [(3, 5), (130, 257), (2, 130, 257)])
def test_fp8_rounds_to_four_significant_bits_of_a_scale(kind, shape) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rounded = fp8_rounded(weight, kind)
    assert rounded.shape == weight.shape
    error = (rounded - weight).abs()
    # The bound is half a step, relative to the value, or to the scale for subnormal values.
    scale = weight.abs().max() / 448
    assert (error <= weight.abs() / 16 + scale * 2**-9).all()
    assert torch.equal(fp8_rounded(rounded, kind), rounded)
    assert 0.01 < (error.norm() / weight.norm()) < 0.04


def test_fp8_scales_are_of_a_matrix_or_of_a_block() -> None:
    weight = torch.ones(256, 256) / 3
    weight[0, 0] = 1000.0
    whole, blocks = fp8_rounded(weight, "fp8"), fp8_rounded(weight, "fp8_block")
    assert whole[200, 200] != pytest.approx(1 / 3, rel=1e-4)
    assert blocks[200, 200] == pytest.approx(1 / 3, rel=1e-4)
    assert blocks[0, 0] == 1000.0
    experts = torch.stack([weight, torch.ones(256, 256) / 3])
    assert torch.equal(fp8_rounded(experts, "fp8")[0], whole)
    assert fp8_rounded(experts, "fp8")[1, 5, 5] == pytest.approx(1 / 3, rel=1e-4)


def test_fp8_inputs_have_a_scale_per_token_or_per_group() -> None:
    inputs = torch.ones(2, 3, 200) / 3
    inputs[0, 0, 0] = 1000.0
    tokens, groups = fp8_rounded_inputs(inputs, "fp8"), fp8_rounded_inputs(inputs, "fp8_block")
    assert tokens[1, 2, 0] == pytest.approx(1 / 3, rel=1e-4)
    assert tokens[0, 0, 150] != pytest.approx(1 / 3, rel=1e-4)
    assert groups[0, 0, 150] == pytest.approx(1 / 3, rel=1e-4)
    assert groups.shape == inputs.shape


def test_fp8_leaves_routers_norms_and_embeddings() -> None:
    layer = "model.layers.0"
    rounded_ones = {
        f"{layer}.self_attn.q_proj.weight": (4, 4),
        f"{layer}.mlp.experts.gate_up_proj": (2, 4, 4),
    }
    others = {
        f"{layer}.mlp.gate.weight": (2, 4),
        f"{layer}.input_layernorm.weight": (4,),
        f"{layer}.self_attn.q_proj.bias": (4,),
        "model.embed_tokens.weight": (8, 4),
        "lm_head.weight": (8, 4),
    }
    assert all(is_fp8(name, shape) for name, shape in rounded_ones.items())
    assert not any(is_fp8(name, shape) for name, shape in others.items())
    assert not any(is_fp8(name, shape, num_exact=1) for name, shape in rounded_ones.items())
    assert is_fp8("model.layers.10.self_attn.q_proj.weight", (4, 4), num_exact=2)
