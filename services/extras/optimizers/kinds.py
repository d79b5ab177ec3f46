"""Optimizers besides AdamW, as specifications, memory plans and the trainer read them. Imports no torch."""

from collections.abc import Mapping
from math import prod
from typing import Final

from services.common.runspec.trainer import OptimizerKind

PART_BYTES: Final = 1 << 27
"""Max bytes of float32 moments that exist at once during an update with moments in 8 bits."""
_MAX_MOMENTS, _MIN_MOMENTS = 256, 64
"""Largest and smallest block of moments."""
_MIN_QUANTIZED: Final = 4096
"""Min values of a parameter whose moments are quantized."""


def block_of_moments(shape: tuple[int, ...]) -> int | None:
    """Returns the number of consecutive moments with a common scale: the largest divisor of a row up to 256.

    Returns None if the moments of a parameter of this shape stay in float32: for vectors, few values, or rows
    that only a small number divides.
    """
    if len(shape) < 2 or prod(shape) < _MIN_QUANTIZED:
        return None
    sizes = range(_MAX_MOMENTS, _MIN_MOMENTS - 1, -1)
    return next((size for size in sizes if shape[-1] % size == 0), None)


def moment_bytes(shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Returns the bytes of AdamW's two moments in 8 bits, for parameters of these shapes."""
    total = 0.0
    for shape in shapes.values():
        block = block_of_moments(shape)
        total += 2 * prod(shape) * (4.0 if block is None else 1.0 + 4.0 / block)
    return total


ADAMW_8BIT: Final = OptimizerKind(
    make="services.extras.optimizers.eight_bit:AdamW8bit",
    state_bytes="services.extras.optimizers.kinds:moment_bytes",
    # Up to two parts of float32 moments, and as much again to quantize one of them.
    working_bytes=4.0 * PART_BYTES,
)
MUON: Final = OptimizerKind(
    make="services.extras.optimizers.muon:MuonWithAdamW",
    options=("momentum",),
    marks_matrices=True,
)
