"""Control tokens that a chat template writes around messages, learned from rendered chats."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.common.models.evaluator import EvaluationStoppedError

_SYSTEM, _QUESTION, _REPLY, _NEXT = "qsys7u1x", "qask7u2x", "qrep7u3x", "qnxt7u4x"
# Marks inside a turn, which the texts of messages may contain as tokens: <think> and </think>, <tool_call>.
_INNER: Final = re.compile(r"<(/?)([a-z_]+)>")
_REASONING: Final = re.compile("think|reason", re.IGNORECASE)
_ROLES: Final = ("user", "assistant", "system")
Render = Callable[[Sequence[Mapping[str, Any]]], str]
"""Renders messages without the start of an answer. Raises ValueError if the template refuses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatLayout:
    """Text that a chat template writes around messages."""

    control_tokens: frozenset[str] = frozenset()
    """Added tokens that open and close messages, or are written by the template and never occur in a text."""
    closing: str | None = None
    """Token that closes an assistant's message before another one; None if the next message's first token
    does.
    """
    stop: str | None = None
    """Token after an assistant's message, at which sampling stops; None if the template writes none."""
    needs_parts: bool = False
    """True if the template ignores content that is text instead of a list of parts."""


def chat_layout(template: str, added_tokens: Collection[str], render: Render) -> ChatLayout:
    """Renders chats whose contents are marks, and returns what the template wrote around them.

    Args:
        template: Source of the template.
        added_tokens: Texts of the tokens that may be control tokens.
        render: Renders a chat.
    """
    try:
        return _learned(_written(template, added_tokens), added_tokens, render)
    except EvaluationStoppedError:  # whoever renders a chat gets the reason
        return ChatLayout(control_tokens=frozenset(_written(template, added_tokens)))


def _learned(tokens: set[str], added_tokens: Collection[str], render: Render) -> ChatLayout:
    pattern = re.compile(
        "|".join(map(re.escape, sorted(added_tokens, key=len, reverse=True))) or r"(?!)"
    )
    question, reply, next_question = (
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _REPLY},
        {"role": "user", "content": _NEXT},
    )
    chat = [question, reply, next_question]
    needs_parts = _QUESTION not in _rendered(render, chat) and _QUESTION in _rendered(
        render, [_in_parts(message) for message in chat]
    )
    if needs_parts:
        chat = [_in_parts(message) for message in chat]
    text = _rendered(render, chat)
    with_system = _rendered(render, [{**chat[0], "role": "system"}, *chat])
    last = _rendered(render, chat[:2])
    start = text.partition(_QUESTION)[0].rstrip()
    opening = (pattern.findall(start) or [None])[-1]
    between = _leading(pattern, text.partition(_REPLY)[2])
    ending = _leading(pattern, last.partition(_REPLY)[2])
    # GLM's templates write the next role's token after an earlier reply, and nothing or the user's after
    # the last one. OLMo's token that opens a conversation, before the user's mark, ends its replies too.
    is_closed = between == ending and not start.endswith(opening or "")
    closing = between if between != opening or is_closed else None
    stop = ending or between
    # A generation prompt or an assistant's message may begin with a mark of its reasoning.
    before = pattern.findall((with_system or text).partition(_REPLY)[0])
    tokens |= {token for token in before if not _REASONING.search(token)}
    tokens |= set(pattern.findall(text.partition(_REPLY)[2])) | {stop or ""}
    tokens |= _of_other_roles(tokens, added_tokens)
    return ChatLayout(
        control_tokens=frozenset(tokens - {""}),
        closing=closing,
        stop=stop,
        needs_parts=needs_parts,
    )


def _of_other_roles(tokens: Collection[str], added_tokens: Collection[str]) -> set[str]:
    """Returns added tokens that are spelled like those of the known roles, as ChatGLM's ``<|observation|>``.

    A template may join such a token from its marks and a message's role, so that it is nowhere in its source.
    """
    return {
        token
        for vocabulary_token in tokens
        for role in _ROLES
        if (affixes := vocabulary_token.partition(role))[1] and affixes[0] and affixes[2]
        for token in added_tokens
        if token.startswith(affixes[0])
        and token.endswith(affixes[2])
        and len(token) > len(affixes[0]) + len(affixes[2])
        and (not _INNER.fullmatch(token) or token in tokens)
    }


def _written(template: str, added_tokens: Collection[str]) -> set[str]:
    """Returns the added tokens in a template's source, without pairs of marks such as ``<think>``."""
    tokens = {token for token in added_tokens if token in template}
    pairs = {
        token
        for token in tokens
        if (match := _INNER.fullmatch(token))
        and {f"<{match[2]}>", f"</{match[2]}>"} <= set(added_tokens)
    }
    return tokens - pairs - {token for token in tokens if _REASONING.search(token)}


def _rendered(render: Render, chat: Sequence[Mapping[str, Any]]) -> str:
    try:
        return render(chat)
    except EvaluationStoppedError:
        raise
    except ValueError:  # it refuses these roles or parts
        return ""


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _leading(pattern: re.Pattern[str], text: str) -> str | None:
    """Returns the token with which a text begins after white space; None if there is none."""
    match = pattern.search(text)
    return match[0] if match and not text[: match.start()].strip() else None
