"""Replies as server-sent events, while the engine samples them."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from services.common.models.tokenizer import Tokenizer
from services.rollout.openai.record import Choice, Replies
from services.rollout.openai.replies import Formatter
from services.rollout.openai.requests import ApiError, ChatRequest, CompletionRequest
from services.rollout.workflows.tool_calls import TOOL_CALL_BEGIN

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

_News = tuple[int, Sequence[int], Sequence[float]]


class ReplyStream:
    """Produces the events of the replies to one request.

    Args:
        request: The request.
        formatter: Formats the events.
        tokenizer: The model's.
    """

    def __init__(
        self, request: ChatRequest | CompletionRequest, formatter: Formatter, tokenizer: Tokenizer
    ) -> None:
        self._formatter = formatter
        self._is_chat = isinstance(request, ChatRequest)
        marks = (*request.stop_texts,)
        if isinstance(request, ChatRequest) and request.has_tools:
            marks += (TOOL_CALL_BEGIN,)
        self._texts = [VisibleText(tokenizer, marks) for _ in range(request.n)]
        self._news: asyncio.Queue[_News | None] = asyncio.Queue()
        self._first: _News | None = None

    def listen(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Adds tokens of a reply."""
        if tokens:
            self._news.put_nowait((index, tokens, logprobs))

    def close(self) -> None:
        """Ends the stream of tokens."""
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
        if self._is_chat:
            for index in range(len(self._texts)):
                yield self._formatter.begin_event(index)
        news = self._first
        while news is not None:
            yield self._event(*news)
            news = await self._news.get()
        try:
            replies = await finish()
        except ApiError as error:
            yield f"data: {json.dumps(error.body)}\n\n"
            return
        for index, choice in enumerate(replies.choices):
            for event in self._last(index, choice):
                yield event
        for event in self._formatter.last_events(replies):
            yield event

    def _event(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> str:
        text = self._texts[index]
        begin = text.num_characters
        return self._formatter.tokens_event(index, text.add(tokens), tokens, logprobs, begin=begin)

    def _last(self, index: int, choice: Choice) -> list[str]:
        """Returns events for the tokens that the engine did not stream, and the reply's last event."""
        told = self._texts[index].num_tokens
        turn = choice.turn
        left = turn.token_ids[told:]
        events = [self._event(index, left, turn.logprobs[told:])] if left else []
        rest = self._texts[index].rest(choice.message.text)
        return [*events, self._formatter.end_event(index, choice, rest)]


class VisibleText:
    """Text of a growing reply, as far as it is final.

    Holds back incomplete characters, text that may become a mark, and everything from a mark on.

    Args:
        tokenizer: The model's.
        marks: Texts before which the visible reply ends: stop texts and the start of tool calls.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._tokens: list[int] = []
        # A token's text depends on its neighbours, so decoding starts a few tokens before the new ones.
        self._context = 0
        self._decoded = 0
        self._held = ""
        self._sent = ""
        self.num_characters = 0
        """Number of characters of all decoded tokens."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far."""
        return len(self._tokens)

    def add(self, tokens: Sequence[int]) -> str:
        """Adds tokens; returns the text that became visible."""
        self._tokens += tokens
        known = self._tokenizer.decode(self._tokens[self._context : self._decoded])
        text = self._tokenizer.decode(self._tokens[self._context :])
        if text.endswith(_INCOMPLETE):
            return ""
        self._context, self._decoded = self._decoded, len(self._tokens)
        self._held += text[len(known) :]
        self.num_characters += len(text) - len(known)
        place = self._first_mark()
        seen, self._held = self._held[:place], self._held[place:]
        self._sent += seen
        return seen

    def rest(self, whole: str) -> str:
        """Returns the part of the whole text that was not returned before."""
        return whole[len(self._sent) :] if whole.startswith(self._sent) else ""

    def _first_mark(self) -> int:
        """Returns the position of the first mark, or possible start of one, in the held text."""
        places = [len(self._held)]
        for mark in self._marks:
            found = self._held.find(mark)
            starts = range(max(0, len(self._held) - len(mark) + 1), len(self._held))
            begun = next((start for start in starts if mark.startswith(self._held[start:])), None)
            places += [place for place in (found, begun) if place is not None and place >= 0]
        return min(places)
