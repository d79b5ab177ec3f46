"""Tests of the parsers of tool calls and reasoning for each model family."""

from typing import Any

import pytest

from services.rollout.workflows.reply_formats import (
    TOOL_FORMATS,
    ReasoningFormat,
    check_tool_format,
    reply_format,
)
from tests.helpers.served_episode import TOKENIZER

ONE = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {
                    "zip": {"type": "string"},
                    "count": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "near": {"type": ["object", "null"]},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
            },
        },
    }
]


def _calls(name: str, text: str, tools: Any = ()) -> list[tuple[str, Any]]:
    calls = reply_format(TOKENIZER, name).parse(text, tools).calls
    return [(call.name, call.arguments) for call in calls if not call.problem]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ONE, ["f"]),
        (f"a {ONE} b {ONE}", ["f", "f"]),
        (f"I write <tool_call> first: {ONE}", ["f"]),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', ["f"]),
        ("<tool_call>f(1)</tool_call>" + ONE, ["f"]),
        ("<tool_call>{bad}</tool_call>", []),
        ('<tool_call>{"name": "f"}', ["f"]),
        ('<tool_call>{"name": "f"', []),
        ("</tool_call>", []),
    ],
)
def test_hermes_calls_are_found_between_their_marks(text: str, expected: list[str]) -> None:
    assert [name for name, _ in _calls("hermes", text)] == expected


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        (
            "qwen3_coder",
            "Hi.<tool_call>\n<function=find>\n<parameter=zip>\n01234\n</parameter>\n<parameter=count>\n3\n"
            "</parameter>\n<parameter=note>\ntwo\nlines\n</parameter>\n</function>\n</tool_call>",
            "Hi.",
            [("find", {"zip": "01234", "count": 3, "note": "two\nlines"})],
        ),
        (
            "glm",
            "Hi. <tool_call>find\n<arg_key>zip</arg_key>\n<arg_value>01234</arg_value>\n<arg_key>exact"
            "</arg_key>\n<arg_value>true</arg_value>\n</tool_call><tool_call>now</tool_call>",
            "Hi.",
            [("find", {"zip": "01234", "exact": True}), ("now", {})],
        ),
        (
            "llama3_json",
            'Hi. <|python_tag|>{"name": "find", "parameters": {"zip": "a {b} [c"}}; {"name": "now", '
            '"arguments": {}}',
            "Hi.",
            [("find", {"zip": "a {b} [c"}), ("now", {})],
        ),
        (
            "pythonic",
            "[find(zip='01234', near={'x': [1, -2.5]}, note=None), a.now()]",
            "",
            [("find", {"zip": "01234", "near": {"x": [1, -2.5]}, "note": None}), ("a.now", {})],
        ),
        (
            "mistral",
            'Hi.[TOOL_CALLS][{"name": "find", "arguments": {"count": 1}}, {"name": "now", "arguments": {}}]',
            "Hi.",
            [("find", {"count": 1}), ("now", {})],
        ),
        (
            "mistral",
            '[TOOL_CALLS]find[ARGS]{"count": 1}[TOOL_CALLS]now{}',
            "",
            [("find", {"count": 1}), ("now", {})],
        ),
        (
            "deepseek_v3",
            "Hi.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n"  # noqa: RUF001
            '{"count": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',  # noqa: RUF001
            "Hi.",
            [("find", {"count": 1})],
        ),
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>"  # noqa: RUF001
            '{"count": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',  # noqa: RUF001
            "",
            [("find", {"count": 1})],
        ),
        (
            "kimi_k2",
            "Hi.<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>"
            '{"count": 1}<|tool_call_end|><|tool_calls_section_end|>',
            "Hi.",
            [("find", {"count": 1})],
        ),
        (
            "gpt_oss",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.find <|constrain|>json<|message|>{"count": 1}<|call|>',
            "",
            [("find", {"count": 1})],
        ),
        (
            "gemma4",
            'Hi. <|tool_call>call:find{zip:<|"|>01234<|"|>,count:3,near:{x:[1,<|"|>a]b<|"|>]}}<tool_call|>',
            "Hi.",
            [("find", {"zip": "01234", "count": 3, "near": {"x": [1, "a]b"]}})],
        ),
        (
            "functiongemma",
            "<start_function_call>call:find{zip:<escape>01234<escape>,count:<escape>3<escape>}"
            "<end_function_call>",
            "",
            [("find", {"zip": "01234", "count": 3})],
        ),
    ],
)
def test_calls_of_each_family(
    name: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    reply = reply_format(TOKENIZER, name).parse(text, TOOLS)
    assert reply.content == content
    assert [(call.name, call.arguments) for call in reply.calls] == calls
    untouched = reply_format(TOKENIZER, name).parse(text, TOOLS, has_tools=False)
    assert not untouched.calls


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_text_without_calls_is_content(name: str) -> None:
    for text in ("Hello.", "", "{", "[1, 2]", '{"a": 1}', "call:f{", "f(x)", "[f(x)", "a < b > c"):
        reply = reply_format(TOKENIZER, name).parse(text, TOOLS)
        assert (reply.content, reply.calls) == (text, ())


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_repeated_and_broken_marks_are_read_in_one_pass(name: str) -> None:
    begins = (*TOOL_FORMATS[name].begins, "<tool_call>{", "<function=", "[f(", '{"a":', "call:f{")
    for mark in begins:
        reply_format(TOKENIZER, name).parse(mark * 20_000, TOOLS)
        reply_format(TOKENIZER, name).parse(mark * 20_000 + "}</tool_call>" * 20_000, TOOLS)


def test_arguments_without_a_type_get_that_of_the_schema() -> None:
    def written(value: str, key: str) -> Any:
        text = f"<function=find><parameter={key}>{value}</parameter></function>"
        ((_, arguments),) = _calls("qwen3_coder", text, TOOLS)
        return arguments[key]

    assert written("007", "zip") == "007"
    assert written("7", "count") == 7
    assert written("True", "exact") is True
    assert written('{"x": 1}', "near") == {"x": 1}
    assert written("{'x': True}", "near") == {"x": True}
    assert written("null", "note") is None
    assert written("not a number", "count") == "not a number"
    assert written("7", "unknown") == 7


def test_a_malformed_tool_call_returns_an_error_and_stays_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {bad}}</tool_call>'
    reply = reply_format(TOKENIZER, "hermes").parse(text)
    assert reply.content == text
    (call,) = reply.calls
    assert call.name == "f"
    assert "JSON" in call.problem


def test_a_call_with_a_name_and_broken_arguments_reaches_the_agent_as_text() -> None:
    text = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{bad<|tool_call_end|>"
    (call,) = reply_format(TOKENIZER, "kimi_k2").parse(text).calls
    assert (call.name, call.arguments, call.is_reported) == ("f", "{bad", True)
    assert "JSON" in call.problem


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "rest"),
    [
        ("<think>\na\n</think>\n\nb", False, "a", "b"),
        ("a</think>b", False, "a", "b"),
        ("a</think>b", True, "a", "b"),
        ("a", True, "a", ""),
        ("a", False, "", "a"),
        ("<think>a", False, "a", ""),
        ("b <think>a</think>", False, "", "b <think>a</think>"),
        ("<think></think>b", False, "", "b"),
    ],
)
def test_reasoning_is_split_from_the_rest(
    text: str, is_open: bool, reasoning: str, rest: str
) -> None:
    form = ReasoningFormat(begin="<think>", end="</think>")
    assert form.split(text, is_open=is_open) == (reasoning, rest)


def test_an_unknown_format_is_rejected_by_key() -> None:
    check_tool_format("auto")
    with pytest.raises(ValueError, match=r"tool_format.*'hermes'"):
        check_tool_format("hermess")
