"""Filters on rows: selection, and errors of filters that cannot be applied."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.runspec.data import DataSpec
from services.rollout.data.sources import open_sources

ROWS: list[dict[str, Any]] = [
    {"prompt": "ab", "answer": "1", "level": 1, "meta": {"subject": "algebra"}},
    {"prompt": "abcdef", "answer": "2", "level": 5, "meta": {"subject": "geometry"}},
    {"prompt": "xyz", "answer": "3", "level": 3, "meta": {"subject": "algebra"}},
    {"prompt": [{"role": "user", "content": "abcd"}], "answer": "4", "level": None},
]
CODE = """
def odd(row, *, column="level"): return row[column] is not None and row[column] % 2 == 1
def number(row): return 1
def breaks(row): return row["gone"]
"""


@pytest.fixture
def answers(tmp_path: Path) -> Any:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "code.py").write_text(CODE)

    def of(*filters: dict[str, Any], limit: int | None = None) -> list[str]:
        for row_filter in filters:
            if "function" in row_filter:
                row_filter["function"] = f"{tmp_path}/code.py:{row_filter['function']}"
        dataset = {"source": "jsonl", "path": str(tmp_path / "rows.jsonl"), "limit": limit}
        train = {"some": {**dataset, "filters": filters}}
        rows = open_sources(DataSpec(train=train))["train.some"]  # type: ignore[arg-type]
        return [rows[index]["answer"] for index in range(len(rows))]

    return of


@pytest.mark.parametrize(
    ("spec", "passing_rows"),
    [
        ({"column": "level", "at_least": 3}, ["2", "3"]),
        ({"column": "level", "at_least": 1, "at_most": 3}, ["1", "3"]),
        ({"column": "meta.subject", "one_of": ["algebra"]}, ["1", "3"]),
        ({"column": "level", "one_of": [None, 5]}, ["2", "4"]),
        ({"column": "prompt", "max_length": 4}, ["1", "3", "4"]),
        ({"column": "prompt", "min_length": 3, "max_length": 5}, ["3", "4"]),
        ({"column": "prompt", "matches": "^ab"}, ["1", "2"]),
        ({"function": "odd"}, ["1", "2", "3"]),
        ({"function": "odd", "arguments": {"column": "level"}}, ["1", "2", "3"]),
    ],
)
def test_rows_that_do_not_pass_are_left_out(
    answers: Any, spec: dict[str, Any], passing_rows: list[str]
) -> None:
    assert answers(spec) == passing_rows


def test_a_limit_counts_the_rows_that_pass_all_filters(answers: Any) -> None:
    both = ({"column": "level", "at_least": 1}, {"column": "prompt", "max_length": 3})
    assert answers(*both) == ["1", "3"]
    assert answers(*both, limit=1) == ["1"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"column": "level", "at_least": 9}, "data.train.some.filters"),
        ({"column": "levle", "at_least": 9}, "data.train.some.filters.0.column"),
        ({"function": "number"}, "filters.0: row 0"),
        ({"function": "breaks"}, "filters.0: row 0: .*KeyError: 'gone'"),
        ({"function": "gone"}, "filters.0.function: .*'gone'"),
        (
            {"function": "odd", "arguments": {"colum": 1}},
            "filters.0.function: .*filters.0.arguments",
        ),
        ({"column": "level"}, "filters"),
        ({"column": "level", "function": "odd"}, "filters"),
        ({"column": "prompt", "matches": "("}, "matches"),
    ],
)
def test_a_filter_that_cannot_be_applied_is_named(
    answers: Any, spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        answers(spec)


def test_a_damaged_row_is_rejected_when_it_is_issued(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n{damaged\n")
    dataset = {"source": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    filters = [{"column": "level", "at_least": 1}]
    rows = open_sources(DataSpec(train={**dataset, "filters": filters}))["train"]  # type: ignore[arg-type]
    assert len(rows) == 2
    with pytest.raises(ValueError, match="row 1"):
        rows[1]
