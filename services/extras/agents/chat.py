"""Conversion between chats and tokens. Sampled text is never tokenized again."""

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from services.common.models.tokenizer import Tokenizer
from services.extras.agents.requests import FunctionCall, Message, ToolCall, invalid
from services.rollout.workflows.chat_turns import following_ids
from services.rollout.workflows.reply_formats import ReplyFormat
from services.rollout.workflows.turns import Turn


def first_tokens(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Returns the tokens of a new chat, up to the start of the reply."""
    return _encode(tokenizer, _render(tokenizer, messages, tools))


def following_tokens(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    *,
    reply_index: int,
    last_id: int | None,
) -> list[int]:
    """Returns the tokens between the end of a recorded reply and the start of the next one.

    Args:
        reply_index: Index of the recorded reply in ``messages``.
        last_id: Last token of the recorded reply.
    """
    mark = secrets.token_hex(12)
    calls = messages[reply_index].tool_calls or (
        ToolCall(id="0" * 9, function=FunctionCall(name="")),
    )
    marked_call = calls[-1].model_copy(update={"function": FunctionCall(name=mark)})
    as_text = Message(role="assistant", content=mark)
    as_call = Message(role="assistant", content="", tool_calls=(*calls[:-1], marked_call))
    chats = []
    for reply_message in (as_text, as_call):
        chat = [*messages]
        chat[reply_index] = reply_message
        chats.append([message.for_template() for message in chat])
    try:
        return following_ids(tokenizer, chats, tools, mark=mark, last_id=last_id)
    except ValueError as error:
        raise invalid(str(error), param="messages") from error


def rendered_reasoning(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    indices: Iterable[int],
) -> frozenset[int]:
    """Returns the indices of those messages whose reasoning the chat template renders.

    Args:
        indices: Messages with reasoning.

    Raises:
        ApiError: If the chat template refuses the messages.
    """
    mark = secrets.token_hex(12)
    marked = [*messages]
    for index in indices:
        marked[index] = messages[index].model_copy(update={"reasoning_content": f"{mark}-{index}-"})
    text = _render(tokenizer, marked, tools)
    return frozenset(index for index in indices if f"{mark}-{index}-" in text)


def reply(
    tokenizer: Tokenizer,
    turn: Turn,
    *,
    layout: ReplyFormat,
    tools: Sequence[Mapping[str, Any]],
    stop_texts: Sequence[str],
    name: str,
    has_tools: bool,
    is_open: bool,
) -> Message:
    """Returns the message that the agent receives for a sampled turn.

    Args:
        stop_texts: Texts that end the turn; the reply ends before them.
        name: Prefix of call ids; makes them unique in the episode, and equal when the episode is replayed.
        has_tools: True if the reply may call tools.
        is_open: True if the prompt opened the reply's reasoning.
    """
    special = tokenizer.textless_tokens if layout.has_special_marks else ()
    text = text_before(layout.decode(tokenizer, turn.token_ids), stop_texts, skipped=special)
    parsed = layout.parse(text, tools, has_tools=has_tools, is_open=is_open)
    calls = [call for call in parsed.calls if call.is_reported]
    return Message(
        role="assistant",
        content=parsed.content or None if calls else parsed.content,
        reasoning_content=parsed.reasoning or None,
        tool_calls=tuple(
            ToolCall(
                id=call.id or _call_id(f"{name}_{index}"),
                function=FunctionCall(
                    name=call.name,
                    arguments=call.arguments
                    if call.problem
                    else json.dumps(call.arguments, ensure_ascii=False),
                ),
            )
            for index, call in enumerate(calls)
        )
        or None,
    )


def text_before(text: str, stop_texts: Sequence[str], *, skipped: Iterable[str] = ()) -> str:
    """Returns the part of a reply before the first stop text.

    Args:
        skipped: Special tokens that the text shows; a stop text may have them between its characters.
    """
    tokens = sorted(map(re.escape, skipped), key=len, reverse=True)
    between = f"(?:{'|'.join(tokens)})*" if tokens else ""
    patterns = (between.join(map(re.escape, stop)) for stop in stop_texts)
    starts = [match.start() for pattern in patterns if (match := re.search(pattern, text))]
    return text[: min(starts)] if starts else text


def _call_id(name: str) -> str:
    """Returns an id of nine letters or digits, which Mistral's chat templates require."""
    return hashlib.sha256(name.encode()).hexdigest()[:9]


def _render(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> str:
    try:
        return tokenizer.render_chat([message.for_template() for message in messages], tools)
    except ValueError as error:
        raise invalid(str(error), param="messages") from error


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        return tokenizer.encode(text)
    except ValueError as error:
        raise invalid(str(error), param="messages") from error
