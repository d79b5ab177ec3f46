"""Fixes a one-line bug: the policy writes a sed script, and tests in the episode's sandbox judge it.

The row has a file with a wrong operator and a test that fails; the prompt has the function's name and its
expression. The agent runs the policy's script on the file and then the test, which nothing but the sandbox
evaluates.
"""

import itertools
import operator
import random
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx

HELDOUT_PROMPTS = 128
_SEED = 20_260_101
_OPERATORS: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
    "+": ("add", operator.add),
    "-": ("sub", operator.sub),
    "*": ("mul", operator.mul),
    "%": ("rem", operator.mod),
    "|": ("bor", operator.or_),
}
_VARIABLES = "abcdefgh"
_OPERANDS = ((7, 3), (11, 5), (9, 2))
_FIX_AND_TEST = (
    "printf %s {test} > test_calc.py; cat > calc.py; sed -i {script} calc.py && "
    "python3 -I -S -B test_calc.py"
)

_http = httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None))


async def solve(
    base_url: str, api_key: str, model: str, prompt: str, row: Mapping[str, Any], sandbox: Any
) -> float:
    """Plays one episode; returns 1 if the test passes."""
    response = await _http.post(
        f"{base_url}/chat/completions",
        headers={"Authorization": f"Bearer {api_key}"},
        json={
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 8,
        },
    )
    response.raise_for_status()
    script = response.json()["choices"][0]["message"]["content"]
    command = _FIX_AND_TEST.format(test=shlex.quote(row["test"]), script=shlex.quote(script))
    result = await sandbox.run(command, stdin=row["code"], timeout_s=10)
    return float(result.exit_status == 0)


def train() -> list[dict[str, str]]:
    """Returns every bug that is not held out."""
    return [_row(*bug) for bug in _bugs()[HELDOUT_PROMPTS:]]


def heldout() -> list[dict[str, str]]:
    """Returns 128 bugs that training does not see."""
    return [_row(*bug) for bug in _bugs()[:HELDOUT_PROMPTS]]


def warm_start(count: int, seed: int) -> list[tuple[str, str]]:
    """Returns examples of a base model that writes valid scripts and guesses the operator."""
    rng = random.Random(seed)
    return list(itertools.islice(_examples(rng), count))


def _examples(rng: random.Random) -> Iterator[tuple[str, str]]:
    bugs = _bugs()[HELDOUT_PROMPTS:]
    while True:
        wrong, right, one, two = rng.choice(bugs)
        guesses = [f"s/{wrong}/{each}/" for each in _OPERATORS if each != wrong]
        chat = f"user: {_prompt(wrong, right, one, two)}\nassistant: "
        yield chat, rng.choice(guesses)


def _bugs() -> list[tuple[str, str, str, str]]:
    """Returns wrong operator, right operator and the names of two variables."""
    bugs = [
        (*operators, *variables)
        for operators in itertools.permutations(_OPERATORS, 2)
        for variables in itertools.permutations(_VARIABLES, 2)
    ]
    random.Random(_SEED).shuffle(bugs)
    return bugs


def _prompt(wrong: str, right: str, one: str, two: str) -> str:
    name, _ = _OPERATORS[right]
    return f"{name} {one}{wrong}{two}"


def _row(wrong: str, right: str, one: str, two: str) -> dict[str, str]:
    name, compute = _OPERATORS[right]
    tests = [f"assert {name}({a}, {b}) == {compute(a, b)}\n" for a, b in _OPERANDS]
    return {
        "prompt": _prompt(wrong, right, one, two),
        "answer": right,
        "code": f"def {name}({one}, {two}):\n    return {one} {wrong} {two}\n",
        "test": f"exec(open('calc.py').read())\n{''.join(tests)}",
    }
