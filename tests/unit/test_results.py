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


def test_the_commit_of_every_row_changed_its_file():
    commits = _commits()
    lines = (RESULTS / "README.md").read_text(encoding="utf-8").splitlines()
    matches = [match for line in lines if (match := _ROW.match(line))]
    wrong = {
        match["file"]: f"{match['commit']}, expected {commits[match['file']][0][:8]}"
        for match in matches
        if match["file"] in commits  # a new file is in no commit yet
        and match["commit"] != "this"
        and match["commit"] not in {commit[:8] for commit in commits[match["file"]]}
    }
    assert wrong == {}, "a result that you commit with its row has `this` as its commit"


def _commits() -> dict[str, list[str]]:
    """Returns the commits of each result, newest first; skips the test without a complete history."""
    try:
        facts = _git("rev-parse", "--show-toplevel", "--is-shallow-repository")
        if facts != [str(REPOSITORY), "false"]:
            pytest.skip("the history of this repository is not here")
        lines = _git(*_HISTORY)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no repository of git")
    commits: dict[str, list[str]] = {}
    commit = ""
    for line in lines:
        if line.startswith("commit "):
            commit = line.removeprefix("commit ")
        elif line:
            commits.setdefault(line.rpartition("/")[2], []).append(commit)
    return commits


def _git(*words: str) -> list[str]:
    return subprocess.run(
        ["git", *words], cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=60
    ).stdout.splitlines()
