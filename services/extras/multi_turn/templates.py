"""Checks of what a chat template does with tools and their results."""

import secrets

from services.common.models.tokenizer import Tokenizer
from services.rollout.workflows.chat_turns import (
    Message,
    ToolCallAndResult,
    ToolRound,
    after_mark,
    tool_chats,
)


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
