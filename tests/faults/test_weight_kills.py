"""Random kills and stops of rollouts around weight transfers, one after the other."""

import pytest

from tests.faults.weight_kills import kill_in_a_row

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

NUM_BYTES = 64 << 20
# Recovery takes 2 to 4 s on an idle machine, which the benchmark measures; this bound only detects a hang.
SERVES_WITHIN_S = 20.0


@pytest.mark.parametrize("count", [6, pytest.param(20, marks=pytest.mark.nightly)])
async def test_the_others_serve_the_new_version_after_each_of_many_random_kills(count):
    kills = await kill_in_a_row(count, seed=6, num_bytes=NUM_BYTES)
    assert len(kills) == count
    assert {kill.signal for kill in kills} == {"SIGKILL", "SIGSTOP"}
    assert max(kill.seconds for kill in kills) <= SERVES_WITHIN_S
