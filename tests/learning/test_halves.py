"""The parent agent and helpers of `examples/halves` learn: held-out accuracy after 20 steps."""

import pytest

from tests.helpers.cli import REPOSITORY, train

pytestmark = [pytest.mark.learning, pytest.mark.nightly, pytest.mark.timeout(900)]

HALVES = REPOSITORY / "examples" / "halves" / "halves.yaml"


@pytest.mark.parametrize("seed", [0, 1])
def test_helpers_learn_from_what_their_parent_earns(tmp_path, seed):
    result = train(HALVES, tmp_path, f"seed={seed}")
    assert result.code == 0, result.out + result.err
    heldout = result.summary["heldout"]
    assert heldout["greedy"] >= 0.93
    assert heldout["sampled"] >= 0.80
