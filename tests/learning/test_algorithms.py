"""Every algorithm learns sort4 through the whole system; the control without a correction does not."""

import pytest

from bench.learning.__main__ import measure
from bench.learning.variants import VARIANTS

pytestmark = [pytest.mark.nightly, pytest.mark.learning, pytest.mark.timeout(900)]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", VARIANTS)
def test_held_out_accuracy_is_within_its_bounds(name, seed):
    entry = measure(VARIANTS[name], seed)
    assert entry["holds"], entry
