"""Rewards that fail at a rate, in every way that a reward can, and rewards that hang."""

import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def earned(response: str) -> float:
    """Returns the earned score of a response: 1 for half of the responses, else 0.25; never 0."""
    return 1.0 if sum(response.encode()) % 2 else 0.25


def failing(
    prompt: str, response: str, answer: Any, row: Mapping[str, Any], *, rate: float
) -> float:
    """Fails at a rate, in every way that a reward can."""
    if random.random() >= rate:
        return earned(response)
    way = random.random()
    if way < 0.1:
        os._exit(1)  # noqa: TID251 -- a reward that ends its process
    if way < 0.4:
        return float("nan")
    if way < 0.6:
        return 7.0
    raise ConnectionError("the database of answers is down")


def sleeping(
    prompt: str, response: str, answer: Any, row: Mapping[str, Any], *, once: str
) -> float:
    """Sleeps forever on the first call."""
    try:
        Path(once).touch(exist_ok=False)
    except FileExistsError:
        return earned(response)
    while True:
        time.sleep(1000)
