"""Detects texts that end a response."""

from collections.abc import Callable, Sequence

from services.common.models.tokenizer import Tokenizer
from services.rollout.engines.base import GenerationRequest

Decode = Callable[[Sequence[int]], str]
"""Converts token ids to text."""


def ends_in_stop_text(request: GenerationRequest, new: Sequence[int], decode: Decode) -> bool:
    """Returns True if the last token completed one of the request's stop texts.

    Args:
        request: Request whose stop texts are matched over the entire turn, which may begin in the context.
        new: Tokens of the response so far; at least one.
        decode: Converts token ids to text.
    """
    # Each token contributes at least one byte of text.
    num_tokens = max(len(text.encode()) for text in request.stop_texts) + 1
    tail = [*new[-num_tokens:]]
    if num_earlier := min(num_tokens - len(tail), request.turn_tokens):
        tail = [*request.context_ids[-num_earlier:], *tail]
    text = decode(tail)
    return any(stop in text for stop in request.stop_texts)


def split_stop_texts(
    texts: Sequence[str], tokenizer: Tokenizer
) -> tuple[tuple[str, ...], frozenset[int]]:
    """Separates stop texts that are special tokens, because decoded text omits those.

    Returns:
        Texts to search for in decoded text, and the ids of the special tokens.

    Raises:
        ValueError: If a text is empty, or mixes a special token with other text and so could never match.
    """
    special = tokenizer.special_tokens
    plain = tuple(text for text in texts if text not in special)
    for text in plain:
        if not text:
            raise ValueError("a stop text is empty; expected at least one character")
        if inner := [token for token in special if token in text]:
            raise ValueError(
                f"the stop text {text!r} contains the special token {inner[0]!r}; a stop text must be one "
                "special token, or contain none"
            )
    return plain, frozenset(special[text] for text in texts if text in special)
