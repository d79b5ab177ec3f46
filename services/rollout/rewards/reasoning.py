"""Separates a response's answer from the reasoning before it. Pure."""

from typing import Final

BEGIN: Final = "<think>"
"""Mark before reasoning; some chat templates end the prompt with it."""
_END: Final = "</think>"


def answer_part(response: str) -> str:
    """Returns the response after its reasoning, which is between ``<think>`` and ``</think>``.

    Unfinished reasoning has no answer: a number in it is one that the policy has not given.
    """
    _, _, answer = response.rpartition(_END)
    return "" if BEGIN in answer else answer
