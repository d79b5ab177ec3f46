"""Demonstrations: answers in the data, as the tokens that the policy would have read and sampled.

The prompt is encoded as for sampling. Each later turn is encoded separately, as an engine would continue
after it. In a chat, the text that the template writes between the opening of an assistant's turn and the
end of its message counts as the assistant's. If the template marks the assistant's text itself
(``{% generation %}``), its marks count instead. The token that ends an answer belongs to it in any case.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any, Literal, cast

from services.common.models.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
Turns = Literal["all", "last"]


@dataclass(frozen=True, slots=True)
class DemonstrationTurn:
    """Consecutive tokens of a demonstration that come from one side."""

    token_ids: tuple[int, ...]
    is_answer: bool
    """True for tokens of the assistant that train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A prompt and its continuation."""

    prompt_ids: tuple[int, ...]
    """Tokens before the first answer that trains."""
    stretches: tuple[DemonstrationTurn, ...]
    """The response; its first stretch is an answer."""
    text: str
    """Text of the last answer."""

    def cut(self, num_tokens: int) -> "Demonstration":
        """Returns a copy with at most ``num_tokens`` tokens after the prompt."""
        turns: list[DemonstrationTurn] = []
        for stretch in self.stretches:
            if num_tokens > 0:
                turns.append(DemonstrationTurn(stretch.token_ids[:num_tokens], stretch.is_answer))
            num_tokens -= len(stretch.token_ids)
        return Demonstration(prompt_ids=self.prompt_ids, stretches=tuple(turns), text=self.text)

    @property
    def num_tokens(self) -> int:
        """Number of tokens after the prompt."""
        return sum(len(stretch.token_ids) for stretch in self.stretches)


def of_text(prompt: str, answer: str, tokenizer: Tokenizer) -> Demonstration:
    """Returns the demonstration of a prompt and its answer, with an end-of-sequence token."""
    answer_ids = (*tokenizer.encode(answer, continues=True), tokenizer.eos_id)
    return Demonstration(
        prompt_ids=tuple(tokenizer.encode_prompt(prompt)),
        stretches=(DemonstrationTurn(answer_ids, is_answer=True),),
        text=answer,
    )


def of_chat(
    messages: Messages, tools: Messages, tokenizer: Tokenizer, *, turns: Turns
) -> Demonstration:
    """Returns the demonstration of a conversation with one or more answers.

    Args:
        messages: Messages; the last one is the assistant's, the first one is not.
        tools: Tools that the assistant could call.
        turns: ``all`` if all of the assistant's messages train, ``last`` for the last one only.

    Raises:
        ValueError: If the rendered chat does not show exactly where the answers are.
    """
    marked = tokenizer.marked_chat(messages, tools)
    if marked is None:
        stretches = [*_rendered(messages, tools, tokenizer, turns)]
    else:
        count = sum(message["role"] == "assistant" for message in messages)
        stretches = _of_marks(*_with_ends(*marked, tokenizer, num_answers=count), turns)
    answers = [index for index, stretch in enumerate(stretches) if stretch.is_answer]
    if not answers or answers[0] == 0:
        raise ValueError(
            "the chat template marks no assistant token after a prompt; correct its {% generation %} "
            "marks"
        )
    before = stretches[: answers[0]]
    return Demonstration(
        prompt_ids=tuple(token for stretch in before for token in stretch.token_ids),
        stretches=tuple(stretches[answers[0] :]),
        text=str(messages[-1].get("content") or ""),
    )


def as_messages(value: object, name: str) -> Messages:
    """Returns a value that must be chat messages.

    Raises:
        ValueError: If it is anything else; ``name`` names the value in the message.
    """
    is_chat = isinstance(value, Sequence) and not isinstance(value, str) and bool(value)
    if not is_chat or not all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str)
        for message in cast("Messages", value)
    ):
        raise ValueError(
            f"{name} must be chat messages, each with role and content, got {value!r:.60}"
        )
    return cast("Messages", value)


def as_tools(value: object) -> Messages:
    """Returns the tools of a row in the format of OpenAI's API; empty if it has none.

    Args:
        value: A list of tools, its JSON text, or an empty value.

    Raises:
        ValueError: If it is anything else.
    """
    tools = value
    if isinstance(value, str) and value.strip():
        with suppress(ValueError, RecursionError):
            tools = json.loads(value)
    if not tools:
        return ()
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(
            f"the column 'tools' must be a list of tools, or its JSON text, got {value!r:.60}; correct or "
            "rename it"
        )
    return tools


def check_answered(messages: Messages, name: str) -> None:
    """Checks that a conversation ends, but does not start, with a message of the assistant.

    Raises:
        ValueError: If it does not; ``name`` names the conversation in the message.
    """
    first, last = messages[0]["role"], messages[-1]["role"]
    if last != "assistant":
        raise ValueError(
            f"{name} ends with a message of {last!r}, but training needs a last message of 'assistant'; "
            "add it, or set data.answer_column to the answer's column"
        )
    if first == "assistant":
        raise ValueError(
            f"{name} starts with a message of 'assistant', which has no prompt; start with a message of "
            "'system' or 'user'"
        )


def _rendered(
    messages: Messages, tools: Messages, tokenizer: Tokenizer, turns: Turns
) -> Iterator[DemonstrationTurn]:
    """Yields the turns between renderings of successive prefixes of the conversation."""
    indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    prefix = answer = ""
    for index in indices if turns == "all" else indices[-1:]:
        before, after = _around_answer(messages, tools, tokenizer, index=index)
        if not before.startswith(prefix):
            prefix, answer = _without_ending(prefix, answer, before, tokenizer)
        prompt_ids: Sequence[int] = tokenizer.encode(before[len(prefix) :], continues=bool(prefix))
        if prefix:
            answer_ids, prompt_ids = _ended(answer, prompt_ids, tokenizer)
            yield DemonstrationTurn(tuple(answer_ids), is_answer=True)
        yield DemonstrationTurn(tuple(prompt_ids), is_answer=False)
        prefix, answer = after, after[len(before) :]
    answer_ids, _ = _ended(answer, [], tokenizer)
    yield DemonstrationTurn(tuple(answer_ids), is_answer=True)


def _around_answer(
    messages: Messages, tools: Messages, tokenizer: Tokenizer, *, index: int
) -> tuple[str, str]:
    """Returns the rendered conversation up to the start, and up to the end, of one answer.

    Args:
        index: Index of the answer's message.
    """
    before = tokenizer.render_chat(messages[:index], tools)
    after = tokenizer.render_chat(messages[: index + 1], tools, opens_answer=False)
    if not after.startswith(before):
        raise ValueError(
            "the chat template's generation prompt differs from the start of a rendered answer, so the "
            "start of the answer is unknown; check data.chat_template_arguments, or add {% generation %} "
            "marks to the template"
        )
    return before, after


def _without_ending(
    prefix: str, answer: str, following: str, tokenizer: Tokenizer
) -> tuple[str, str]:
    """Returns a conversation and its last answer without the tokens that only the end of a chat has.

    Phi-3's template ends a chat with the end-of-sequence token, Nemotron's only the last answer.

    Args:
        prefix: The rendered conversation up to the end of the answer.
        following: The rendered conversation with the messages after the answer.

    Raises:
        ValueError: If more than these tokens differ.
    """
    same = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prefix, following, strict=False))
    )
    starts = [prefix.rfind(token) for token in tokenizer.textless_tokens if prefix.endswith(token)]
    start = max(starts, default=len(prefix))
    if start > same or len(prefix) - start > len(answer):
        raise ValueError(
            "the chat template renders an earlier answer differently if messages follow it, for example "
            "without its reasoning, so that answer cannot be trained; set "
            "data.demonstration.turns to 'last', or add {% generation %} marks to the template"
        )
    return prefix[:start], answer[: len(answer) - (len(prefix) - start)]


def _ended(
    text: str, following: Sequence[int], tokenizer: Tokenizer
) -> tuple[list[int], Sequence[int]]:
    """Returns an answer's tokens through the token that ends it, and the tokens after that.

    The answer ends with the last such token in its text, or with the one that follows it, as in GLM's
    templates. Otherwise the end-of-sequence token is added: the policy has to learn when to stop.

    Args:
        text: Text of the answer.
        following: Tokens between the answer and the next one.
    """
    token_ids = tokenizer.encode(text, continues=True)
    ends = [i for i, token in enumerate(token_ids) if token in tokenizer.turn_end_ids]
    if ends:
        return token_ids[: ends[-1] + 1], [*token_ids[ends[-1] + 1 :], *following]
    if count := _num_ending(following, tokenizer):
        return [*token_ids, *following[:count]], following[count:]
    stripped = text.rstrip()
    space = tokenizer.encode(text[len(stripped) :], continues=True) if following else []
    token_ids = [*tokenizer.encode(stripped, continues=True), tokenizer.eos_id]
    return token_ids, [*space, *following]


def _num_ending(token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Returns the number of tokens through a token that ends a turn, if only white space precedes it."""
    first = next((i for i, token in enumerate(token_ids) if token in tokenizer.added_ids), None)
    if first is None or token_ids[first] not in tokenizer.turn_end_ids:
        return 0
    return 0 if tokenizer.decode(token_ids[:first]).strip() else first + 1


def _with_ends(
    token_ids: Sequence[int], is_answer: Sequence[bool], tokenizer: Tokenizer, *, num_answers: int
) -> tuple[list[int], list[bool]]:
    """Extends the marked answers by the tokens that end them, which the template's marks may leave out."""
    runs = [
        (marked, [token for token, _ in run])
        for marked, run in groupby(zip(token_ids, is_answer, strict=True), key=lambda pair: pair[1])
    ]
    # A message may have several marked runs, of which only the last one ends it.
    is_whole = sum(marked for marked, _ in runs) == num_answers
    last = max((index for index, (marked, _) in enumerate(runs) if marked), default=-1)
    for index, (marked, run) in enumerate(runs):
        if not marked or _is_ended(run, tokenizer):
            continue
        following = runs[index + 1][1] if index + 1 < len(runs) else []
        if count := _num_ending(following, tokenizer):
            run += following[:count]
            del following[:count]
        elif is_whole or index == last:
            run.append(tokenizer.eos_id)
    return (
        [token for _, run in runs for token in run],
        [marked for marked, run in runs for _ in run],
    )


def _is_ended(answer: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Returns True if nothing but white space follows a token that ends a turn."""
    ends = [i for i, token in enumerate(answer) if token in tokenizer.turn_end_ids]
    return bool(ends) and not tokenizer.decode(answer[ends[-1] + 1 :]).strip()


def _of_marks(
    token_ids: Sequence[int], is_answer: Sequence[bool], turns: Turns
) -> list[DemonstrationTurn]:
    pairs = zip(token_ids, is_answer, strict=True)
    runs = [
        DemonstrationTurn(tuple(token for token, _ in run), is_answer=marked)
        for marked, run in groupby(pairs, key=lambda pair: pair[1])
    ]
    # The template's text after the last answer, such as a newline, is neither prompt nor answer.
    last = max((index for index, run in enumerate(runs) if run.is_answer), default=-1)
    runs = runs[: last + 1]
    if turns == "last" and last > 0:
        before = tuple(token for run in runs[:last] for token in run.token_ids)
        runs = [DemonstrationTurn(before, is_answer=False), runs[last]]
    return runs
