"""Each kind of fault in a separate run: the run ends as expected, and its ledger closes."""

import pytest

from tests.faults.small_disk import NoNamespacesError
from tests.faults.table import FAULTS, suffer

pytestmark = [pytest.mark.faults, pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", FAULTS)
def test_a_run_ends_as_it_should_whatever_happens(tmp_path, name):
    try:
        assert suffer(tmp_path, FAULTS[name])["ended"] == FAULTS[name].ends
    except NoNamespacesError as error:
        pytest.skip(str(error))
