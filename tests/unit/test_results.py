"""Each result of a benchmark is listed with the commit, the date and the host of its measurement."""

import re
import subprocess

import pytest

from tests.helpers.cli import REPOSITORY

_OLDER = "2026-11-27"
RESULTS = REPOSITORY / "bench" / "results"
_ROW = re.compile(
    r"^\| `(?P<file>[\w.-]+\.json)` \| (?P<commit>this|[0-9a-f]{8}) "
    r"\| (?P<date>\d{4}-\d\d-\d\d) \| (?P<host>\S.*) \|$"
)


_HISTORY = ("log", "--format=commit %H", "--name-only", "--", "bench/results")


def test_every_result_has_a_commit_a_date_and_a_host():
    lines = (RESULTS / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert [line for line in rows if not _ROW.match(line)] == []
    matches = [match for line in rows if (match := _ROW.match(line))]
    # Older files do not say on which host they were measured.
    assert [m["file"] for m in matches if m["host"] == "not recorded" and m["date"] > _OLDER] == []
    assert [match["file"] for match in matches] == sorted(
        path.name for path in RESULTS.glob("*.json")
    )


def test_every_row_names_the_newest_commit_that_changed_its_file():
    newest = _newest_commits()
    lines = (RESULTS / "README.md").read_text(encoding="utf-8").splitlines()
    matches = [match for line in lines if (match := _ROW.match(line))]
    wrong = {
        match["file"]: f"{match['commit']}, expected {newest[match['file']][:8]}"
        for match in matches
        if match["file"] in newest  # a new file is in no commit yet
        and match["commit"] != "this"
        and not newest[match["file"]].startswith(match["commit"])
    }
    assert wrong == {}, "a result that you commit now has `this` as its commit"


def _newest_commits() -> dict[str, str]:
    """Returns the newest commit of each result; skips the test where git has no complete history."""
    try:
        if _git("rev-parse", "--show-toplevel", "--is-shallow-repository") != [
            str(REPOSITORY),
            "false",
        ]:
            pytest.skip("the history of this repository is not here")
        words = _git(*_HISTORY)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no repository of git")
    newest: dict[str, str] = {}
    commit = ""
    for line in words:
        if line.startswith("commit "):
            commit = line.removeprefix("commit ")
        elif line:
            newest.setdefault(line.rpartition("/")[2], commit)
    return newest


def _git(*words: str) -> list[str]:
    return subprocess.run(
        ["git", *words], cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=60
    ).stdout.splitlines()
