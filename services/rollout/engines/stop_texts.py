"""Texts that end a response."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""


def ends_in_stop_text(stop_texts: Sequence[str], response: Sequence[int], decode: Decode) -> bool:
    """Tell whether the last token completed one of the texts.

    Args:
        stop_texts: The texts.
        response: Tokens of the response so far.
        decode: Token ids to text.
    """
    # A token holds at least a byte of a text.
    num_tokens = max(len(text.encode()) for text in stop_texts) + 1
    tail = decode(response[-num_tokens:])
    return any(text in tail for text in stop_texts)
