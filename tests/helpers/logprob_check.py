"""Checks that the tokens of a run were sampled under the weights of their version."""

import json
from itertools import chain
from pathlib import Path

_KL_BY_STALENESS = "kl_rollout_by_staleness/"
_MAX_KL = 1e-6
"""Above rounding, and far below what the weights of another version cause."""


def check_logprobs(state: Path) -> dict[str, float]:
    """Checks the logprobs of tokens of the trainer's own version, of a run that has ended.

    Returns:
        Largest mean KL divergence of a step's tokens with the trainer's version, and with older ones.

    Raises:
        AssertionError: If tokens were sampled under other weights than those of their version, or no
            token had the trainer's version.
    """
    (path,) = state.glob("run_*/metrics.jsonl")
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    fresh: list[float] = []
    older = [0.0]
    for name, value in chain.from_iterable(step.items() for step in steps):
        if name.startswith(_KL_BY_STALENESS):
            (fresh if name == f"{_KL_BY_STALENESS}0" else older).append(value)
    assert fresh, "no token of the trainer's version was trained"
    assert all(value < _MAX_KL for value in fresh), fresh  # NaN is not below
    return {"kl_of_fresh_tokens": max(fresh), "kl_of_older_tokens": max(older)}
