"""Distributions of response lengths: measured histograms and assumed shapes."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from statistics import NormalDist
from typing import Protocol

from services.controller.rules.statistics import lower_bound_of

_MAX_SIGMA = 5.0


class Lengths(Protocol):
    """Distribution of response lengths, in tokens."""

    def draws(self, rng: Random) -> Iterator[int]:
        """Yields random response lengths of at least 1 token, without end."""
        ...

    def mean(self) -> float:
        """Returns the mean number of tokens of a response."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometric:
    """Geometric distribution: every token ends the response with the same probability."""

    mean_tokens: float
    """Mean before truncation."""
    max_tokens: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean_tokens) and self.mean_tokens > 1 and self.max_tokens >= 1):
            raise ValueError(
                f"lengths: mean_tokens must be above 1 and max_tokens at least 1, got {self.mean_tokens} "
                f"and {self.max_tokens}"
            )

    def draws(self, rng: Random) -> Iterator[int]:
        """Yields random response lengths, without end."""
        per_token = math.log1p(-1 / self.mean_tokens)
        while True:
            yield min(1 + int(math.log1p(-rng.random()) / per_token), self.max_tokens)

    def mean(self) -> float:
        """Returns the mean number of tokens, after truncation."""
        return self.mean_tokens * (1 - (1 - 1 / self.mean_tokens) ** self.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Log-normal distribution: most responses are short, a few are very long."""

    median_tokens: float
    sigma: float
    """Standard deviation of the logarithm; with 1.0, one in a hundred is ten times as long as the
    median."""
    max_tokens: int

    def __post_init__(self) -> None:
        if not (
            math.isfinite(self.median_tokens)
            and self.median_tokens >= 1
            and 0 <= self.sigma <= _MAX_SIGMA
            and self.max_tokens >= 1
        ):
            raise ValueError(
                f"lengths: median_tokens and max_tokens must be at least 1 and sigma from 0 to "
                f"{_MAX_SIGMA}, got {self.median_tokens}, {self.max_tokens} and {self.sigma}"
            )

    def draws(self, rng: Random) -> Iterator[int]:
        """Yields random response lengths, without end."""
        middle = math.log(self.median_tokens)
        while True:
            drawn = round(math.exp(rng.gauss(middle, self.sigma)))
            yield min(max(1, drawn), self.max_tokens)

    def mean(self) -> float:
        """Returns the mean number of tokens, after truncation."""
        normal, middle = NormalDist(), math.log(self.median_tokens)
        if self.sigma == 0:
            return min(self.median_tokens, self.max_tokens)
        cut = (math.log(self.max_tokens) - middle) / self.sigma
        below = math.exp(middle + self.sigma**2 / 2) * normal.cdf(cut - self.sigma)
        return below + self.max_tokens * (1 - normal.cdf(cut))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Histogram of lengths, uniform inside each bucket or around its mean."""

    bounds: tuple[int, ...]
    """Max length in each bucket, in ascending order."""
    counts: tuple[int, ...]
    """Responses in each bucket."""
    lowest: tuple[int, ...] = ()
    """Min length in each bucket; empty if each begins after the previous one."""
    lean: float = 0.5
    """Position of each bucket's mean, from 0 (its min length) to 1 (its max length)."""

    def __post_init__(self) -> None:
        is_rising = all(low < high for low, high in zip(self.bounds, self.bounds[1:], strict=False))
        if not (
            len(self.bounds) == len(self.counts)
            and is_rising
            and self.bounds
            and min(self.bounds) >= 0
            and min(self.counts) >= 0
            and sum(self.counts) > 0
        ):
            raise ValueError(
                "lengths: bounds must ascend from 0, with one count each, none negative and not all 0; got "
                f"bounds {self.bounds} and counts {self.counts}"
            )

    @classmethod
    def of(cls, histogram: Mapping[int, int]) -> "Measured":
        """Creates a histogram from counts by upper bound."""
        bounds = tuple(sorted(histogram))
        return cls(bounds=bounds, counts=tuple(histogram[bound] for bound in bounds))

    @classmethod
    def of_run(cls, histogram: Mapping[int, int], *, mean_tokens: float) -> "Measured":
        """Creates a histogram from a run's counts by upper bound and the mean of all responses."""
        found = replace(cls.of(histogram), lowest=tuple(map(lower_bound_of, sorted(histogram))))
        least, most = (replace(found, lean=lean).mean() for lean in (0.0, 1.0))
        # A mean outside this range describes something else: a run's sequences, if samples have
        # several.
        if not least <= mean_tokens <= most or least == most:
            return found
        return replace(found, lean=(mean_tokens - least) / (most - least))

    def draws(self, rng: Random) -> Iterator[int]:
        """Yields random response lengths, without end."""
        upto, buckets = list(accumulate(self.counts)), list(self._buckets())
        while True:
            low, high = buckets[bisect_right(upto, rng.random() * upto[-1])]
            width = 2 * min(self.lean, 1 - self.lean) * (high - low)
            first = low if self.lean <= 0.5 else high - width
            # The second random number rounds: up as often as the fraction requires.
            yield int(first + rng.random() * width + rng.random())

    def mean(self) -> float:
        """Returns the mean number of tokens."""
        means = (low + self.lean * (high - low) for low, high in self._buckets())
        total = sum(m * count for m, count in zip(means, self.counts, strict=True))
        return total / sum(self.counts)

    def _buckets(self) -> Iterator[tuple[int, int]]:
        """Yields the min and max length of each bucket."""
        behind = (0, *self.bounds)
        lowest = self.lowest or (below + 1 for below in behind)
        for low, bound in zip(lowest, self.bounds, strict=False):
            yield max(1, min(low, bound)), max(1, bound)
