"""Rewards that compare the response with the row's answer: as text, by the row's verifier or by its tests."""

import functools
import json
import math
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, Final

from services.rollout.rewards.code_answers import OutputTests, read_tests
from services.rollout.rewards.code_blocks import compiles, find_program
from services.rollout.rewards.code_verdicts import judged, prints
from services.rollout.rewards.reasoning import answer_part
from services.rollout.sandbox.programs import Limits

# Tasks whose verifiers compare boards as tuples, which JSON converts to lists.
_BOARD_TASKS: Final = frozenset(("arc_agi", "rearc"))


def answer_text(answer: Any, *, reward: str) -> str:
    """Returns the text of an expected answer.

    Raises:
        ValueError: If there is no answer, or no response can equal it: it is a list or a mapping.
    """
    is_missing = answer is None or (isinstance(answer, float) and math.isnan(answer))
    if is_missing:
        raise ValueError(
            f"{reward} needs an answer, but the row has none; remove such rows (data.train.filters), or set "
            "data.answer_column to the column that has it"
        )
    if isinstance(answer, Mapping | list | tuple):
        raise ValueError(  # noqa: TRY004 -- the data is wrong, not an argument's type
            f"{reward} needs text or a number as the answer, got {answer!r:.80}; set data.answer_column to a "
            "column with one value, such as COLUMN.KEY of a mapping, or use a reward of your own"
        )
    return str(answer)


def exact_match(
    prompt: str,
    response: str,
    answer: Any,
    row: Mapping[str, Any],
    *,
    ignore_case: bool = False,
) -> float:
    """Compares the texts without surrounding white space; 72.0 as a number also equals the text ``72``.

    Tables convert a column of integers to floating point if a value is missing.

    Raises:
        ValueError: If there is no answer, or it is not one value.
    """
    given = answer_part(response).strip()
    expected = answer_text(answer, reward="exact_match").strip()
    if ignore_case:
        given, expected = given.casefold(), expected.casefold()
    whole = expected.removesuffix(".0") if isinstance(answer, float) else expected
    return float(given in (expected, whole))


def gym_answer(prompt: str, response: str, answer: Any, row: Mapping[str, Any]) -> float:
    """Returns the score, between 0 and 1, from the verifier of the task that generated the row.

    The answer is the response's text between ``<answer>`` and ``</answer>``, as the package's own prompts
    require it; without these tags, it is the whole response. The verifier has the arguments of the row's
    ``task``, or the task's defaults if the row has none.

    Raises:
        ValueError: If the row is not from ``reasoning-gym``.
    """
    from reasoning_gym.utils import extract_answer

    metadata = row.get("metadata")
    if not isinstance(metadata, Mapping) or "source_dataset" not in metadata:
        raise ValueError(
            "the row has no metadata.source_dataset; use this reward with data.train.source reasoning_gym"
        )
    response = answer_part(response)
    tagged = extract_answer(response)
    found = response.strip() if tagged is None else tagged
    entry = dict(row)
    if metadata["source_dataset"] in _BOARD_TASKS:
        entry["metadata"] = {**metadata, "output": tuple(map(tuple, metadata["output"]))}
    task = row.get("task") or {"name": metadata["source_dataset"], "arguments": {}}
    verify = _gym_verifier(task["name"], json.dumps(task["arguments"], sort_keys=True))
    return float(verify(answer=found, entry=entry))


@functools.cache
def _gym_verifier(name: str, arguments: str) -> Callable[..., Any]:
    import reasoning_gym

    verify: Callable[..., Any] = reasoning_gym.create_dataset(
        name, **json.loads(arguments)
    ).score_answer
    return verify


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
        response: Text with a program; see :func:`services.rollout.rewards.code_blocks.find_program`.
        answer: Tests; see :func:`services.rollout.rewards.code_answers.read_tests`.
        row: Row of the data, whose ``entry_point`` and code of the prompt the tests may need.
        seconds: CPU and wall time of one test; a program that takes longer fails the test.
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
        passed = (prints(program, *pair, limits) for pair in tests.pairs)
        return sum(passed) / len(tests.pairs) if partial_credit else float(all(passed))
    completed = f"{row.get('prompt', '')}\n{textwrap.indent(program, '    ')}"
    if not compiles(program) and compiles(completed):  # the body of the prompt's function
        program = completed
    return judged(program, tests, limits, partial_credit=partial_credit)
