"""Tests that the committed reference pages and the generated client match the code."""

from deploy.reference.__main__ import files


def test_what_is_written_of_the_code_is_current() -> None:
    stale = [path.name for path, text in files().items() if path.read_text("utf-8") != text]
    assert not stale, "run make docs"
