"""Anthropic's Messages API: requests as chats, and replies in its format.

https://docs.anthropic.com/en/api/messages
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.extras.agents.protocols import AgentProtocol
from services.extras.agents.record import Choice, Replies
from services.extras.agents.requests import (
    ApiError,
    ChatRequest,
    FunctionCall,
    Message,
    ToolCall,
    invalid,
    parse_body,
    single_reply,
)
from services.extras.agents.session import Session, new_id
from services.extras.agents.streaming import NewTokens, Piece

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class _Block(BaseModel):
    """A content block; :func:`_messages` reads the fields of its type."""

    model_config = ConfigDict(frozen=True, extra="allow")
    type: str


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True)
    role: Literal["user", "assistant"]
    content: str | tuple[_Block, ...]


class _Tool(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")
    name: str
    type: str = "custom"
    description: str = ""
    input_schema: dict[str, Any] = Field(default_factory=dict)


class MessagesRequest(BaseModel):
    """Body of ``POST /v1/messages``."""

    model_config = ConfigDict(frozen=True, extra="allow")
    model: str
    max_tokens: int = Field(ge=1)
    messages: tuple[_Message, ...] = Field(min_length=1)
    system: str | tuple[_Block, ...] = ""
    tools: tuple[_Tool, ...] = ()
    tool_choice: dict[str, Any] | None = None
    stop_sequences: tuple[str, ...] = ()
    stream: bool = False
    temperature: float | None = None
    thinking: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None

    def as_chat(self) -> ChatRequest:
        """Returns the same request to the chat endpoint.

        Raises:
            ApiError: If a parameter or a block cannot be applied; the message names it.
        """
        if self.thread is not None:
            # Anthropic's tool runner asks for a thread first and recognizes this code.
            raise ApiError(
                400,
                "thread is not supported; leave it out and send all messages",
                param="thread",
                code="thread_unsupported_request",
            )
        choice = (self.tool_choice or {}).get("type", "auto")
        is_single = (self.tool_choice or {}).get("disable_parallel_tool_use", False)
        if choice not in ("auto", "none") or is_single:
            raise _not_applied("tool_choice", self.tool_choice, "let the policy choose")
        if (self.thinking or {}).get("type", "disabled") not in ("disabled", "adaptive"):
            raise _not_applied(
                "thinking", self.thinking, "the model's chat template decides whether it thinks"
            )
        if server_side := [tool.type for tool in self.tools if tool.type != "custom"]:
            raise _not_applied("tools", server_side[0], "give tools with an input_schema")
        system = self.system if isinstance(self.system, str) else _text(self.system, "system")
        messages = [Message(role="system", content=system)] if system else []
        for index, message in enumerate(self.messages):
            messages += _messages(message, f"messages.{index}")
        ignored = {"metadata", "service_tier", "inference_geo", "context_management"}
        further_fields = {
            key: value for key, value in (self.model_extra or {}).items() if key not in ignored
        }
        return single_reply(
            {
                "model": self.model,
                "messages": messages,
                "max_tokens": self.max_tokens,
                "stop": self.stop_sequences or None,
                "stream": self.stream,
                "temperature": self.temperature,
                "tool_choice": choice,
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": tool.name,
                            "description": tool.description,
                            "parameters": tool.input_schema,
                        },
                    }
                    for tool in self.tools
                ],
            },
            further_fields,
        )


class _CountRequest(MessagesRequest):
    max_tokens: int = Field(1, ge=1)


class MessagesFormatter:
    """Formats the answer to one request; a :class:`~services.extras.agents.streaming.Formatter`."""

    def __init__(self, request: MessagesRequest, *, reply_id: str) -> None:
        self._head: dict[str, Any] = {
            "id": reply_id,
            "type": "message",
            "role": "assistant",
            "model": request.model,
        }
        self._open: str | None = None
        self._num_blocks = 0

    def body(self, replies: Replies) -> dict[str, Any]:
        choice = replies.choices[0]
        return {
            **self._head,
            "content": _blocks(choice.message),
            **self._stop(choice),
            "usage": {
                "input_tokens": replies.num_prompt_tokens,
                "output_tokens": replies.num_reply_tokens,
            },
        }

    def begin_events(self, num_replies: int, *, num_prompt_tokens: int) -> Iterator[str]:
        del num_replies
        usage = {"input_tokens": num_prompt_tokens, "output_tokens": 0}
        stop = {"stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**self._head, "content": [], **stop, "usage": usage})

    def tokens_events(self, new: NewTokens) -> Iterator[str]:
        """Yields deltas of the block that the new text belongs to."""
        yield from self._texts(new.piece)

    def end_events(self, index: int, choice: Choice, rest: Piece) -> Iterator[str]:
        """Yields the rest of the text, blocks of tool calls, and ``message_delta``."""
        del index
        yield from self._texts(rest)
        yield from self._close()
        for block in _blocks(choice.message):
            if block["type"] == "tool_use":
                yield from self._begin({**block, "input": {}})
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                yield _event("content_block_delta", index=self._num_blocks, delta=delta)
                yield from self._close()
        usage = {"output_tokens": choice.reply_tokens}
        yield _event("message_delta", delta=self._stop(choice), usage=usage)

    def last_events(self, replies: Replies) -> Iterator[str]:
        del replies
        yield _event("message_stop")

    def error_event(self, error: ApiError) -> str:
        return _event("error", error=error_body(error)["error"])

    def _stop(self, choice: Choice) -> dict[str, Any]:
        if choice.stop_text is not None and choice.finish_reason == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_text}
        return {"stop_reason": _STOP_REASONS[choice.finish_reason], "stop_sequence": None}

    def _texts(self, piece: Piece) -> Iterator[str]:
        if piece.reasoning:
            yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            delta = {"type": "thinking_delta", "thinking": piece.reasoning}
            yield _event("content_block_delta", index=self._num_blocks, delta=delta)
        if piece.content:
            yield from self._begin({"type": "text", "text": ""})
            delta = {"type": "text_delta", "text": piece.content}
            yield _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _begin(self, block: Mapping[str, Any]) -> Iterator[str]:
        if self._open == block["type"]:
            return
        yield from self._close()
        self._open = block["type"]
        yield _event("content_block_start", index=self._num_blocks, content_block=block)

    def _close(self) -> Iterator[str]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._num_blocks)
            self._open = None
            self._num_blocks += 1


def parse_messages(body: bytes) -> MessagesRequest:
    """Parses a request. Raises ApiError naming the invalid parameter."""
    request = parse_body(MessagesRequest, body)
    last = len(request.messages) - 1
    if request.messages[last].role == "assistant":
        raise _not_applied(f"messages.{last}.role", "assistant", "end with a message of the user")
    return request


def parse_count(body: bytes) -> ChatRequest:
    """Parses a request to count tokens. Raises ApiError naming the invalid parameter."""
    return parse_body(_CountRequest, body).as_chat()


def error_body(error: ApiError) -> dict[str, Any]:
    body: dict[str, Any] = {
        "type": _ERROR_TYPES.get(error.status, "api_error"),
        "message": str(error),
    }
    if code := error.body["error"]["code"]:
        body["details"] = {"error_code": code}
    return {"type": "error", "error": body}


def _messages(message: _Message, key: str) -> Iterator[Message]:
    """Yields one message for text and tool calls, and one for each tool result."""
    if isinstance(message.content, str):
        yield Message(role=message.role, content=message.content)
        return
    content, reasoning, calls, results = list[dict[str, str]](), [], [], []
    for index, block in enumerate(message.content):
        extra, where = block.model_extra or {}, f"{key}.content.{index}"
        match block.type:
            case "text" | "image":
                content.append(_part(block, where))
            case "thinking":
                reasoning.append(_required_text(extra, "thinking", where))
            case "redacted_thinking":
                pass
            case "tool_use":
                call = FunctionCall(
                    name=str(extra.get("name", "")), arguments=json.dumps(extra.get("input", {}))
                )
                calls.append(ToolCall(id=str(extra.get("id", "")), function=call))
            case "tool_result":
                results.append(_result(extra, where))
            case _:
                raise _not_applied(f"{where}.type", block.type, "send text or images")
    yield from results
    if content or calls or reasoning or not results:
        yield Message(
            role=message.role,
            content=_content(content) if content or not calls else None,
            reasoning_content="".join(reasoning) or None,
            tool_calls=tuple(calls) or None,
        )


def _result(block: Mapping[str, Any], key: str) -> Message:
    content = block.get("content") or ""
    if not isinstance(content, str):
        blocks = parse_body(_Parts, {"parts": content}).parts
        content_parts = [_part(item, f"{key}.content.{index}") for index, item in enumerate(blocks)]
    else:
        content_parts = [{"type": "text", "text": content}]
    if block.get("is_error"):
        content_parts.insert(0, {"type": "text", "text": "Error: "})
    return Message(
        role="tool", content=_content(content_parts), tool_call_id=str(block.get("tool_use_id", ""))
    )


def _part(block: _Block, key: str) -> dict[str, str]:
    """Returns a text or an image as a part of a chat's message."""
    extra = block.model_extra or {}
    if block.type == "text":
        return {"type": "text", "text": _required_text(extra, "text", key)}
    if block.type != "image":
        raise _not_applied(f"{key}.type", block.type, "send text or images")
    source = extra.get("source")
    if not isinstance(source, Mapping) or source.get("type") not in ("base64", "url"):
        raise _not_applied(f"{key}.source", source, "send base64 or a url")
    where = f"{key}.source"
    if source["type"] == "url":
        return {"type": "image", "image": _required_text(source, "url", where)}
    kind, data = (_required_text(source, name, where) for name in ("media_type", "data"))
    return {"type": "image", "image": f"data:{kind};base64,{data}"}


def _content(parts: Sequence[Mapping[str, str]]) -> Any:
    """Returns parts as the content of a chat's message, which is text if all of them are."""
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


class _Parts(BaseModel):
    model_config = ConfigDict(frozen=True)
    parts: tuple[_Block, ...]


def _text(blocks: Sequence[_Block], key: str) -> str:
    texts = []
    for index, block in enumerate(blocks):
        if block.type != "text":
            raise _not_applied(f"{key}.{index}.type", block.type, "send text")
        texts.append(_required_text(block.model_extra or {}, "text", f"{key}.{index}"))
    return "".join(texts)


def _required_text(block: Mapping[str, Any], name: str, key: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise invalid(f"{key}.{name}: expected text, got {text!r:.80}", param=f"{key}.{name}")
    return text


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning_content:
        blocks.append({"type": "thinking", "thinking": message.reasoning_content, "signature": ""})
    if message.text:
        blocks.append({"type": "text", "text": message.text})
    for call in message.tool_calls or ():
        call_arguments = call.function.parsed_arguments
        blocks.append(
            {
                "type": "tool_use",
                "id": call.id,
                "name": call.function.name,
                "input": call_arguments
                if isinstance(call_arguments, dict)
                else {"input": call_arguments},
            }
        )
    return blocks


def _not_applied(key: str, value: object, fix: str) -> ApiError:
    return invalid(f"{key}={value!r:.80} is not supported; {fix}", param=key)


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


async def _reply(request: Request, session: Session) -> Response:
    messages = parse_messages(await session.body(request))
    return await session.answer(
        messages.as_chat(), MessagesFormatter(messages, reply_id=new_id("msg_"))
    )


async def _count(request: Request, session: Session) -> Response:
    chat = parse_count(await session.body(request))
    return JSONResponse({"input_tokens": await session.record.count(chat)})


PROTOCOL: Final = AgentProtocol(
    paths={"/v1/messages": _reply, "/v1/messages/count_tokens": _count}, error_body=error_body
)
