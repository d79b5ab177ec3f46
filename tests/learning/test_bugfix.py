"""The agent of `examples/bugfix` learns to fix bugs from tests in the sandboxes of its episodes."""

import pytest

from services.extras.bubblewrap import bubblewrap
from tests.helpers.cli import REPOSITORY, train

pytestmark = [
    pytest.mark.learning,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not bubblewrap.is_usable(), reason="needs bubblewrap"),
]

BUGFIX = REPOSITORY / "examples" / "bugfix" / "bugfix.yaml"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_more_bugs_are_fixed_after_training(tmp_path, seed):
    result = train(BUGFIX, tmp_path, f"seed={seed}")
    assert result.code == 0, result.out + result.err
    assert result.summary["heldout"]["greedy"] >= 0.5  # 0.2 to 0.3 before training
