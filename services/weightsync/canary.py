"""Canary: a short text that trainer and rollouts score under the same weight version. No torch.

Checksums prove that the bytes arrived; the canary shows that they are in the right tensors: a
swapped or missing tensor changes logprobs by whole units, rounding by much less than the tolerance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

CANARY_TOKENS = 24
# Max mean absolute differences: engines and trainer sum in different orders.
_TOLERANCE = {
    "float64": 1e-3,
    "float32": 1e-3,
    "bfloat16": 0.15,
    "float16": 0.05,
    # The text is unlikely, and rounding moves the logprobs of unlikely tokens most.
    "fp8": 1.0,
}


@dataclass(frozen=True, slots=True)
class Canary:
    """A text and the trainer's logprobs of it."""

    token_ids: tuple[int, ...]
    """Tokens of the text."""
    logprobs: tuple[float, ...]
    """Logprob of each token but the first, at temperature 1."""


def canary_text(vocab_size: int) -> tuple[int, ...]:
    """Returns a fixed text whose tokens are spread over the whole vocabulary."""
    return tuple(index * vocab_size // CANARY_TOKENS for index in range(CANARY_TOKENS))


def canary_tolerance(dtypes: Sequence[str]) -> float:
    """Returns the max. accepted mean difference of an engine that computes in these dtypes or ``fp8``."""
    return max(_TOLERANCE.get(dtype, 0.0) for dtype in dtypes)


def difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the mean absolute difference of two lists of logprobs; infinite if they are incomparable."""
    if len(first) != len(second) or not first:
        return math.inf
    mean = sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)
    return mean if math.isfinite(mean) else math.inf
