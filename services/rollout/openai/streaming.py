"""A reply as server-sent events, token by token while the engine makes them."""

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
    """Events of the replies to one request.

    Args:
        request: What was asked.
        formatter: Writes the events.
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
        """Take in tokens of a reply."""
        if tokens:
            self._news.put_nowait((index, tokens, logprobs))

    def close(self) -> None:
        """No more tokens come."""
        self._news.put_nowait(None)

    async def has_begun(self) -> bool:
        """Wait for the first token; False if there is none."""
        self._first = await self._news.get()
        return self._first is not None

    async def events(self, finish: Callable[[], Awaitable[Replies]]) -> AsyncIterator[str]:
        """All events.

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
        """Tokens that the engine did not tell of, and the end."""
        told = self._texts[index].num_tokens
        turn = choice.turn
        left = turn.token_ids[told:]
        events = [self._event(index, left, turn.logprobs[told:])] if left else []
        rest = self._texts[index].rest(choice.message.text)
        return [*events, self._formatter.end_event(index, choice, rest)]


class VisibleText:
    """The text of a reply so far, as far as it will stay.

    Bytes that make no character yet are held back, and so is what may become a mark, and all that follows
    one.

    Args:
        tokenizer: The model's.
        marks: Texts that a reply ends before, or that begin something else.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._tokens: list[int] = []
        # Texts of a few tokens are not those of each: decoding begins a little before what is new.
        self._context = 0
        self._decoded = 0
        self._held = ""
        self._sent = ""
        self.num_characters = 0
        """Characters of all tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._tokens)

    def add(self, tokens: Sequence[int]) -> str:
        """Take in tokens; returns what can be seen now."""
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
        """What was not seen yet of the whole text."""
        return whole[len(self._sent) :] if whole.startswith(self._sent) else ""

    def _first_mark(self) -> int:
        """Where the held text has, or could be about to have, a mark."""
        places = [len(self._held)]
        for mark in self._marks:
            found = self._held.find(mark)
            starts = range(max(0, len(self._held) - len(mark) + 1), len(self._held))
            begun = next((start for start in starts if mark.startswith(self._held[start:])), None)
            places += [place for place in (found, begun) if place is not None and place >= 0]
        return min(places)
