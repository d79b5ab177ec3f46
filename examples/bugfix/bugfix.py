"""Fixes a one-line bug: the policy writes a sed script, and tests in the episode's sandbox judge it.

The row has a file with a wrong operator and a test that fails; the prompt has the function's name and its
expression. The agent runs the policy's script on the
file and then the test. If it still fails, the policy reads the result and tries once more.
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
    "%": ("mod", operator.mod),
    "|": ("bor", operator.or_),
}
_VARIABLES = "abcdefgh"
_OPERANDS = ((7, 3), (11, 5), (9, 2))
_NUM_TRIES = 2
_PATCH_AND_TEST = (
    "sed -i {script} calc.py && python3 -I -S -B -c 'exec(open(\"test_calc.py\").read())'"
)

_http = httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None))


async def solve(
    base_url: str, api_key: str, model: str, prompt: str, row: Mapping[str, Any], sandbox: Any
) -> float:
    """Plays one episode; returns 1 if the test passes."""
    await sandbox.write("test_calc.py", row["test"])
    messages = [{"role": "user", "content": prompt}]
    for _ in range(_NUM_TRIES):
        response = await _http.post(
            f"{base_url}/chat/completions",
            headers={"Authorization": f"Bearer {api_key}"},
            json={"model": model, "messages": messages, "max_tokens": 8},
        )
        response.raise_for_status()
        reply = response.json()["choices"][0]["message"]
        await sandbox.write("calc.py", row["code"])
        script = shlex.quote(reply["content"])
        result = await sandbox.run(_PATCH_AND_TEST.format(script=script), timeout_s=10)
        if result.exit_status == 0:
            return 1.0
        messages += [reply, {"role": "user", "content": "fails"}]
    return 0.0


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
        if rng.random() < 0.3:
            chat += f"{rng.choice(guesses)}\nuser: fails\nassistant: "
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
