"""Calls in what the policy says."""

import pytest

from services.rollout.workflows.tool_calls import call_texts, tool_calls

ONE = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ONE, ["f"]),
        (f"a {ONE} b {ONE}", ["f", "f"]),
        (f"I write <tool_call> first: {ONE}", ["f"]),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', ["f"]),
        ("<tool_call>f(1)</tool_call>" + ONE, ["f"]),
        ("<tool_call>{bad}</tool_call>", []),
        ('<tool_call>{"name": "f"}', []),
        ("</tool_call>", []),
    ],
)
def test_calls_are_found_between_their_marks(text: str, expected: list[str]) -> None:
    assert [call["name"] for call in tool_calls(text)] == expected


def test_a_mark_repeated_a_hundred_thousand_times_is_read_in_one_pass() -> None:
    marks = "<tool_call>{" * 100_000
    assert [*call_texts(marks)] == []
    assert len([*call_texts(marks + "}</tool_call>")]) == 1
