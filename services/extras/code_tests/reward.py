"""Reward that runs the tests of a row on the program of a response."""

import textwrap
from collections.abc import Mapping
from typing import Any

from services.extras.code_tests.answers import OutputTests, read_tests
from services.extras.code_tests.blocks import compiles, find_program
from services.extras.code_tests.programs import Limits
from services.extras.code_tests.verdicts import judged, prints
from services.rollout.rewards.answers import answer_part


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
    """Runs the Python program of the response in a sandbox, and its tests outside of its reach.

    Args:
        response: Text with a program; see :func:`services.extras.code_tests.blocks.find_program`.
        answer: Tests; see :func:`services.extras.code_tests.answers.read_tests`.
        row: Row of the data, whose ``entry_point`` and code of the prompt the tests may need.
        seconds: CPU and wall time of one test, without the interpreter's start; a program that takes longer
            fails the test.
        memory_bytes: Address space of one test; a program that needs more fails the test.
        partial_credit: True to return the fraction of passed tests.
        reads_files: True to let programs read all files that this user can read; only for kernels without
            Landlock.

    Raises:
        ValueError: If the answer is no test of a program.
    """
    tests = read_tests(answer, row)
    program = find_program(answer_part(response))
    limits = Limits(seconds=seconds, memory_bytes=memory_bytes, reads_files=reads_files)
    if isinstance(tests, OutputTests):
        verdicts = (prints(program, *pair, limits) for pair in tests.pairs)
        return sum(verdicts) / len(tests.pairs) if partial_credit else float(all(verdicts))
    completed = f"{row.get('prompt', '')}\n{textwrap.indent(program, '    ')}"
    if not compiles(program) and compiles(completed):  # the body of the prompt's function
        program = completed
    return judged(program, tests, limits, partial_credit=partial_credit)
