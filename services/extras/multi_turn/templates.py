"""Tool calls and their results in a chat template: their tokens, and checks of what it does with them."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.models.tokenizer import Tokenizer
from services.rollout.workflows.chat_turns import Message, after_mark, following_ids


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


def check_offered_tools(tokenizer: Tokenizer) -> None:
    """Checks that the chat template shows tools to the model.

    A template that does not read ``tools``, such as that of a built-in tokenizer, passes.

    Raises:
        ValueError: If the template reads ``tools`` but does not show their names.
    """
    name = f"tool_{secrets.token_hex(12)}"
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string", "description": "text"}},
        "required": ["text"],
    }
    function = {"name": name, "description": "tool", "parameters": parameters}
    tool = {"type": "function", "function": function}
    rendered = tokenizer.render_chat([{"role": "user", "content": "question"}], [tool])
    if name not in rendered and "tools" in tokenizer.chat_template:
        raise ValueError("the chat template does not show the names of tools")


def check_tool_results(tokenizer: Tokenizer) -> None:
    """Checks that the chat template can render tool results.

    Raises:
        ValueError: If it cannot render them; the message states what the template lacks.
    """
    question: list[Message] = [{"role": "user", "content": "question"}]
    mark, result = secrets.token_hex(12), secrets.token_hex(12)
    # The second round checks that the template accepts a chat that continues after results.
    calls = (ToolCallAndResult(name="tool", result=result),)
    rounds = [ToolRound(reply="call", calls=calls)] * 2
    for chat in (chats := tool_chats(question, rounds, mark)):
        try:
            rendered = tokenizer.render_chat(chat)
            rest = after_mark(rendered, mark)
            is_opened = rendered != tokenizer.render_chat(chat, opens_answer=False)
        except ValueError:
            if chat is chats[-1]:
                raise
            continue
        if rest.count(result) != 1:
            raise ValueError("the chat template does not render messages of the role 'tool'")
        opens = tokenizer.render_chat(question) != tokenizer.render_chat(
            question, opens_answer=False
        )
        if opens and not is_opened:
            raise ValueError("the chat template starts no assistant turn after a tool's result")
        return


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
