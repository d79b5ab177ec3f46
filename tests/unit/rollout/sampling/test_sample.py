"""Extraction of final answers from responses with the user's pattern."""

import pytest

from services.rollout.sampling.sample import answer_digest


@pytest.mark.parametrize(
    ("response", "pattern", "answer"),
    [
        ("so #### 3 or #### 42", "#### (.*?)(?: or|$)", "42"),
        ("so 3, so 42", r"\d+", "42"),
        ("nothing", r"\d+", "nothing"),
        ("42", "", "42"),
    ],
)
def test_the_last_match_is_the_answer(response, pattern, answer):
    assert answer_digest(response, pattern) == answer_digest(answer, "")


def test_a_pattern_that_never_ends_leaves_the_whole_response():
    response = "a" * 5000 + "b"
    assert answer_digest(response, "(a|aa)+$") == answer_digest(response, "")
