"""Reward of 1 if the program in the response passes its tests, else 0."""

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.rollout.sandbox.programs import Limits, run_python

# Linear time: the end of a fence is searched only once, because no other fence begins before it.
_FENCE = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)```", re.DOTALL)


def code_tests(
    prompt: str,
    response: str,
    answer: Any,
    row: Mapping[str, Any],
    *,
    seconds: float = 5.0,
    memory_bytes: int = 512 << 20,
    partial_credit: bool = False,
    reads_files: bool = False,
) -> float:
    """Runs the last fenced block of the response, or all of it, in a sandbox.

    Args:
        prompt: Unused.
        response: Text with a Python program.
        answer: Python code that raises if the program is wrong, for example ``assert`` lines; or
            ``{"inputs": [...], "outputs": [...]}``, standard input and expected output of each test.
        row: Unused.
        seconds: CPU and wall time of one test; a program that takes longer fails the test.
        memory_bytes: Address space of one test; a program that needs more fails the test.
        partial_credit: True to return the fraction of passed tests.
        reads_files: True to let programs read all files that this user can read; only for kernels without
            Landlock.

    Raises:
        ValueError: If the answer has neither form.
    """
    blocks = _FENCE.findall(response)
    program = blocks[-1] if blocks else response
    limits = Limits(
        seconds=seconds,
        memory_bytes=memory_bytes,
        reads_files=reads_files,
    )
    passed = [_passes(test, limits) for test in _tests(program, answer)]
    return sum(passed) / len(passed) if partial_credit else float(all(passed))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Test:
    parts: tuple[str, ...]
    given: str
    accepts: Callable[[str], bool]


def _passes(test: _Test, limits: Limits) -> bool:
    output = run_python(test.parts, test.given, limits)
    return output is not None and test.accepts(output)


def _tests(program: str, answer: Any) -> Iterator[_Test]:
    if isinstance(answer, str) and answer.strip():
        # Only a program that reaches the end prints the mark; one that exits early fails.
        mark = secrets.token_hex(16)
        parts = (program, answer, f"print('\\n{mark}')")
        yield _Test(parts=parts, given="", accepts=lambda output: output.split()[-1:] == [mark])
    elif isinstance(answer, Mapping) and answer.get("inputs"):
        for given, wanted in zip(answer["inputs"], answer["outputs"], strict=True):
            yield _Test(parts=(program,), given=str(given), accepts=partial(_equal, str(wanted)))
    else:
        raise ValueError(
            "code_tests needs an answer: Python code with asserts, or {'inputs': [...], 'outputs': "
            f"[...]}}, got {type(answer).__name__}"
        )


def _equal(wanted: str, output: str) -> bool:
    """Compares outputs, ignoring white space."""
    return output.split() == wanted.split()
