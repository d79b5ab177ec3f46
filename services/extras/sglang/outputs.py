"""Tokens in the outputs of SGLang, of an engine in this process and of a server alike. Does not import it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from services.extras.external_engine.request_segments import encoded_masks, top_table
from services.rollout.engines.base import EngineDiedError, SamplingMask, TopLogprobs


def new_tokens(
    info: Mapping[str, Any], num_earlier: int, num_top: int
) -> tuple[list[int], list[float], TopLogprobs | None]:
    """Returns tokens, their log probabilities and the most likely tokens in their place.

    Args:
        info: ``meta_info`` of an output; one that was aborted before it began lacks most fields.
        num_earlier: Number of its tokens to leave out.
        num_top: Number of most likely tokens that the request asked for.

    Raises:
        LookupError: If it is malformed, or TypeError or ValueError.
    """
    entries = (info.get("output_token_logprobs") or ())[num_earlier:]
    top = None
    if num_top and entries:
        rows = info["output_top_logprobs"][num_earlier:]
        logprobs = np.array([[entry[0] for entry in row] for row in rows], np.float64)
        ids = np.array([[entry[1] for entry in row] for row in rows])
        top = top_table(ids, logprobs, num_top)
    return [int(entry[1]) for entry in entries], [float(entry[0]) for entry in entries], top


def new_masks(
    info: Mapping[str, Any], num_earlier: int, num_tokens: int
) -> tuple[SamplingMask, list[float]]:
    """Returns the tokens that could be drawn for each new token, and its log probability among them.

    Args:
        info: ``meta_info`` of an output of a request with ``return_sampling_mask``.
        num_earlier: Number of its tokens to leave out.
        num_tokens: Number of new tokens.

    Raises:
        EngineDiedError: If a token has no mask.
    """
    end = num_earlier + num_tokens
    masks = info.get("output_token_sampling_mask", [])[num_earlier:end]
    logprobs = info.get("output_token_sampling_logprobs", [])[num_earlier:end]
    if len(masks) < num_tokens or not all(masks):
        raise EngineDiedError(
            f"SGLang reported {len(masks)} sampling masks for {num_tokens} tokens; upgrade it, or "
            "set rollout.sampling.top_p to 1 and top_k to 0"
        )
    starts = np.cumsum([0, *map(len, masks[:-1])])
    ids = np.concatenate([np.asarray(mask, np.int32) for mask in masks])
    return encoded_masks(ids, starts), [float(logprob) for logprob in logprobs]


def top_of_masks(
    top: TopLogprobs, mask: SamplingMask, shifts: Sequence[float], num_top: int
) -> TopLogprobs:
    """Returns the most likely tokens in the distribution of the masks.

    Args:
        top: ``[n, K + 1, 2]`` most likely tokens in the distribution of the whole vocabulary.
        mask: ``[S]`` tokens that could be drawn for each of the ``n`` tokens.
        shifts: Difference of each token's log probability in the two distributions.
        num_top: Max number ``K`` of tokens.
    """
    ids, logprobs = top[:, :-1, 0].astype(np.int64), top[:, :-1, 1].astype(np.float64)
    for row, support in enumerate(np.split(mask, np.flatnonzero(mask < 0)[1:])):
        can_be_drawn = np.isin(ids[row], np.where(support < 0, ~support, support))
        logprobs[row] = np.where(can_be_drawn, logprobs[row] + shifts[row], -np.inf)
    return top_table(ids, logprobs, num_top)
