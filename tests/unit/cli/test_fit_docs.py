"""The table of what fits where is what the planner says."""

from pathlib import Path

from services.cli.fit_docs import page


def test_the_table_is_that_of_the_planner() -> None:
    written = (Path(__file__).parents[3] / "docs" / "fits.md").read_text(encoding="utf-8")
    assert page() == written.rstrip("\n"), "run make docs"
