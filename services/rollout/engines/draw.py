"""Drawing tokens for a whole batch at once, each row with its own seed."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return the ``counters``-th number of each seed's random stream.

    The stream is a function of seed and counter alone (SplitMix64, Steele et al. 2014), so a row draws
    the same numbers whatever other rows are in the batch, and a resumed sample can go on anywhere.

    Args:
        seeds: ``[N]`` one seed per row.
        counters: ``[N]`` tokens that the row has drawn before.

    Returns:
        ``[N]`` in ``[0, 1)``, multiples of ``2**-52``.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GOLDEN) + (counters + np.uint64(1)) * _GOLDEN
        bits = _mix(state) >> np.uint64(12)
    return bits.astype(np.float64) * 2.0**-52


def draw_tokens(logits: Tensor, temperatures: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting its cumulative distribution.

    Args:
        logits: ``[N, V]`` of any float type.
        temperatures: ``[N]`` float32; 0 takes the likeliest token.
        numbers: ``[N]`` float64 in ``[0, 1)``, one per row.

    Returns:
        ``[N]`` int64 tokens and ``[N]`` float32 logprobs under ``log_softmax(logits / temperature)``;
        a greedy row's logprob is the one at temperature 1.
    """
    is_greedy = temperatures == 0
    scaled = logits.float() / torch.where(is_greedy, 1.0, temperatures)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    # A number is at most 1 - 2**-52, so the target stays below the total and the first entry above it
    # is a token of positive probability.
    targets = (numbers * cumulative[:, -1])[:, None]
    drawn = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    tokens = torch.where(is_greedy, scaled.argmax(dim=-1), drawn)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64 bits."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))
