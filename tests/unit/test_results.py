"""Each result of a benchmark is listed with the commit, the date and the host of its measurement."""

import re

from tests.helpers.cli import REPOSITORY

_OLDER = "2026-11-27"
RESULTS = REPOSITORY / "bench" / "results"
_ROW = re.compile(
    r"^\| `(?P<file>[\w.-]+\.json)` \| (?P<commit>[0-9a-f]{8,40}) "
    r"\| (?P<date>\d{4}-\d\d-\d\d) \| (?P<host>\S.*) \|$"
)


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
