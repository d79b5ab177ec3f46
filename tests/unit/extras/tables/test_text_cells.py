"""Tests of the cells of CSV files as answers and as columns of filters."""

from pathlib import Path
from typing import Any

import pytest

from services.common.runspec.data import DataSpec
from services.rollout.data.sources import open_sources
from services.rollout.rewards.answers import exact_match

pytest.importorskip("datasets")

# Kind: the file's text after its header, and the value of each answer.
CELLS: dict[str, tuple[str, list[Any]]] = {
    "integers": ("q,72\nr,5\n", [72, 5]),
    "integers and an empty cell": ("q,72\nr,\n", [72, None]),
    "large integers and an empty cell": ("q,1152921504606846977\nr,\n", [2**60 + 1, None]),
    "integers of many digits": (f"q,{10**30 + 1}\nr,5\n", [str(10**30 + 1), "5"]),
    "leading zeros": ("q,007\nr,42\n", ["007", "42"]),
    "decimals": ("q,0.1\nr,2.5\n", [0.1, 2.5]),
    "decimals with zeros at the end": ("q,0.10\nr,2.50\n", ["0.10", "2.50"]),
    "powers of ten": ("q,1e3\nr,1E-5\n", ["1e3", "1E-5"]),
    "names of missing values": ("q,NA\nr,None\ns,null\nt,nan\n", ["NA", "None", "null", "nan"]),
    "infinity": ("q,inf\nr,5\n", ["inf", "5"]),
    "lower-case booleans": ("q,true\nr,false\n", ["true", "false"]),
    "booleans of Python": ("q,True\nr,False\n", [True, False]),
    "words of agreement": ("q,yes\nr,no\n", ["yes", "no"]),
    "quotes": ('"say ""hi"", now","a ""b"""\n"two\nlines","x,y"\n', ['a "b"', "x,y"]),
    "separators": ('q,"1,000"\nr,"2,000"\n', ["1,000", "2,000"]),
    "dates": ("q,2024-01-05\nr,2024-01-06\n", ["2024-01-05", "2024-01-06"]),
    "numbers and words": ("q,72\nr,many\n", ["72", "many"]),
    "accents": ("q,é\nr,東京\n", ["é", "東京"]),
}


either_source = pytest.mark.parametrize("source", ["huggingface", "csv"])


def rows_of(folder: Path, text: str, source: str = "huggingface", **changes: Any) -> Any:
    file = folder / "train.csv"
    file.write_bytes(text.encode())
    path = file if source == "csv" else folder
    train = {"source": source, "path": str(path), **changes}
    spec = DataSpec.model_validate({"train": train, "prompt_column": "question"})
    return open_sources(spec)["train"]


@either_source
@pytest.mark.parametrize(("text", "answers"), CELLS.values(), ids=CELLS)
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte order mark"])
def test_an_answer_is_what_the_file_says(
    tmp_path: Path, source: str, mark: str, text: str, answers: list[Any]
) -> None:
    text = f"{mark}question,answer\n{text}"
    text = text.replace("\n", "\r\n") if mark and "lines" not in text else text
    rows = rows_of(tmp_path, text, source)
    assert [rows[index]["answer"] for index in range(len(rows))] == answers
    for answer in answers:
        if answer is None:
            with pytest.raises(ValueError, match="needs an answer"):
                exact_match("", "72", answer, {})
        else:
            assert exact_match("", str(answer), answer, {}) == 1.0


@either_source
def test_a_filter_compares_numbers_however_they_are_written(tmp_path: Path, source: str) -> None:
    text = "question,answer,score\nq,007,0.10\nr,008,0.50\ns,009,\n"
    rows = rows_of(tmp_path, text, source, filters=[{"column": "score", "at_least": 0.2}])
    assert [dict(rows[index]) for index in range(len(rows))] == [
        {"question": "r", "answer": "008", "score": 0.5}
    ]


@either_source
@pytest.mark.parametrize(
    ("cells", "one_of", "answers"),
    [
        (("true", "false", ""), [True], ["q"]),
        (("TRUE", "FALSE", "FALSE"), [False], ["r", "s"]),
        (("0.50", "0.10", ""), [0.5], ["q"]),
        (("01", "02", "03"), [1, 3], ["q", "s"]),
        (("01", "02", "03"), ["01", "03"], ["q", "s"]),
        (("True", "False", "False"), [True], ["q"]),
    ],
)
def test_a_filter_compares_values_of_its_type(
    tmp_path: Path, source: str, cells: tuple[str, ...], one_of: list[Any], answers: list[str]
) -> None:
    lines = [f"{answer},{answer},{cell}" for answer, cell in zip("qrs", cells, strict=True)]
    text = "\n".join(["question,answer,label", *lines, ""])
    rows = rows_of(tmp_path, text, source, filters=[{"column": "label", "one_of": one_of}])
    assert [rows[index]["answer"] for index in range(len(rows))] == answers


@pytest.mark.parametrize(
    ("header", "names"),
    [
        (",question,answer", ["Unnamed: 0", "question", "answer"]),  # pandas writes its index so
        ("answer,question,answer", ["answer", "question", "answer.1"]),
    ],
)
def test_columns_without_a_name_of_their_own_are_called_as_by_pandas(
    tmp_path: Path, header: str, names: list[str]
) -> None:
    rows = rows_of(tmp_path, f"{header}\n0,q,007\n1,r,008\n")
    assert [dict(rows[index]) for index in range(len(rows))] == [
        dict(zip(names, values, strict=True)) for values in ((0, "q", "007"), (1, "r", "008"))
    ]


def test_a_file_of_tabs_has_columns_too(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("question\tanswer\nq\t007\n")
    spec = DataSpec.model_validate(
        {"train": {"source": "huggingface", "path": str(tmp_path)}, "prompt_column": "question"}
    )
    assert open_sources(spec)["train"][0]["answer"] == "007"


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_csv_file_is_separated_as_its_header_is(tmp_path: Path, delimiter: str) -> None:
    text = f"question{delimiter}answer\nq{delimiter}1\n\n" + f'"two\nlines"{delimiter}2\n'
    rows = rows_of(tmp_path, text, "csv")
    assert [rows[index] for index in range(len(rows))] == [
        {"question": "q", "answer": 1},
        {"question": "two\nlines", "answer": 2},
    ]


def test_signs_in_quotes_separate_no_columns(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 'question;answer;"price, tax, total"\n1,5;72;x\n', "csv")
    assert [rows[index] for index in range(len(rows))] == [
        {"question": "1,5", "answer": 72, "price, tax, total": "x"}
    ]


def test_a_csv_file_may_have_long_prompts(tmp_path: Path) -> None:
    assert (
        len(rows_of(tmp_path, f"question,answer\n{'q' * 200_000},1\n", "csv")[0]["question"])
        == 200_000
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no header"),
        ("question,answer,answer\nq,1,2\n", "'answer' occurs 2 times"),
        ("question,answer\nq,1\nr,2,3\n", "line 3 has 3 cells, and the header 2"),
        ('question,answer\n"q,1\n', "unexpected end of data"),
        ("question,answer\n\udcff,1\n", "utf-8"),
    ],
)
def test_a_csv_file_that_is_none_is_refused_with_key_file_and_line(
    tmp_path: Path, text: str, why: str
) -> None:
    file = tmp_path / "train.csv"
    file.write_bytes(text.encode(errors="surrogateescape"))
    spec = DataSpec.model_validate(
        {"train": {"source": "csv", "path": str(file)}, "prompt_column": "question"}
    )
    with pytest.raises(ValueError, match=f"data.train: .*train.csv cannot be read.*{why}"):
        open_sources(spec)
