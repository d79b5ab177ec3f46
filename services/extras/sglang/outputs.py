"""Tokens in the outputs of SGLang, of an engine in this process and of a server alike. Does not import it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from services.extras.external_engine.request_segments import top_table
from services.rollout.engines.base import TopLogprobs


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
