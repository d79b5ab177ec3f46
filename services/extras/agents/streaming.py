"""Replies as server-sent events, while the engine samples them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from services.common.models.tokenizer import Tokenizer
from services.extras.agents.record import Choice, Replies
from services.extras.agents.requests import ApiError, ChatRequest, CompletionRequest
from services.rollout.workflows.reply_formats import ReasoningFormat, ReplyFormat

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

_News = tuple[int, Sequence[int], Sequence[float]]


class Piece(NamedTuple):
    """Text of a reply that has become visible."""

    content: str = ""
    reasoning: str = ""


class NewTokens(NamedTuple):
    """New tokens of a reply."""

    reply_index: int
    """Index of the reply."""
    piece: Piece
    """New text that the agent may see."""
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Logprob of each token."""
    begin: int
    """Number of characters of the reply before these tokens."""


class Formatter(Protocol):
    """Formats the answers to one request of one protocol."""

    def body(self, replies: Replies) -> dict[str, Any]:
        """Returns the body of a complete answer."""

    def begin_events(self, num_replies: int, *, num_prompt_tokens: int) -> Iterator[str]:
        """Yields the events before the first token."""

    def tokens_events(self, new: NewTokens) -> Iterator[str]:
        """Yields the events for new tokens of a reply."""

    def end_events(self, index: int, choice: Choice, rest: Piece) -> Iterator[str]:
        """Yields the last events of a reply: text that was held back, tool calls, finish reason."""

    def last_events(self, replies: Replies) -> Iterator[str]:
        """Yields the events that end a stream."""

    def error_event(self, error: ApiError) -> str:
        """Returns the event that ends a stream with an error."""


class ReplyStream:
    """Produces the events of the replies to one request."""

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        formatter: Formatter,
        tokenizer: Tokenizer,
        layout: ReplyFormat,
    ) -> None:
        self._request = request
        self._formatter = formatter
        self._tokenizer = tokenizer
        self._layout = layout if isinstance(request, ChatRequest) else None
        self._texts: list[VisibleText] = []
        self._num_prompt_tokens = 0
        self._news: asyncio.Queue[_News | None] = asyncio.Queue()
        self._first: _News | None = None

    def begin(self, *, num_prompt_tokens: int, is_open: bool) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        request, layout = self._request, self._layout
        marks = (*request.stop_texts,)
        if isinstance(request, ChatRequest) and request.has_tools and layout is not None:
            marks += layout.tools.begins
        self._texts = [
            VisibleText(
                self._tokenizer,
                marks,
                reasoning=None if layout is None else layout.reasoning,
                is_open=is_open,
                keeps_special=layout is not None and layout.has_special_marks,
            )
            for _ in range(request.n)
        ]

    def add(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        if tokens:
            self._news.put_nowait((index, tokens, logprobs))

    def close(self) -> None:
        self._news.put_nowait(None)

    async def has_begun(self) -> bool:
        """Waits for the first token; returns False if the stream ended without any."""
        self._first = await self._news.get()
        return self._first is not None

    async def events(self, finish: Callable[[], Awaitable[Replies]]) -> AsyncIterator[str]:
        """Yields all events.

        Args:
            finish: Returns the replies when they are complete.
        """
        for event in self._formatter.begin_events(
            len(self._texts), num_prompt_tokens=self._num_prompt_tokens
        ):
            yield event
        news = self._first
        while news is not None:
            for event in self._tokens(*news):
                yield event
            news = await self._news.get()
        try:
            replies = await finish()
        except ApiError as error:
            yield self._formatter.error_event(error)
            return
        for index, choice in enumerate(replies.choices):
            for event in self._last(index, choice):
                yield event
        for event in self._formatter.last_events(replies):
            yield event

    def _tokens(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[float]
    ) -> Iterator[str]:
        text = self._texts[index]
        begin = text.num_characters
        new = NewTokens(index, text.add(tokens), tokens, logprobs, begin)
        yield from self._formatter.tokens_events(new)

    def _last(self, index: int, choice: Choice) -> Iterator[str]:
        """Yields events for the tokens that the engine did not stream, and the reply's last events."""
        text, turn = self._texts[index], choice.turn
        streamed = text.num_tokens
        if last_ids := turn.token_ids[streamed:]:
            yield from self._tokens(index, last_ids, turn.logprobs[streamed:])
        yield from self._formatter.end_events(index, choice, text.rest(choice))


class VisibleText:
    """Text of a growing reply as far as it is final, separated into content and reasoning.

    Holds back incomplete characters, text that may become a mark, and everything from a mark on.

    Args:
        marks: Texts before which the visible reply ends: stop texts and the start of tool calls.
        reasoning: Marks of reasoning; None if replies have none.
        is_open: True if the reply starts inside its reasoning.
        keeps_special: True if marks may be special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        marks: Sequence[str],
        *,
        reasoning: ReasoningFormat | None = None,
        is_open: bool = False,
        keeps_special: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._reasoning = reasoning
        self._is_at_start = reasoning is not None
        self._is_reasoning = is_open
        self._label = ""
        self._keeps_special = keeps_special
        self._tokens: list[int] = []
        # A token's text depends on its neighbours, so decoding starts a few tokens before the new ones.
        self._context = 0
        self._decoded = 0
        self._pending = ""
        self._sent = Piece()
        self.num_characters = 0
        """Number of characters of all decoded tokens."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far."""
        return len(self._tokens)

    def add(self, tokens: Sequence[int]) -> Piece:
        self._tokens += tokens
        old_text = self._decode(self._tokens[self._context : self._decoded])
        text = self._decode(self._tokens[self._context :])
        if text.endswith(_INCOMPLETE):
            return Piece()
        self._context, self._decoded = self._decoded, len(self._tokens)
        self._pending += text[len(old_text) :]
        self.num_characters += len(text) - len(old_text)
        piece = self._visible()
        self._sent = Piece(
            self._sent.content + piece.content, self._sent.reasoning + piece.reasoning
        )
        return piece

    def rest(self, choice: Choice) -> Piece:
        """Returns the content and reasoning of the complete reply that were not returned before."""
        piece = Piece(choice.message.text, choice.message.reasoning_content or "")
        return Piece(
            *(
                text[len(sent_text) :] if text.startswith(sent_text) else ""
                for text, sent_text in zip(piece, self._sent, strict=True)
            )
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        if self._keeps_special:
            tokens = [token for token in tokens if token not in self._tokenizer.stop_ids]
        return self._tokenizer.decode(tokens, keeps_special=self._keeps_special)

    def _visible(self) -> Piece:
        reasoning = self._new_reasoning()
        if self._is_at_start or self._is_reasoning:
            return Piece(reasoning=reasoning)
        if self._reasoning is not None and not self._sent.content:
            self._pending = self._pending.lstrip()
        visible = self._pending[: _first_mark(self._pending, self._marks)]
        if self._marks:  # a reply before a call or a stop text ends without spaces
            visible = visible.rstrip()
        self._pending = self._pending[len(visible) :]
        return Piece(visible, reasoning)

    def _new_reasoning(self) -> str:
        """Removes new reasoning from the held text and returns it; tracks where reasoning begins and ends."""
        if self._reasoning is None:
            return ""
        begin, end = self._reasoning.begin, self._reasoning.end
        if self._is_at_start:
            start = self._pending.lstrip()
            if begin.startswith(start) and start != begin:
                return ""
            self._is_at_start = False
            if start.startswith(begin):
                self._pending, self._is_reasoning = start[len(begin) :], True
                self._label = self._reasoning.label
        if not self._is_reasoning or (self._label and self._label.startswith(self._pending)):
            return ""
        self._pending, self._label = self._pending.removeprefix(self._label), ""
        if not self._sent.reasoning:
            self._pending = self._pending.lstrip()
        before, separator, after = self._pending.partition(end)
        if separator:
            self._pending, self._is_reasoning = after, False
            return before.rstrip()
        # Spaces before the end mark do not belong to the reasoning.
        new = self._pending[: _first_mark(self._pending, (end, *self._marks))].rstrip()
        self._pending = self._pending[len(new) :]
        return new


def _first_mark(text: str, marks: Sequence[str]) -> int:
    """Returns the position of the first mark, or possible start of one, in a text."""
    positions = [len(text)]
    for mark in marks:
        position = text.find(mark)
        starts = range(max(0, len(text) - len(mark) + 1), len(text))
        start_of_mark = next((start for start in starts if mark.startswith(text[start:])), None)
        positions += [
            mark_position
            for mark_position in (position, start_of_mark)
            if mark_position is not None and mark_position >= 0
        ]
    return min(positions)
