"""Tokens between a sampled reply and the next one, rendered by the model's chat template.

The template renders the chat with a mark in place of the reply. The text after the mark closes the reply's
turn, contains the new messages and opens the next turn. The reply itself is never tokenized again.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from services.common.models.tokenizer import Tokenizer

Message = Mapping[str, Any]


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
    # A template may write two, as Cohere's ends of the response and of the turn.
    following = takewhile(lambda id_: id_ in tokenizer.turn_end_ids, ids[first + 1 :])
    ends = [ids[first], *following]
    if last_id in ends:
        return first + ends.index(last_id) + 1
    # Without a closing token, the first one opens the next message.
    closes = tokenizer.closing_id is not None and last_id in tokenizer.turn_end_ids
    return first + 1 if closes else 0
