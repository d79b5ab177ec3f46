"""Exact tokens of the conversations that an agent samples in one episode.

A request that repeats a recorded conversation and adds to it continues the recorded tokens; only
the addition is tokenized. Any other request starts a new conversation, for example a request of a
helper, or one whose history the agent rewrote. The reward scores the conversation that was continued
last.
"""

import asyncio
import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

from services.common.task_group import gather_in_group
from services.extras.agents.chat import (
    first_tokens,
    following_tokens,
    rendered_reasoning,
    reply,
    text_before,
)
from services.extras.agents.images import EpisodeImages
from services.extras.agents.requests import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Message,
    invalid,
    too_long,
)
from services.rollout.engines.base import split_stop_texts
from services.rollout.failures import CallError, GroupError, refused_prompt
from services.rollout.workflows.base import Episode, Interrupted, SamplingChoice
from services.rollout.workflows.reply_formats import reply_format
from services.rollout.workflows.turns import Turn, num_tokens, observed, token_ids, with_turn

if TYPE_CHECKING:
    from hashlib import _Hash


History = Literal["template", "recorded"]
_Result = TypeVar("_Result")
_MAX_STOP_TEXTS = 256
"""Max stop texts of a request; each token of its replies is compared with all of them."""
# Their tokens take a few milliseconds; those of longer texts would delay all episodes of the process.
_LONG_CHARACTERS = 20_000


class Listener(Protocol):
    """Receives replies while they are sampled."""

    def begin(self, *, num_prompt_tokens: int, is_open: bool) -> None:
        """Called first, with the number of prompt tokens and True if the prompt opened the reasoning."""

    def add(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Receives new tokens of a reply, and their logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One reply to a request."""

    turn: Turn
    """The sampled turn."""
    message: Message
    """The message that the agent receives."""
    stop_text: str | None = None
    """The request's stop text that ended the reply; None if none did."""

    @property
    def finish_reason(self) -> str:
        """Finish reason in OpenAI's terms."""
        return "tool_calls" if self.message.tool_calls else str(self.turn.finish_reason)

    @property
    def reply_tokens(self) -> int:
        return len(self.turn.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """All replies to a request."""

    num_prompt_tokens: int
    """Number of tokens before the replies."""
    choices: tuple[Choice, ...]

    @property
    def num_reply_tokens(self) -> int:
        return sum(len(choice.turn.token_ids) for choice in self.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conversation:
    """Recorded turns, and what identifies a request that continues them."""

    turns: tuple[Turn, ...]
    context_hash: "_Hash"
    """Hash of the tokens before the last turn."""
    meanings: tuple[bytes, ...] = ()
    """For chats: digest of the tools, then of each message."""
    reasoning: tuple[str, ...] = ()
    """For chats: the policy's reasoning in each message; empty if it has none."""
    reasoning_messages: frozenset[int] = frozenset()
    """Indices of the messages whose reasoning is in the turns."""
    text: str = ""
    """For completions: text of the prompt and the replies."""
    has_visible_reply: bool = True
    """True if the last reply has text."""


class EpisodeRecord:
    """Records everything that is sampled for one episode.

    Args:
        episode: Receives the turns of the conversation that was continued last.
        tool_format: Format in which the policy calls tools, or ``auto``.
        history: ``template`` to leave reasoning out of the history if the chat template does, in a new
            conversation; ``recorded`` to continue the recorded one.
        images: Memory of the images; None does not bound it.
    """

    def __init__(
        self,
        episode: Episode,
        tool_format: str = "auto",
        history: History = "template",
        images: EpisodeImages | None = None,
    ) -> None:
        episode.is_served = True
        self._is_rendered = history == "template"
        self._episode = episode
        self._images = images
        self.format = reply_format(episode.tokenizer, tool_format)
        self._chats: list[_Conversation] = []
        self._texts: list[_Conversation] = []
        self._num_asked: Counter[bytes] = Counter()

    async def chat(self, request: ChatRequest, listener: Listener | None = None) -> Replies:
        tools = hashlib.sha256(repr(request.tools).encode()).digest()
        meanings = (tools, *(message.meaning for message in request.messages))
        earlier = _longest(self._chats, lambda chat: _begins(meanings[:-1], chat.meanings))
        reasoning = earlier.reasoning if earlier else ()
        new_messages = request.messages[len(reasoning) :]
        with_reasoning = partial(self._with_reasoning, request, reasoning)
        request, reasoned = await _computed(with_reasoning, request)
        is_rewritten = any(message.role == "assistant" for message in new_messages)
        if earlier is not None and reasoned != earlier.reasoning_messages:
            earlier, is_rewritten = None, True
        self._episode.num_rewritten += is_rewritten
        turns = await self._chat_turns(request, earlier)
        context_hash = _hash(turns, earlier)
        is_open = self.format.opens_reasoning(self._episode.tokenizer, turns[-1].token_ids)
        if listener is not None:
            listener.begin(num_prompt_tokens=num_tokens(turns), is_open=is_open)
        sampled = await self._sample(turns, context_hash, request, request.reply_tokens, listener)
        choices = [
            Choice(
                turn=turn,
                stop_text=self._stop_text(turn, request.stop_texts),
                message=reply(
                    self._episode.tokenizer,
                    turn,
                    layout=self.format,
                    tools=request.tools,
                    stop_texts=request.stop_texts,
                    name=f"{len(turns)}_{index}",
                    has_tools=request.has_tools,
                    is_open=is_open,
                ),
            )
            for index, turn in enumerate(sampled)
        ]
        self._chats += [
            _Conversation(
                turns=(*turns, choice.turn),
                context_hash=context_hash,
                meanings=(*meanings, choice.message.meaning),
                reasoning=(
                    *reasoning,
                    *[""] * len(new_messages),
                    choice.message.reasoning_content or "",
                ),
                reasoning_messages=reasoned | {len(request.messages)}
                if choice.message.reasoning_content
                else reasoned,
            )
            for choice in choices
        ]
        return Replies(num_prompt_tokens=num_tokens(turns), choices=tuple(choices))

    async def complete(
        self, request: CompletionRequest, listener: Listener | None = None
    ) -> Replies:
        """Continues a text or a list of tokens."""
        prompt = request.prompt
        if isinstance(prompt, str):
            earlier = _longest(self._texts, lambda conversation: _continues(prompt, conversation))
            seen_text = earlier.text if earlier else ""
            rest, continues = prompt.removeprefix(seen_text), earlier is not None
            new_tokens = await _computed(partial(self._encoded, rest, continues=continues), request)
        else:
            self._check_ids(prompt, "prompt")
            conversations = [*self._texts, *self._chats]
            earlier = _longest(
                conversations, lambda conversation: _begins(prompt, token_ids(conversation.turns))
            )
            new_tokens = list(prompt[num_tokens(earlier.turns) :] if earlier else prompt)
        turns = self._extended(earlier, observed(new_tokens))
        context_hash = _hash(turns, earlier)
        if listener is not None:
            listener.begin(num_prompt_tokens=num_tokens(turns), is_open=False)
        sampled = await self._sample(turns, context_hash, request, request.max_tokens, listener)
        tokenizer = self._episode.tokenizer
        choices = [
            Choice(
                turn=turn,
                message=Message(
                    role="assistant",
                    content=text_before(tokenizer.decode(turn.token_ids), request.stop_texts),
                ),
            )
            for turn in sampled
        ]
        text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        self._texts += [
            _Conversation(
                turns=(*turns, choice.turn),
                context_hash=context_hash,
                text=text + choice.message.text,
                has_visible_reply=bool(choice.message.text),
            )
            for choice in choices
        ]
        return Replies(num_prompt_tokens=num_tokens(turns), choices=tuple(choices))

    def _with_reasoning(
        self, request: ChatRequest, reasoning: Sequence[str]
    ) -> tuple[ChatRequest, frozenset[int]]:
        """Adds recorded reasoning, which agents often do not send back, to a request.

        Returns:
            The request, and the indices of the messages whose reasoning belongs to the history: with
            ``history: template``, those whose reasoning the chat template renders in this request.
        """
        texts = {index: text for index, text in enumerate(reasoning) if text}
        if not texts:
            return request, frozenset()
        messages = [
            message.model_copy(update={"reasoning_content": texts[index]})
            if index in texts
            else message
            for index, message in enumerate(request.messages)
        ]
        request = request.model_copy(update={"messages": tuple(messages)})
        if not self._is_rendered:
            return request, frozenset(texts)
        return request, rendered_reasoning(self._episode.tokenizer, messages, request.tools, texts)

    async def count(self, request: ChatRequest) -> int:
        """Returns the number of tokens of a chat, up to the start of the reply."""
        tokenizer = self._episode.tokenizer
        first = partial(first_tokens, tokenizer, request.messages, request.tools)
        tokens = await _computed(first, request)
        turn = await self._observed(tokens, request.messages, (), keeps=False)
        return len(turn.token_ids)

    async def _chat_turns(
        self, request: ChatRequest, earlier: _Conversation | None
    ) -> tuple[Turn, ...]:
        tokenizer = self._episode.tokenizer
        if earlier is None:
            first = partial(first_tokens, tokenizer, request.messages, request.tools)
            tokens = await _computed(first, request)
            return self._extended(None, await self._observed(tokens, request.messages, ()))
        # The first digest is the tools', the last one the reply's.
        reply_index = len(earlier.meanings) - 2
        following = partial(
            following_tokens,
            tokenizer,
            request.messages,
            request.tools,
            reply_index=reply_index,
            last_id=next(iter(earlier.turns[-1].token_ids[-1:]), None),
        )
        new_tokens = await _computed(following, request)
        new = request.messages[reply_index + 1 :]
        return self._extended(earlier, await self._observed(new_tokens, new, earlier.turns))

    async def _observed(
        self,
        new_ids: Sequence[int],
        messages: Sequence[Message],
        after: tuple[Turn, ...],
        *,
        keeps: bool = True,
    ) -> Turn:
        """Returns the turn of added tokens, with the images of the messages that they contain."""
        images = [url for message in messages for url in message.images]
        if not images:
            return observed(new_ids)
        try:
            if self._images is not None:
                return await self._images.look(new_ids, images, after, keeps=keeps)
            return await self._episode.look(new_ids, images, after=after)
        except CallError as error:
            raise ApiError(400, error.message, code=error.kind, param="messages") from error

    def _extended(self, earlier: _Conversation | None, turn: Turn) -> tuple[Turn, ...]:
        """Returns the recorded turns and the added one; if it has no tokens, the last reply is continued.

        Raises:
            ApiError: If there are no tokens at all, or no room for a reply.
        """
        turns = earlier.turns if earlier else ()
        if not turns and not turn.token_ids:
            raise invalid("the prompt has no tokens; expected at least one", param="prompt")
        turns = (*turns, turn) if turn.token_ids else turns
        if self._room(turns) < 1:
            self._episode.is_full = True
            limits = self._episode.limits
            raise too_long(
                f"the conversation has {num_tokens(turns[1:])} tokens after its first messages "
                f"({len(turns[0].token_ids)}), and rollout.max_response_tokens "
                f"({limits.max_response_tokens}) or the model's context ({limits.max_tokens}) leaves no room "
                "for a reply"
            )
        return turns

    def _room(self, turns: Sequence[Turn]) -> int:
        limit = self._episode.limits.response_tokens(prompt_tokens=len(turns[0].token_ids))
        return limit - num_tokens(turns[1:])

    async def _sample(
        self,
        turns: tuple[Turn, ...],
        context_hash: "_Hash",
        request: ChatRequest | CompletionRequest,
        max_tokens: int | None,
        listener: Listener | None,
    ) -> list[Turn]:
        """Samples all replies concurrently.

        Args:
            asked: Hash of the tokens of ``turns``.

        Raises:
            Interrupted: If the episode was interrupted.
        """
        room = self._room(turns)
        stop_texts, stop_ids = self._stops(request)
        context = context_hash.digest()
        number = self._num_asked[context]
        self._num_asked[context] += request.n
        draws = [
            SamplingChoice(
                seed=self._seed(context, request.seed, number=number, index=index),
                offset=0,
                max_tokens=room if max_tokens is None else min(room, max_tokens),
                stop_texts=(*self._episode.limits.stop_texts, *stop_texts),
                stop_token_ids=stop_ids,
            )
            for index in range(request.n)
        ]
        cut_turns = [
            self._episode.replayed(turns, number=number + index) for index in range(request.n)
        ]
        try:
            sampled = await gather_in_group(
                self._episode.sample_after(
                    turns,
                    draw,
                    cut_turn=cut_turn,
                    on_tokens=partial(listener.add, index) if listener is not None else None,
                )
                for index, (draw, cut_turn) in enumerate(zip(draws, cut_turns, strict=True))
            )
        except GroupError as error:
            raise invalid(str(error)) from None
        episode = self._episode
        for turn in sampled:
            episode.conversations = with_turn(episode.conversations, turns, turn)
        episode.turns = [*turns, sampled[0]]  # the first reply continues the episode
        if any(turn.is_cut for turn in sampled):
            raise Interrupted
        return sampled

    def _stop_text(self, turn: Turn, stop_texts: Sequence[str]) -> str | None:
        if not stop_texts or turn.finish_reason != "stop":
            return None
        tokenizer = self._episode.tokenizer
        text = tokenizer.decode(turn.token_ids)
        positions = {stop: position for stop in stop_texts if (position := text.find(stop)) >= 0}
        last = tokenizer.decode(turn.token_ids[-1:], keeps_special=True)
        return min(
            positions, key=positions.__getitem__, default=last if last in stop_texts else None
        )

    def _stops(
        self, request: ChatRequest | CompletionRequest
    ) -> tuple[tuple[str, ...], frozenset[int]]:
        """Returns texts and tokens that end the reply, in addition to the episode's."""
        ids = frozenset(request.stop_token_ids or ())
        self._check_ids(ids, "stop_token_ids")
        if (count := len(request.stop_texts)) > _MAX_STOP_TEXTS:
            raise invalid(
                f"stop has {count:,} texts, more than {_MAX_STOP_TEXTS}; send fewer", param="stop"
            )
        try:
            texts, special_ids = split_stop_texts(request.stop_texts, self._episode.tokenizer)
        except ValueError as error:
            raise invalid(str(error), param="stop") from error
        return texts, special_ids | ids

    def _check_ids(self, ids: Iterable[int], param: str) -> None:
        size = self._episode.tokenizer.vocab_size
        unknown_id = next((token_id for token_id in ids if not 0 <= token_id < size), None)
        if unknown_id is not None:
            raise invalid(
                f"{param} has {unknown_id}, but the model has tokens 0 to {size - 1}; use some of these",
                param=param,
            )

    def _seed(self, context: bytes, request_seed: int | None, *, number: int, index: int) -> int:
        """Returns a distinct seed for each reply to a context, equal if the agent repeats its requests."""
        suffix = f"{number + index}" if request_seed is None else f"{request_seed}+{index}"
        text = f"{self._episode.limits.seed}/{suffix}/".encode() + context
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1

    def _encoded(self, text: str, *, continues: bool) -> list[int]:
        try:
            return self._episode.tokenizer.encode(text, continues=continues)
        except ValueError as error:
            raise invalid(str(error), param="prompt") from error


async def _computed(
    compute: Callable[[], _Result], request: ChatRequest | CompletionRequest
) -> _Result:
    """Returns the result of a computation over a request's texts, in a thread if they are long."""
    is_long = request.num_characters > _LONG_CHARACTERS
    return await asyncio.to_thread(compute) if is_long else compute()


def refuse_images(pictures: Sequence[object]) -> None:
    """Refuses a row whose images would not be shown. Raises GroupError.

    Args:
        pictures: Images of a prompt whose messages an agent or an environment writes.
    """
    if pictures:
        raise refused_prompt(
            "prompt_malformed",
            f"the row has {len(pictures)} images, but the agent or the environment writes the messages; let "
            "it send the images, and name them in another column than data.image_column",
        )


def check_history(history: str) -> None:
    """Raises ValueError if a workflow's argument ``history`` is unknown."""
    if history not in get_args(History):
        raise ValueError(
            f"rollout.workflow_arguments.history must be one of {', '.join(get_args(History))}, got "
            f"{history!r}"
        )


def _longest(
    conversations: Iterable[_Conversation], fits: Callable[[_Conversation], bool]
) -> _Conversation | None:
    fitting = [conversation for conversation in conversations if fits(conversation)]
    # Messages count first: a conversation without reasoning has more messages, but maybe fewer tokens.
    return max(
        fitting,
        key=lambda candidate: (len(candidate.meanings), num_tokens(candidate.turns)),
        default=None,
    )


def _hash(turns: Sequence[Turn], earlier: _Conversation | None) -> "_Hash":
    """Hashes the tokens of turns, starting from the hash of the conversation that they continue."""
    context_hash = hashlib.sha256() if earlier is None else earlier.context_hash.copy()
    try:
        for turn in turns[0 if earlier is None else len(earlier.turns) - 1 :]:
            context_hash.update(array("q", turn.token_ids))
            if turn.model_inputs is not None:
                context_hash.update(turn.model_inputs.digest.encode())
    except OverflowError as error:
        raise invalid("prompt: a token id has more than 64 bits", param="prompt") from error
    return context_hash


def _begins(sequence: Sequence[Any], prefix: Sequence[Any]) -> bool:
    return tuple(sequence[: len(prefix)]) == tuple(prefix)


def _continues(prompt: str, conversation: _Conversation) -> bool:
    """Returns True if a text continues at the end of a reply that the agent could see."""
    if prompt == conversation.text:
        return conversation.turns[-1].finish_reason == "length"
    return prompt.startswith(conversation.text) and conversation.has_visible_reply
