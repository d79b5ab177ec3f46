"""Chats to tokens and back. What the policy said is never turned into tokens again."""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.models.tokenizer import Tokenizer
from services.rollout.openai.errors import invalid
from services.rollout.openai.requests import FunctionCall, Message, ToolCall
from services.rollout.workflows.tool_calls import TOOL_CALL
from services.rollout.workflows.turns import Turn


def first_tokens(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Tokens of a chat that continues nothing, up to where the reply begins."""
    return _encode(tokenizer, _render(tokenizer, messages, tools))


def following_tokens(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    *,
    reply_index: int,
    has_eos: bool,
) -> list[int]:
    """Tokens between the end of a recorded reply and the beginning of the next one.

    The chat is rendered with a mark in place of the recorded reply; what follows the mark are the end of
    the reply's turn, the new messages, and the opening of the next turn.

    Args:
        tokenizer: The model's.
        messages: The whole chat.
        tools: What the assistant may call.
        reply_index: Place of the recorded reply in ``messages``.
        has_eos: Whether the recorded tokens end with the end-of-sequence token.
    """
    mark = secrets.token_hex(12)
    marked = [*messages]
    marked[reply_index] = Message(role="assistant", content=mark)
    before, found, rest = _render(tokenizer, marked, tools).rpartition(mark)
    if not found or mark in before:
        raise invalid(
            "the model's chat template does not repeat an assistant's message once, so the chat cannot be "
            "continued with the recorded tokens"
        )
    return _encode(tokenizer, rest.removeprefix(tokenizer.eos_text) if has_eos else rest)


def reply(
    tokenizer: Tokenizer, turn: Turn, *, stop_texts: Sequence[str], name: str, has_tools: bool
) -> Message:
    """What the agent sees of a sampled turn.

    Args:
        tokenizer: The model's.
        turn: What was sampled.
        stop_texts: Texts that ended it; the reply ends before them.
        name: Makes the ids of its calls unique in the episode, and the same when it is replayed.
        has_tools: Whether ``<tool_call>`` blocks are calls.
    """
    text = visible_text(tokenizer, turn, stop_texts)
    found = list(TOOL_CALL.finditer(text)) if has_tools else []
    calls = [call for match in found if (call := _call(match[1])) is not None]
    if not calls:
        return Message(role="assistant", content=text)
    return Message(
        role="assistant",
        content=text[: found[0].start()].strip() or None,
        tool_calls=tuple(
            ToolCall(id=f"call_{name}_{index}", function=call) for index, call in enumerate(calls)
        ),
    )


def visible_text(tokenizer: Tokenizer, turn: Turn, stop_texts: Sequence[str]) -> str:
    """Text of a turn before the first stop text, special tokens left out."""
    text = tokenizer.decode(turn.token_ids)
    ends = [place for stop in stop_texts if (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def _call(text: str) -> FunctionCall | None:
    try:
        call = json.loads(text)
        arguments = call.get("arguments", {})
        return FunctionCall(name=call["name"], arguments=json.dumps(arguments))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


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
