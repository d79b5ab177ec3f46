"""Means of rewards' named terms over samples. Pure."""

import json
from collections import defaultdict
from collections.abc import Iterable

PREFIX = "reward/"
"""Before the name of a term among a step's metrics."""


def term_means(terms: Iterable[str]) -> dict[str, float]:
    """Mean of each term over the samples that have it.

    Args:
        terms: The tag ``terms`` of each sample: a JSON object of numbers.

    Returns:
        ``reward/NAME`` by name of the term.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for text in terms:
        for name, value in json.loads(text).items():
            values[PREFIX + name].append(value)
    return {name: sum(found) / len(found) for name, found in sorted(values.items())}
