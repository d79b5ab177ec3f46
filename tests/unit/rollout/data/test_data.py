"""Prompt sources."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.data import DataSpec
from services.common.runspec.run import ModelSpec
from services.rollout.data.prompts import PromptStore
from services.rollout.data.sources import column_value, open_sources
from services.rollout.failures import GroupError
from tests.helpers.chat_families import family_tokenizer

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(5)]


def data(source: str, path: object, **changes: Any) -> DataSpec:
    train = {"source": source, "path": str(path)} | changes.pop("train", {})
    return DataSpec(train=train, **changes)  # type: ignore[arg-type]  # pydantic converts


@pytest.mark.parametrize(
    "code", ["raise OSError('no disk')", "yield 1 / 0", "raise SystemExit", "yield exit()"]
)
def test_an_exception_of_a_rows_function_has_its_key(tmp_path: Path, code: str) -> None:
    (tmp_path / "rows.py").write_text(f"def rows():\n    {code}\n")
    with pytest.raises(
        ValueError, match=r"data\.train: .*rows' raised (OSError|ZeroDivisionError|SystemExit)"
    ):
        open_sources(data("python", f"{tmp_path}/rows.py:rows"))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def rows(): return {'prompt': ['1']}", "must return the rows, .* got dict"),
        ("def rows(): return 'rows.jsonl'", "must return the rows, .* got str"),
        ("def rows(): return [None + 1]", r"raised TypeError: .* \(rows.py, line 1\)"),
        ("def rows(count): return []", r"could not be called with .*data\.train\.arguments"),
    ],
)
def test_a_rows_function_without_rows_fails_with_the_reason(
    tmp_path: Path, code: str, message: str
) -> None:
    (tmp_path / "rows.py").write_text(code)
    with pytest.raises(ValueError, match=rf"data\.train: .*{message}"):
        open_sources(data("python", f"{tmp_path}/rows.py:rows"))


def test_an_exception_of_a_row_has_its_key(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(
        "class Rows(list):\n    def __getitem__(self, index): raise KeyError('gone')\n"
        "def rows(): return Rows([1])\n"
    )
    with pytest.raises(ValueError, match=r"data\.train: row 0 .* raised KeyError: 'gone'"):
        open_sources(data("python", f"{tmp_path}/rows.py:rows"))


def test_an_exception_of_the_datasets_library_has_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def fails(*_: object, **__: object) -> None:
        raise datasets.exceptions.DatasetGenerationError("broken")

    monkeypatch.chdir(tmp_path)  # the library lists all files below the working directory
    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(ValueError, match=r"data\.train\.path"):
        open_sources(data("huggingface", "json", train={"split": "train"}))


def test_jsonl_rows_are_addressed_by_index_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    source = open_sources(data("jsonl", file))["train"]
    assert [source[index] for index in (3, 0)] == [ROWS[3], ROWS[0]]
    assert len(source) == 5


def test_a_jsonl_file_that_is_one_list_is_refused_with_what_a_line_is(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('[{"prompt": "a", "answer": "b"}]')
    with pytest.raises(ValueError, match=r"row 0 of .*rows\.json must be .*one per line.*got list"):
        open_sources(data("jsonl", file))


def test_parquet_rows_are_addressed_by_index(tmp_path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    source = open_sources(data("parquet", tmp_path / "rows.parquet"))["train"]
    assert source[4] == ROWS[4]
    assert len(source) == 5


def test_a_damaged_parquet_file_has_its_key(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(ROWS), file)
    whole = file.read_bytes()
    file.write_bytes(whole[:20] + bytes(60) + whole[80:])
    with pytest.raises(ValueError, match=r"data\.train: .*rows\.parquet"):
        open_sources(data("parquet", file))


def test_a_chat_may_have_calls_without_a_content_and_does_not_end_with_an_answer() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    chat = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "2"},
    ]
    rows = [{"prompt": chat}, {"prompt": [*chat, {"role": "assistant", "content": "2"}]}]
    tokenizer = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="bytes"))
    spec = data("jsonl", "rows.jsonl", chat_template=True, answer_column=None)
    store = PromptStore(spec, {"train": rows}, tokenizer)  # type: ignore[dict-item]  # a list is a sequence
    assert store.prompt("train", 0).text == "2"
    with pytest.raises(GroupError) as refused:
        store.prompt("train", 1)
    assert refused.value.reason == "prompt_malformed"


@pytest.mark.parametrize(
    "row", ['{"prompt": "a", "answer": "1", "prompt": "b"}', '{"prompt": [{"x": 1, "x": 2}]}']
)
def test_a_row_with_a_key_twice_is_refused(tmp_path: Path, row: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n" + row)
    source = open_sources(data("jsonl", file))["train"]
    with pytest.raises(ValueError, match=r"row 1 of .*rows\.jsonl has the key '(prompt|x)'"):
        source[1]
    file.write_text(row)
    with pytest.raises(ValueError, match=r"data\.train: row 0 "):
        open_sources(data("jsonl", file))


def test_a_parquet_file_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    twice = pa.table([["a"], ["b"], ["1"]], names=["prompt", "prompt", "answer"])
    parquet.write_table(twice, file)
    with pytest.raises(ValueError, match=r"data\.train: .*rows\.parquet has the column 'prompt'"):
        open_sources(data("parquet", file))
    pair = pa.StructArray.from_arrays([pa.array(["a"])] * 2, names=["x", "x"])
    lists = pa.ListArray.from_arrays(pa.array([0, 1]), pair)
    parquet.write_table(pa.table({"prompt": ["a"], "answer": ["1"], "tests": lists}), file)
    with pytest.raises(ValueError, match=r"'tests'.* has the column 'x'"):
        open_sources(data("parquet", file))


def test_a_dotted_name_reaches_into_a_nested_column(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    rows = [
        {
            "prompt": [{"role": "user", "content": "1+1="}],
            "reward_model": {"style": "rule", "ground_truth": "2"},
        }
    ]
    parquet.write_table(pa.Table.from_pylist(rows), file)
    source = open_sources(data("parquet", file, answer_column="reward_model.ground_truth"))["train"]
    assert column_value(source[0], "reward_model.ground_truth") == "2"
    with pytest.raises(ValueError, match=r"answer_column is 'reward_model\.truth'"):
        open_sources(data("parquet", file, answer_column="reward_model.truth"))
    assert column_value({"a.b": 1, "a": {"b": 2}}, "a.b") == 1


def test_a_map_of_a_parquet_file_is_a_mapping(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    function = pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.string()))])
    message = pa.struct(
        [
            ("role", pa.string()),
            ("content", pa.string()),
            ("tool_calls", pa.list_(pa.struct([("function", function)]))),
        ]
    )
    call = {"function": {"name": "f", "arguments": [("city", "Oslo")]}}
    chats = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}],
        [{"role": "user", "content": "q"}],
    ]
    maps = pa.array([[("a", 1)], [("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))
    table = pa.table({"prompt": pa.array(chats, pa.list_(message)), "answer": maps})
    parquet.write_table(table, file)
    source = open_sources(data("parquet", file))["train"]
    assert source[0]["answer"] == {"a": 1}
    assert source[0]["prompt"][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    with pytest.raises(
        ValueError, match=r"row 1 of .*rows\.parquet has a map with a key more than once"
    ):
        source[1]


def test_limit_keeps_the_first_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS))
    assert len(open_sources(data("jsonl", file, train={"limit": 2}))["train"]) == 2


def test_python_function_gives_rows(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text(
        "def rows(count):\n    return ({'prompt': 'a', 'answer': i} for i in range(count))\n"
    )
    source = open_sources(data("python", f"{file}:rows", train={"arguments": {"count": 3}}))[
        "train"
    ]
    assert source[2] == {"prompt": "a", "answer": 2}


def test_reasoning_gym_task_gives_rows() -> None:
    spec = data(
        "reasoning_gym",
        "basic_arithmetic",
        train={"arguments": {"size": 4, "seed": 1}},
        prompt_column="question",
    )
    source = open_sources(spec)["train"]
    assert len(source) == 4
    assert "metadata" in source[0]


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (None, {}, r"data\.train\.path"),
        ("", {}, r"data\.train: "),
        ('{"question": "x"}', {}, r"data\.prompt_column.*'question'"),
        ('{"prompt": "x"}', {}, r"data\.answer_column"),
        ("not json", {}, r"data\.train: row 0"),
        ("[1, 2]", {}, r"data\.train: row 0 of .*list"),
    ],
)
def test_bad_sources_name_the_key_and_the_fix(
    tmp_path: Path, content: str | None, changes: dict[str, Any], message: str
) -> None:
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=message):
        open_sources(data("jsonl", file, **changes))


def test_a_file_of_another_format_is_no_data_set_of_hugging_face(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer\na,b\n")
    with pytest.raises(ValueError, match=r"data\.train\.path: .*rows\.csv"):
        open_sources(data("huggingface", tmp_path / "rows.csv"))


def test_a_data_set_that_cannot_be_read_has_the_reason(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (folder / "rows2.jsonl").write_text("{broken\n")
    with pytest.raises(ValueError, match=r"data\.train: .*JSON"):
        open_sources(data("huggingface", folder))


def test_errors_of_parquet_files_and_functions_have_the_key(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("hello")
    (tmp_path / "task.py").write_text("def rows():\n    return 3\n")
    with pytest.raises(ValueError, match=r"data\.train: .*rows\.parquet"):
        open_sources(data("parquet", tmp_path / "rows.parquet"))
    with pytest.raises(ValueError, match=r"data\.train: .*int"):
        open_sources(data("python", f"{tmp_path}/task.py:rows"))
    with pytest.raises(ValueError, match=r"data\.train\.arguments"):
        open_sources(data("python", f"{tmp_path}/task.py:rows", train={"arguments": {"x": 1}}))
    with pytest.raises(ValueError, match=r"data\.train: .*no_such_task"):
        open_sources(data("reasoning_gym", "no_such_task"))


def test_sets_have_columns_and_templates_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    (tmp_path / "b.jsonl").write_text(json.dumps({"question": "2*3", "solution": {"value": "6"}}))
    spec = DataSpec(
        train={  # type: ignore[arg-type]  # pydantic converts
            "sums": {"source": "jsonl", "path": str(tmp_path / "a.jsonl")},
            "products": {
                "source": "jsonl",
                "path": str(tmp_path / "b.jsonl"),
                "prompt_column": "question",
                "answer_column": "solution.value",
                "prompt_template": "Q: {prompt}=",
            },
        }
    )
    book = PromptStore(
        spec,
        open_sources(spec),
        load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="bytes")),
    )
    assert [book.num_rows(split) for split in book.splits] == [5, 1]
    sum_prompt, product_prompt = book.prompt("train.sums", 2), book.prompt("train.products", 0)
    assert (sum_prompt.text, sum_prompt.answer) == ("2+1=", "3")
    assert (product_prompt.text, product_prompt.answer) == ("Q: 2*3=", "6")


def test_a_large_parquet_file_is_mapped_and_has_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"{n}", "answer": {"deep": [n, n + 1]}} for n in range(1000)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=64)
    monkeypatch.setattr("services.extras.tables.sources._MAX_HELD_BYTES", 0)
    monkeypatch.setattr("services.extras.tables.sources._ROWS_COPIED", 100)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    source = open_sources(data("parquet", tmp_path / "rows.parquet"))["train"]
    assert len(source) == 1000
    assert [source[index] for index in (999, 0, 500)] == [rows[999], rows[0], rows[500]]


def _with_call(number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    kinds = {key: {"type": "string", "enum": ["x"]} for key in arguments}
    schema = {"name": name, "parameters": {"type": "object", "properties": kinds}}
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    parts = [{"type": "text", "text": "q"}]
    parts = [*parts, {"type": "image", "image": "a.png"}] if number else parts
    return {
        "prompt": [
            {"role": "user", "content": parts},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": [{"type": "text", "text": "ok"}], "name": name},
        ],
        "tools": [{"type": "function", "function": schema}],
        "info": {"note": None, "other": number},
    }


@pytest.mark.parametrize("source", ["parquet", "huggingface"])
def test_keys_that_a_row_lacks_are_absent_in_its_messages_and_tools(
    tmp_path: Path, source: str
) -> None:
    rows = [_with_call(0, "add", {"a": "1", "b": "2"}), _with_call(1, "city", {"city": "Oslo"})]
    table = pa.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "rows.parquet")
    path = tmp_path / "rows.parquet" if source == "parquet" else tmp_path
    opened = open_sources(data(source, path, answer_column=None))["train"]
    assert [dict(opened[index]) for index in (0, 1)] == rows


def test_a_row_s_tools_are_offered_in_its_prompt(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "count_lamps", "parameters": {}}}
    row = {"prompt": [{"role": "user", "content": "how many"}], "answer": "3", "tools": [tool]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    spec = data("jsonl", tmp_path / "rows.jsonl", chat_template=True, max_prompt_tokens=2000)
    tokenizer = family_tokenizer("qwen3")
    prompt = PromptStore(spec, open_sources(spec), tokenizer).prompt("train", 0)
    assert "count_lamps" in tokenizer.decode(prompt.token_ids)
    assert prompt.tools == (tool,)
    silent = PromptStore(spec, open_sources(spec), family_tokenizer("phi4"))
    with pytest.raises(GroupError, match="does not show tools"):
        silent.prompt("train", 0)
