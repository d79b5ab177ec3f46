"""Runs the tests of a program and counts those that it passes."""

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from math import isclose
from typing import Any, Final

from services.extras.code_tests.answers import JudgedTests
from services.extras.code_tests.programs import Limits, run_judged, run_python

_START_S: Final = 10.0
"""Wall time of the start of two processes, which is no part of a test."""
_PRECISION: Final = 1e-9
"""Relative difference of printed numbers that count as equal; from zero, the absolute one."""


def prints(program: str, stdin: str, expected: str, limits: Limits) -> bool:
    """Returns True if a program turns standard input into the expected output."""
    output = run_python([program], stdin, limits)
    return output is not None and same_output(expected, output)


def same_output(expected: str, output: str) -> bool:
    """Compares outputs word by word; numbers with a fraction are compared by value."""
    words, printed = expected.split(), output.split()
    return len(words) == len(printed) and all(map(_same_word, words, printed))


def _same_word(expected: str, printed: str) -> bool:
    if expected == printed:
        return True
    if not ("." in expected or "." in printed) or len(expected) + len(printed) > 200:
        return False
    try:
        expected_number, value = Decimal(expected), Decimal(printed)
    except InvalidOperation:
        return False
    return expected_number == value or isclose(
        expected_number, value, rel_tol=_PRECISION, abs_tol=0.0 if expected_number else _PRECISION
    )


def judged(program: str, tests: JudgedTests, limits: Limits, *, partial_credit: bool) -> float:
    """Returns 1 if a program passes all tests, or the fraction that it passes.

    Expected results with one item, as in APPS, are either lists or one value each. The reading that is
    better for the program holds for all its tests.

    Raises:
        ValueError: If a test judges no program.
    """
    readings = _verdicts(program, tests, limits, is_partial=partial_credit)
    counts = [sum(verdict[reading] for verdict in readings) for reading in (0, -1)]
    are_wrapped = all(len(verdict) > 1 for verdict in readings)
    num_passed = max(counts) if are_wrapped else counts[0]
    share = num_passed / len(tests.tests)
    return share if partial_credit else float(share == 1.0)


def _verdicts(
    program: str, tests: JudgedTests, limits: Limits, *, is_partial: bool
) -> list[Sequence[bool]]:
    """Returns the readings of each test; ends at the first failed one unless ``is_partial``."""
    readings = list[Sequence[bool]]()
    while len(readings) < len(tests.tests):
        rest = tests.tests[len(readings) :]
        request: dict[str, Any] = {
            "tests": rest,
            "prelude": tests.prelude,
            "seconds": limits.seconds,
            "stops_at_failure": not is_partial,
        }
        total = replace(limits, seconds=limits.seconds * len(rest) + _START_S)
        verdicts = run_judged([*tests.preamble, program], request, total)
        for verdict in verdicts:
            if "unjudged" in verdict:
                raise ValueError(
                    f"code_tests: test {len(readings) + 1} judges no program: {verdict['unjudged']}; correct "
                    "or remove the row"
                )
            readings.append([bool(is_passed) for is_passed in verdict["passed"]])
        if len(verdicts) < len(rest) and not (verdicts and verdicts[-1].get("ended")):
            readings.append([False])
        has_started = bool(verdicts) and verdicts[-1].get("started", True)
        if not has_started or (not is_partial and not any(readings[-1])):
            break
    return readings
