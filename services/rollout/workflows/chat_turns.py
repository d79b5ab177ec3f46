"""Tokens between a sampled reply and the next one, rendered by the model's chat template.

The template renders the chat with a mark in place of the reply. The text after the mark closes the reply's
turn, contains the new messages and opens the next turn. The reply itself is never tokenized again.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.models.tokenizer import Tokenizer

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallAndResult:
    """One tool call and its result."""

    name: str
    """Name of the tool."""
    result: str | Sequence[Mapping[str, Any]]
    """Text that the tool returned, or parts of a message if it returned images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRound:
    """One reply with tool calls, and their results."""

    reply: str
    """Text of the reply, including the calls."""
    calls: tuple[ToolCallAndResult, ...]
    """The calls in order; at least one."""


def following_ids(
    tokenizer: Tokenizer,
    chats: Sequence[Sequence[Message]],
    tools: Sequence[Message] = (),
    *,
    mark: str,
    last_id: int | None,
) -> list[int]:
    """Returns the token ids between a sampled reply and the start of the next one.

    Args:
        chats: The same chat in several forms; the first one that the template accepts is used. Each
            has the mark as the content of the reply, or as the name of its last call.
        tools: Tools that the assistant may call.
        mark: Placeholder of the reply.
        last_id: Last token of the reply. If it ends a turn, the template's own end token is left out. If the
            template has none, as GLM's, only a role token that the policy itself sampled is.

    Raises:
        ValueError: If the template accepts none of the forms.
    """
    problem = ""
    for chat in chats:
        try:
            rest = after_mark(tokenizer.render_chat(chat, tools), mark)
        except ValueError as error:
            problem = problem or str(error)
            continue
        ids = tokenizer.encode(rest, continues=True)
        if not any(message.get("content") == mark for message in chat):
            # Skip the rest of the call, which the policy has already written in its own format.
            ends = [index for index, id_ in enumerate(ids) if id_ in tokenizer.turn_end_ids]
            if not ends:
                problem = problem or "no token of the template ends an assistant's turn"
                continue
            ids = ids[ends[0] :]
        return ids[_num_ended(tokenizer, ids, last_id) :]
    raise ValueError(problem)


def tool_result_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    rounds: Sequence[ToolRound],
    tools: Sequence[Message] = (),
    *,
    last_id: int | None,
) -> list[int]:
    """Returns the token ids of the last round's results, up to the start of the next reply.

    Args:
        rounds: All rounds so far; the policy sampled the replies.

    Raises:
        ValueError: If the chat template cannot render the results.
    """
    mark = secrets.token_hex(12)
    chats = tool_chats(messages, rounds, mark)
    return following_ids(tokenizer, chats, tools, mark=mark, last_id=last_id)


def kept_marks(tokenizer: Tokenizer) -> str:
    """Returns the text that opens an answer in a prompt and is missing before earlier answers.

    For example, with ``enable_thinking: false`` Qwen3's template opens an answer with an empty block of
    reasoning, and renders earlier answers without it. A conversation that continues recorded tokens keeps it.
    Empty if there is none.
    """
    question, mark = {"role": "user", "content": "question"}, secrets.token_hex(12)
    chat = [question, {"role": "assistant", "content": mark}, {"role": "user", "content": "next"}]
    try:
        prompt = tokenizer.render_chat([question])
        history = tokenizer.render_chat(chat)
    except ValueError:  # reported where chats are checked
        return ""
    opening = history.partition(mark)[0]
    is_longer = prompt.startswith(opening) and mark in history
    return prompt[len(opening) :].strip() if is_longer else ""


def plain_role_marks(tokenizer: Tokenizer) -> list[str]:
    """Returns the marks of user and assistant that the chat template writes as text, such as ``USER:``.

    Only control tokens in the texts of a chat are escaped. Empty if such a token opens every message.
    """
    user, reply = secrets.token_hex(12), secrets.token_hex(12)
    question = {"role": "user", "content": user}
    try:
        chat = tokenizer.render_chat([question, {"role": "assistant", "content": reply}, question])
    except ValueError:  # reported where chats are checked
        return []
    before, *between = (tokenizer.encode(text) for text in re.split(f"{user}|{reply}", chat)[:3])
    # The first token of a conversation, and one that ends a message, open none.
    ends = {tokenizer.eos_id, tokenizer.closing_id, *tokenizer.encode_prompt("")}
    ends |= {id_ for id_ in before[:1] if id_ not in between[-1]}
    openers = tokenizer.added_ids - ends
    if openers & {*before} and openers & {*between[0]}:
        return []
    return [mark for ids in reversed(between) if (mark := tokenizer.decode(ids).strip())]


def tool_chats(
    messages: Sequence[Message], rounds: Sequence[ToolRound], mark: str
) -> list[list[Message]]:
    """Returns the chat with calls as text, and with calls as the fields that some templates need."""
    as_text, as_fields = [*messages], [*messages]
    for number, example in enumerate(rounds):
        is_last = number == len(rounds) - 1
        # Mistral's templates require ids of nine letters or digits.
        ids = [f"{number:05}{index:04}" for index in range(len(example.calls))]
        names = [call.name for call in example.calls]
        if is_last:
            names[-1] = mark
        results: list[Message] = [
            {"role": "tool", "name": call.name, "tool_call_id": id_, "content": call.result}
            for id_, call in zip(ids, example.calls, strict=True)
        ]
        as_text += [{"role": "assistant", "content": mark if is_last else example.reply}, *results]
        calls = [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": {}}}
            for id_, name in zip(ids, names, strict=True)
        ]
        as_fields += [{"role": "assistant", "content": "", "tool_calls": calls}, *results]
    return [as_text, as_fields]


def after_mark(text: str, mark: str) -> str:
    before, separator, rest = text.rpartition(mark)
    if not separator or mark in before:
        raise ValueError(
            "the model's chat template does not render an assistant's message exactly once, so the chat "
            "cannot be continued with the recorded tokens"
        )
    return rest


def _num_ended(tokenizer: Tokenizer, ids: Sequence[int], last_id: int | None) -> int:
    """Returns how many of the template's tokens after a reply the policy's last token replaces."""
    first = next((n for n, id_ in enumerate(ids) if id_ in tokenizer.added_ids), None)
    if first is None or last_id is None or tokenizer.decode(ids[:first]).strip():
        return 0
    # Without a closing token, the first one opens the next message.
    closes = tokenizer.closing_id is not None and last_id in tokenizer.turn_end_ids
    return first + 1 if ids[first] == last_id or closes else 0
