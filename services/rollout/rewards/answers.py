"""The answer in a response and in a row, and the reward that compares them as text."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

BEGIN: Final = "<think>"
"""Mark before reasoning; some chat templates end the prompt with it."""
_END: Final = "</think>"


def answer_part(response: str) -> str:
    """Returns the response after its reasoning, which is between ``<think>`` and ``</think>``.

    Unfinished reasoning has no answer: a number in it is one that the policy has not given.
    """
    _, _, answer = response.rpartition(_END)
    return "" if BEGIN in answer else answer


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
    if isinstance(answer, bytes):
        try:
            return answer.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{reward} needs text or a number as the answer, got bytes that are no UTF-8: {answer!r:.80}"
            ) from error
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
    response_answer = answer_part(response).strip()
    reference = answer_text(answer, reward="exact_match").strip()
    if ignore_case:
        response_answer, reference = response_answer.casefold(), reference.casefold()
    whole = reference.removesuffix(".0") if isinstance(answer, float) else reference
    return float(response_answer in (reference, whole))


COMPARISONS: Final[Mapping[str, Callable[..., float]]] = {"exact_match": exact_match}
"""Built-in rewards that only compare texts. They take microseconds, so that no process calls them."""
