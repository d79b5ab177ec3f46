"""Drawing tokens for a whole batch at once, each row with its own seed."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Which tokens may be drawn, for each row: ``[N]`` float32 tensors, and ``[N]`` int64 ``top_k``."""

    top_p: Tensor
    """Probability that the allowed tokens have together, at least; 1 allows all."""
    top_k: Tensor
    """Number of allowed tokens; 0 allows all."""
    min_p: Tensor
    """Least probability of an allowed token, as part of the likeliest one's; 0 allows all."""

    def padded(self, size: int) -> "Truncation":
        """Add rows where all tokens are allowed."""
        missing = (0, size - len(self.top_p))
        return Truncation(
            top_p=pad(self.top_p, missing, value=1.0),
            top_k=pad(self.top_k, missing),
            min_p=pad(self.min_p, missing),
        )


def draw_tokens(
    logits: Tensor, temperatures: Tensor, numbers: Tensor, *, truncation: Truncation | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting its cumulative distribution.

    Args:
        logits: ``[N, V]`` of any float type.
        temperatures: ``[N]`` float32; 0 takes the likeliest token.
        numbers: ``[N]`` float64 in ``[0, 1)``, one per row.
        truncation: Which tokens may be drawn; None allows all. Logprobs do not depend on it.

    Returns:
        ``[N]`` int64 tokens and ``[N]`` float32 logprobs under ``log_softmax(logits / temperature)``;
        a greedy row's logprob is the one at temperature 1.
    """
    is_greedy = temperatures == 0
    scaled = logits.float() / torch.where(is_greedy, 1.0, temperatures)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    probabilities = logprobs.exp()
    if truncation is not None:
        probabilities = _truncate(probabilities, truncation)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    # A number is at most 1 - 2**-52, so the target stays below the total and the first entry above it
    # is a token of positive probability.
    targets = (numbers * cumulative[:, -1])[:, None]
    drawn = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    tokens = torch.where(is_greedy, scaled.argmax(dim=-1), drawn)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def _truncate(probabilities: Tensor, truncation: Truncation) -> Tensor:
    """Set the probabilities of tokens that may not be drawn to 0; the likeliest always may."""
    ordered, places = probabilities.sort(dim=-1, descending=True)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    before = ordered.cumsum(dim=-1) - ordered
    top_k = torch.where(truncation.top_k == 0, ordered.shape[1], truncation.top_k)
    allowed = (rank < top_k[:, None]) & (before < truncation.top_p[:, None])
    allowed &= ordered >= truncation.min_p[:, None] * ordered[:, :1]
    allowed[:, 0] = True
    return torch.zeros_like(ordered).scatter(1, places, ordered * allowed)


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64 bits."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))
