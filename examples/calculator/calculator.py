"""Multiplication with a calculator that the policy may call."""

import ast
import json
import operator
import random
import re
from typing import Any

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_MAX_CHARACTERS = 64
_NUM_HELDOUT = 256
_NUMBER = re.compile(r"-?\d+")
_SYSTEM = "You have a calculator. Call it before you answer."
_EXAMPLES = ((12, 34), (405, 7))


def calculator(expression: str) -> int:
    """Computes an expression of integers, +, - and *.

    Args:
        expression: Such as ``12 * 34``.

    Raises:
        ValueError: If it is none.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"the expression has more than {_MAX_CHARACTERS} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError("the expression must have integers, +, - and * only") from None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("the expression must have integers, +, - and * only")


def train() -> list[dict[str, Any]]:
    """Returns questions with answers; none of them is held out."""
    known = {row["answer"] for row in heldout()}
    return [row for row in _rows(8192, seed=1) if row["answer"] not in known]


def heldout() -> list[dict[str, Any]]:
    """Returns questions that are only evaluated."""
    return _rows(_NUM_HELDOUT, seed=0)


def reward(prompt: str, response: str, answer: str | None, row: dict[str, Any]) -> float:
    """Returns 1 if the last number of the last turn is the product."""
    numbers = _NUMBER.findall(response.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == answer and "<tool_call>" not in response)


def _rows(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    pairs = [(rng.randint(1000, 9999), rng.randint(100, 999)) for _ in range(count)]
    return [
        {"prompt": [*_EXAMPLE_CHAT, _question(one, two)], "answer": str(one * two)}
        for one, two in pairs
    ]


def _question(one: int, two: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {one} * {two}?"}


def _example(one: int, two: int) -> list[dict[str, str]]:
    """Returns a question, a call, its result and the answer."""
    call = {"name": "calculator", "arguments": {"expression": f"{one} * {two}"}}
    return [
        _question(one, two),
        {"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"},
        {"role": "tool", "content": str(one * two)},
        {"role": "assistant", "content": f"{one} * {two} = {one * two}."},
    ]


# Without examples a model of this size never writes a call, and learns nothing.
_EXAMPLE_CHAT = [
    {"role": "system", "content": _SYSTEM},
    *(message for pair in _EXAMPLES for message in _example(*pair)),
]
