"""Trainer ranks with an FSDP2 policy send their rows to a decoding engine in a real session."""

import pytest

from tests.helpers.cli import run_module

pytestmark = pytest.mark.timeout(240)


@pytest.mark.nightly
@pytest.mark.parametrize("senders", ["ranks", "leader"])
def test_weights_of_two_ranks_arrive_bit_by_bit_and_pass_the_canary(senders):
    options = ("--smoke", "--trainers", "2", "--rollouts", "1", "--senders", senders)
    # The benchmark compares every live parameter with the trainer's.
    output = run_module("bench.weightsync.end_to_end", *options)
    figures = dict(pair.split() for pair in output.splitlines()[-1].split(", "))
    assert float(figures["tokens"]) > 0
