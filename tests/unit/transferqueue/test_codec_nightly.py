"""The decoder against a million inputs."""

import random

import pytest

from bench.dataplane.fuzz import one_input
from services.transferqueue.transport import codec


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_million_inputs_are_refused_or_understood() -> None:
    rng = random.Random(1)
    for _ in range(1_000_000):
        try:
            codec.decode(one_input(rng))
        except ValueError:
            continue
