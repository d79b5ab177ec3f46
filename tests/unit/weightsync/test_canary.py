"""Tests of the canary's text and tolerance."""

import math

from services.weightsync.canary import canary_text, canary_tolerance, difference


def test_the_text_visits_the_whole_vocabulary():
    text = canary_text(151_936)
    assert len(set(text)) == len(text) == 24
    assert 0 <= min(text) < max(text) < 151_936
    assert max(canary_text(8)) < 8


def test_the_difference_is_the_mean_of_absolute_differences():
    assert difference([-1.0, -2.0], [-1.5, -1.0]) == 0.75


def test_incomparable_canaries_differ_infinitely():
    for first, other in (([], []), ([1.0], []), ([math.nan], [1.0])):
        assert difference(first, other) == math.inf


def test_half_precision_is_allowed_more_than_full():
    assert canary_tolerance(["float32"]) < canary_tolerance(["float32", "bfloat16"])
