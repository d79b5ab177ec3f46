"""Quantities as texts."""

import pytest

from services.common.stores import size_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1_734_000, "1.7 MB"),
        (999_960_000, "1.0 GB"),
        (14_300_000_000, "14.3 GB"),
        (2e15, "2000.0 TB"),
    ],
)
def test_a_size_has_the_unit_that_keeps_it_readable(num_bytes, text):
    assert size_text(num_bytes) == text
