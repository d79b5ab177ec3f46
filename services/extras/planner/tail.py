"""Bound on a run's speed by its longest responses and the max staleness: closed formulas.

A response that starts under version v trains at most ``max_staleness`` versions later, so it ends within
``max_staleness + 1`` steps. With T seconds a step, a decode step of d(n) seconds for n running samples of an
engine, and L tokens of the longest response that starts in a step, all as means over the steps::

    (max_staleness + 1) T >= L d(n)          the longest responses end in time
    T = tokens d(n) / (n engines)            Little's law: the engines decode the tokens of each step

Together, n <= (max_staleness + 1) tokens / (L engines), whatever d is. More slots than that many are occupied
only until the first batch waits for its oldest responses, and fewer make less of an engine. Steps take up to
a quarter longer than this bound, because one long response holds up all that started with it.
"""

from dataclasses import dataclass
from itertools import islice
from random import Random
from statistics import fmean

from services.extras.planner.inputs import Lengths, Rates, Setting

_MAX_DRAWS = 20_000
_MIN_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TailBound:
    """Rates that the longest responses and the max staleness allow."""

    longest_tokens: float
    """Mean tokens of the longest response of a step."""
    max_running: float
    """Max mean of an engine's running samples; its slots, if there are fewer."""
    step_s: float
    """Min seconds of a step."""


def tail_bound(rates: Rates, setting: Setting) -> TailBound:
    """Returns the bound of a setting. Deterministic for equal arguments."""
    num_steps = setting.max_staleness + 1
    longest = _longest(rates.lengths, setting.samples_per_step)
    tokens = setting.samples_per_step * rates.lengths.mean()
    max_running = min(
        float(setting.slots), max(1.0, num_steps * tokens / longest / setting.rollouts)
    )
    decode_s = rates.decode(round(max_running))
    return TailBound(
        longest_tokens=longest, max_running=max_running, step_s=longest * decode_s / num_steps
    )


def _longest(lengths: Lengths, count: int) -> float:
    """Returns the mean of the longest of ``count`` responses."""
    draws = lengths.draws(Random(0))  # noqa: S311 -- no secret
    rounds = max(_MIN_ROUNDS, _MAX_DRAWS // count)
    return fmean(max(islice(draws, count)) for _ in range(rounds))
