"""Texts that end a response."""

from collections.abc import Callable, Sequence

from services.common.models.tokenizer import Tokenizer
from services.rollout.engines.base import GenerationRequest

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""


def ends_in_stop_text(request: GenerationRequest, new: Sequence[int], decode: Decode) -> bool:
    """Return whether the last token completed one of the request's stop texts.

    Args:
        request: Its stop texts are matched over the whole turn, of which the context may have a part.
        new: Tokens of the response so far; at least one.
        decode: Token ids to text.
    """
    # A token holds at least a byte of a text.
    num_tokens = max(len(text.encode()) for text in request.stop_texts) + 1
    tail = [*new[-num_tokens:]]
    if num_earlier := min(num_tokens - len(tail), request.turn_tokens):
        tail = [*request.context_ids[-num_earlier:], *tail]
    text = decode(tail)
    return any(stop in text for stop in request.stop_texts)


def split_stop_texts(
    texts: Sequence[str], tokenizer: Tokenizer
) -> tuple[tuple[str, ...], frozenset[int]]:
    """Separate the stop texts that are special tokens, which decoded text leaves out.

    Returns:
        The texts to look for in decoded text, and the ids of those that are special tokens.

    Raises:
        ValueError: If a text is empty, or has a special token and something else, so that it never appears.
    """
    special = tokenizer.special_tokens
    plain = tuple(text for text in texts if text not in special)
    for text in plain:
        if not text:
            raise ValueError("a stop text is empty; give at least one character")
        if inner := [token for token in special if token in text]:
            raise ValueError(
                f"the stop text {text!r} contains the special token {inner[0]!r}, which is no text; let a "
                "stop text be one special token, or have none"
            )
    return plain, frozenset(special[text] for text in texts if text in special)
