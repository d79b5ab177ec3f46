"""The curriculum example learns tasks that its base model cannot do, and reports each set's score."""

import pytest

from tests.helpers.cli import REPOSITORY, train

pytestmark = [pytest.mark.learning, pytest.mark.nightly, pytest.mark.timeout(900)]

EXAMPLE = REPOSITORY / "examples" / "curriculum" / "curriculum.yaml"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_six_digits_are_learnt_behind_two_and_four(tmp_path, seed):
    result = train(EXAMPLE, tmp_path, f"seed={seed}")
    assert result.code == 0, result.out + result.err
    sets = result.summary["heldout"]["sets"]
    assert sets["two"]["greedy"] >= 0.9
    assert sets["four"]["greedy"] >= 0.8
    assert sets["six"]["greedy"] >= 0.6
