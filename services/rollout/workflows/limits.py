"""How the tokens of an episode are drawn, and when it ends."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """How the tokens of an episode are drawn and when it ends."""

    seed: int
    """Seed of this sample."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    max_response_tokens: int
    """Most tokens of the response, observed ones included, after any prompt."""
    max_tokens: int
    """Most tokens of a prompt with its response: what the engine holds."""
    stop_texts: tuple[str, ...]
    """Texts that end a turn."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end a turn, besides those of the tokenizer."""
    segment_tokens: int | None = None
    """Tokens after which the episode is interrupted, wherever it is; None never is."""

    def response_tokens(self, *, prompt_tokens: int) -> int:
        """Most tokens of the response to a prompt."""
        return min(self.max_response_tokens, self.max_tokens - prompt_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How one turn is drawn."""

    seed: int
    """Seed of the turn's random stream."""
    offset: int
    """Tokens drawn from the stream before the turn."""
    max_tokens: int
    """Most tokens of the turn."""
    stop_texts: tuple[str, ...]
    """Texts that end it."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end it, besides those of the episode."""
