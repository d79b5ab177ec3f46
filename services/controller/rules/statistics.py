"""Histograms and means of a step's samples. Pure."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable

Histogram = dict[str, int]
"""Number of samples by inclusive upper bound of their bucket; empty buckets are left out."""

PREFIX = "reward/"
"""Prefix of reward terms among a step's metrics."""
DECODE_TIMES = ("decode_fixed_s", "decode_sample_s", "decode_max_samples")
"""Metrics of decode times, which rollouts report and steps record: see ``services/rollout/monitor.py``."""


def histogram(values: Iterable[int]) -> Histogram:
    """Counts non-negative integers in buckets with bounds 0, 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    counts: Counter[int] = Counter()
    for value, count in Counter(values).items():
        counts[bound_of(value)] += count
    return {str(bound): counts[bound] for bound in sorted(counts)}


def lower_bound_of(bound: int) -> int:
    """Returns the smallest number in the bucket with the upper bound ``bound``."""
    if bound < 3:
        return bound
    is_power = bound & (bound - 1) == 0
    return (bound * 3 // 4 if is_power else bound * 2 // 3) + 1


def bound_of(value: int) -> int:
    """Returns the upper bound of a number's bucket."""
    if value < 3:
        return max(value, 0)
    power: int = 1 << (value - 1).bit_length()
    between = power * 3 // 4
    return between if value <= between else power


def term_means(terms: Iterable[str]) -> dict[str, float]:
    """Returns the mean of each term over the samples that have it.

    Args:
        terms: Tag ``terms`` of each sample: a JSON object of numbers.

    Returns:
        Means by ``reward/NAME``.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for text in terms:
        for name, value in json.loads(text).items():
            values[PREFIX + name].append(value)
    return {name: sum(found) / len(found) for name, found in sorted(values.items())}
