"""Trainer ranks with an FSDP2 policy send their own rows to a decoding engine, through the real session."""

import pytest

from bench.weightsync.end_to_end import measure, parse

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("senders", ["ranks", "leader"])
async def test_weights_of_two_ranks_arrive_bit_by_bit_and_pass_the_canary(senders):
    options = parse(["--smoke", "--trainers", "2", "--rollouts", "1", "--senders", senders])
    options.rounds = 1
    row = await measure(options)  # compares every live parameter with the trainer's
    assert row["gb"] > 0
    assert row["tokens"] > 0
