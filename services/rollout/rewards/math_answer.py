"""1 if the response's final expression equals the answer mathematically, else 0."""

from collections.abc import Mapping
from typing import Any

from math_verify import parse, verify

_GSM8K_MARK = "####"


def math_answer(prompt: str, response: str, answer: Any, row: Mapping[str, Any]) -> float:
    r"""Compare final answers with ``math-verify``.

    An answer in GSM8K's form, a derivation that ends in ``#### 72``, counts as what follows the mark. The
    response may end in such a mark too, or in ``\boxed{}``, or in a plain number or formula.
    """
    if answer is None:
        raise ValueError("math_verify needs an answer; set data.answer_column")
    expected = parse(_final_part(str(answer)))
    if not expected:
        raise ValueError(f"math_verify finds no expression in the answer {str(answer)[-80:]!r}")
    return float(verify(expected, parse(_final_part(response))))


def _final_part(text: str) -> str:
    return text.rpartition(_GSM8K_MARK)[2].strip()
