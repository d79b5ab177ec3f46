"""Weights of a frozen base model in 4 or 8 bits, in blocks with a scale each; blocks of moments in 8 bits.

Quantizing and dequantizing give the same bits on every device: each value results from one division, or from
products alone. So trainer, rollouts and exports agree on the base without sending it.

``nf4`` is the 4-bit type of QLoRA (arXiv:2305.14314, appendix E), with the bytes of bitsandbytes; ``int8`` is
symmetric and linear. The operations are plain ones of torch: other kernels do not promise equal bits on a CPU
and on a GPU.

Weights that an engine serves in FP8 are rounded by :func:`fp8_rounded`: one scale per matrix, or per block of
128 x 128 values.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Final, Literal

import torch
from torch import Tensor

BaseDtype = Literal["int8", "nf4"]
Fp8 = Literal["fp8", "fp8_block"]
"""FP8 of an engine (``rollout.quantization``): a scale per matrix, or per block of weights."""
FP8_BLOCK: Final = 128
"""Rows and columns with a common scale in ``fp8_block``; also the consecutive inputs with one."""
_MAX_FP8: Final = 448.0
_MIN_SCALE: Final = 1e-12
BLOCK: Final = 64
"""Number of consecutive values with a common scale, the maximum of their magnitudes."""
_BITS: Final[Mapping[str, int]] = {"int8": 8, "nf4": 4}
_MAX_INT8: Final = 127
_LEVELS: Final = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Values of ``nf4``: quantiles of a normal distribution, relative to the scale."""


def is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Returns True for the weights that are quantized: matrices of decoder layers."""
    return len(shape) == 2 and ".layers." in name and name.endswith(".weight")


def quantized_bytes(count: int, kind: BaseDtype, *, item: int) -> int:
    """Returns the bytes of a quantized weight.

    Args:
        count: Number of its values.
        item: Bytes of a scale, which has the dtype of the original weight.
    """
    blocks = -(-count // BLOCK)
    return blocks * (BLOCK * _BITS[kind] // 8 + item)


def base_bytes(
    shapes: Mapping[str, tuple[int, ...]], kind: BaseDtype | None, *, item: int
) -> float:
    """Returns the bytes of a model's frozen weights of these shapes, quantized if ``kind`` is given."""
    return float(
        sum(
            item * prod(shape)
            if kind is None or not is_quantized(name, shape)
            else quantized_bytes(prod(shape), kind, item=item)
            for name, shape in shapes.items()
        )
    )


def largest_quantized(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Returns the number of values of the largest weight that is quantized."""
    return max(
        (prod(shape) for name, shape in shapes.items() if is_quantized(name, shape)), default=0
    )


def quantize(weight: Tensor, kind: BaseDtype) -> tuple[Tensor, Tensor]:
    """Quantizes a weight.

    Returns:
        ``[blocks, 64]`` int8, or for ``nf4`` ``[blocks, 32]`` uint8 with two values each, the first in
        the upper bits; and ``[blocks]`` scales in the weight's dtype.
    """
    flat = weight.detach().reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    divisors = torch.where(scales == 0, 1.0, scales.float())
    relative = blocks.float() / divisors[:, None]
    if kind == "int8":
        return (relative * _MAX_INT8).round_().to(torch.int8), scales
    steps = levels(weight.device)
    level_ids = torch.bucketize(relative, (steps[1:] + steps[:-1]) / 2, out_int32=True)
    upper, lower = level_ids.to(torch.uint8).view(-1, BLOCK // 2, 2).unbind(-1)
    return upper << 4 | lower, scales


def dequantize(values: Tensor, scales: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns the weight in the dtype of its scales.

    Args:
        values: First result of :func:`quantize`.
        scales: Second result.
    """
    return without_padding(unpack(values, scales, levels(values.device)), shape)


def unpack(values: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
    """Returns ``[blocks, 64]`` values in the dtype of the scales."""
    if values.dtype == torch.int8:
        relative = values.float() * (1.0 / _MAX_INT8)
    else:
        level_ids = torch.stack((values >> 4, values & 15), -1).int()
        relative = levels[level_ids].flatten(1)
    return (relative * scales.float()[:, None]).to(scales.dtype)


def without_padding(blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns the weight of this shape, whose values are the first ones of the blocks."""
    return blocks.view(-1)[: prod(shape)].view(shape)


def rounded(weight: Tensor, kind: BaseDtype) -> Tensor:
    """Returns the values of a weight after quantization."""
    return dequantize(*quantize(weight, kind), tuple(weight.shape))


def is_fp8(name: str, shape: tuple[int, ...], *, num_exact: int = 0) -> bool:
    """Returns True for the weights that an engine with FP8 weights rounds.

    These are matrices of decoder layers and of their experts, but not routers: a changed choice of experts
    costs more than FP8 saves in a router's product.

    Args:
        num_exact: Number of first layers that are not rounded.
    """
    _, _, inner = name.partition(".layers.")
    if not inner or name.endswith(".gate.weight"):
        return False
    if int(inner.partition(".")[0]) < num_exact:
        return False
    return is_quantized(name, shape) or (len(shape) == 3 and ".experts." in name)


def fp8_bytes(
    shapes: Mapping[str, tuple[int, ...]], kind: Fp8, *, item: int, num_exact: int = 0
) -> tuple[float, float]:
    """Returns the bytes of an engine's weights in FP8, and of its largest fused weight before rounding.

    Args:
        shapes: Shapes of all weights by name.
        item: Bytes of a value that is not in FP8.
        num_exact: As in :func:`is_fp8`.
    """
    total, largest = 0.0, 0.0
    for name, shape in shapes.items():
        count = prod(shape)
        if not is_fp8(name, shape, num_exact=num_exact):
            total += item * count
            continue
        matrices = prod(shape[:-2])
        blocks = prod(-(-size // FP8_BLOCK) for size in shape[-2:]) if kind == "fp8_block" else 1
        total += count + 4 * matrices * blocks
        # Engines fuse two matrices of the same inputs, except experts, which are fused already.
        largest = max(largest, float(item * count * (2 if matrices == 1 else 1)))
    return total, largest


def fp8_rounded(weight: Tensor, kind: Fp8) -> Tensor:
    """Returns the values of weights ``[..., out, in]`` after rounding to FP8 (E4M3), in their dtype.

    Each matrix of the last two dimensions has its own scales. Scales and products are float32.
    """
    if kind == "fp8":
        return _fp8_values(weight, weight.abs().amax((-2, -1), keepdim=True))
    rows, columns = weight.shape[-2:]
    padding = (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK)
    padded = torch.nn.functional.pad(weight, padding)
    blocks = padded.unflatten(-1, (-1, FP8_BLOCK)).unflatten(-3, (-1, FP8_BLOCK))
    values = _fp8_values(blocks, blocks.abs().amax((-3, -1), keepdim=True))
    return values.flatten(-4, -3).flatten(-2, -1)[..., :rows, :columns]


def fp8_rounded_inputs(inputs: Tensor, kind: Fp8) -> Tensor:
    """Returns inputs ``[..., in]`` of a product after rounding to FP8.

    Each token has its own scale, or with ``fp8_block`` one for each 128 consecutive values.
    """
    if kind == "fp8":
        return _fp8_values(inputs, inputs.abs().amax(-1, keepdim=True))
    size = inputs.shape[-1]
    groups = torch.nn.functional.pad(inputs, (0, -size % FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK))
    return _fp8_values(groups, groups.abs().amax(-1, keepdim=True)).flatten(-2)[..., :size]


def _fp8_values(values: Tensor, largest: Tensor) -> Tensor:
    scales = (largest.float() / _MAX_FP8).clamp(min=_MIN_SCALE)
    relative = (values.float() / scales).clamp(-_MAX_FP8, _MAX_FP8)
    return (relative.to(torch.float8_e4m3fn).float() * scales).to(values.dtype)


@lru_cache(maxsize=16)
def levels(device: torch.device) -> Tensor:
    """Returns the ``[16]`` float32 levels of ``nf4``."""
    return torch.tensor(_LEVELS, dtype=torch.float32, device=device)
