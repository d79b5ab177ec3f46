"""How long responses are: measured, or of a shape that is assumed."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from statistics import NormalDist
from typing import Protocol

from services.controller.rules.statistics import least_of

_MOST_SIGMA = 5.0


class Lengths(Protocol):
    """A distribution of response lengths, in tokens."""

    def draws(self, rng: Random) -> Iterator[int]:
        """Tokens of one response after the other, from 1, for ever."""
        ...

    def mean(self) -> float:
        """Tokens of a response on average."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometric:
    """Every token ends the response with the same chance."""

    mean_tokens: float
    """Before the cut."""
    max_tokens: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean_tokens) and self.mean_tokens > 1 and self.max_tokens >= 1):
            raise ValueError(
                f"lengths: mean_tokens must be above 1 and max_tokens at least 1, but they are "
                f"{self.mean_tokens} and {self.max_tokens}"
            )

    def draws(self, rng: Random) -> Iterator[int]:
        """Tokens of one response after the other, for ever."""
        per_token = math.log1p(-1 / self.mean_tokens)
        while True:
            yield min(1 + int(math.log1p(-rng.random()) / per_token), self.max_tokens)

    def mean(self) -> float:
        """Of those that are cut as well."""
        return self.mean_tokens * (1 - (1 - 1 / self.mean_tokens) ** self.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Most responses are short, a few are very long."""

    median_tokens: float
    sigma: float
    """Spread of the logarithm; 1.0 makes one in a hundred ten times as long as the median."""
    max_tokens: int

    def __post_init__(self) -> None:
        if not (
            math.isfinite(self.median_tokens)
            and self.median_tokens >= 1
            and 0 <= self.sigma <= _MOST_SIGMA
            and self.max_tokens >= 1
        ):
            raise ValueError(
                f"lengths: median_tokens and max_tokens must be at least 1 and sigma from 0 to "
                f"{_MOST_SIGMA}, but they are {self.median_tokens}, {self.max_tokens} and {self.sigma}"
            )

    def draws(self, rng: Random) -> Iterator[int]:
        """Tokens of one response after the other, for ever."""
        middle = math.log(self.median_tokens)
        while True:
            drawn = round(math.exp(rng.gauss(middle, self.sigma)))
            yield min(max(1, drawn), self.max_tokens)

    def mean(self) -> float:
        """Of those that are cut as well."""
        normal, middle = NormalDist(), math.log(self.median_tokens)
        if self.sigma == 0:
            return min(self.median_tokens, self.max_tokens)
        cut = (math.log(self.max_tokens) - middle) / self.sigma
        below = math.exp(middle + self.sigma**2 / 2) * normal.cdf(cut - self.sigma)
        return below + self.max_tokens * (1 - normal.cdf(cut))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Counts by bucket, spread evenly inside each, or around its mean."""

    bounds: tuple[int, ...]
    """Longest response of each bucket, in order."""
    counts: tuple[int, ...]
    """Responses in each."""
    lowest: tuple[int, ...] = ()
    """Shortest response of each; empty where each begins behind the one before."""
    lean: float = 0.5
    """Where the mean of each lies, from 0, its shortest response, to 1, its longest."""

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
                "lengths: expected rising bounds from 0, as many counts, none negative and not all 0, but "
                f"got bounds {self.bounds} and counts {self.counts}"
            )

    @classmethod
    def of(cls, histogram: Mapping[int, int]) -> "Measured":
        """From counts by upper bound."""
        bounds = tuple(sorted(histogram))
        return cls(bounds=bounds, counts=tuple(histogram[bound] for bound in bounds))

    @classmethod
    def of_run(cls, histogram: Mapping[int, int], *, mean_tokens: float) -> "Measured":
        """From counts by upper bound, as runs have them, and the mean of all responses."""
        found = replace(cls.of(histogram), lowest=tuple(map(least_of, sorted(histogram))))
        least, most = (replace(found, lean=lean).mean() for lean in (0.0, 1.0))
        # Beyond them it is of something else: a run's sequences, where its samples are several.
        if not least <= mean_tokens <= most or least == most:
            return found
        return replace(found, lean=(mean_tokens - least) / (most - least))

    def draws(self, rng: Random) -> Iterator[int]:
        """Tokens of one response after the other, for ever."""
        upto, buckets = list(accumulate(self.counts)), list(self._buckets())
        while True:
            low, high = buckets[bisect_right(upto, rng.random() * upto[-1])]
            width = 2 * min(self.lean, 1 - self.lean) * (high - low)
            first = low if self.lean <= 0.5 else high - width
            # The second number rounds, up as often as the fraction says.
            yield int(first + rng.random() * width + rng.random())

    def mean(self) -> float:
        """Of all."""
        means = (low + self.lean * (high - low) for low, high in self._buckets())
        total = sum(m * count for m, count in zip(means, self.counts, strict=True))
        return total / sum(self.counts)

    def _buckets(self) -> Iterator[tuple[int, int]]:
        """Shortest and longest response of each."""
        behind = (0, *self.bounds)
        lowest = self.lowest or (below + 1 for below in behind)
        for low, bound in zip(lowest, self.bounds, strict=False):
            yield max(1, min(low, bound)), max(1, bound)
