"""OpenAI's Responses API: requests as chats, and replies in its format.

https://platform.openai.com/docs/api-reference/responses
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

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

# Parameters that affect neither sampling nor rendering.
_IGNORED = frozenset(
    (
        "metadata",
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
        "store",
        "include",
        "stream_options",
    )
)
# Parameters that are accepted only with one of these values, which have no effect.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "truncation": ("disabled",),
    "background": (False,),
    "text": ({}, {"format": {"type": "text"}}),
    "reasoning": ({}, {"effort": None}, {"summary": None}, {"effort": None, "summary": None}),
    "max_tool_calls": (),
    "conversation": (),
    "prompt": (),
}
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class ResponsesRequest(BaseModel):
    """Body of ``POST /v1/responses``."""

    model_config = ConfigDict(frozen=True, extra="allow")
    model: str
    input: str | tuple[dict[str, Any], ...]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str | dict[str, Any] = "auto"
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    stream: bool | None = False

    def as_chat(self, earlier: Sequence[Message] = ()) -> ChatRequest:
        """Returns the same request to the chat endpoint.

        Args:
            earlier: Messages of the response that the request continues, without instructions.

        Raises:
            ApiError: If a parameter or an item cannot be applied; the message names it.
        """
        extra = {}
        for key, value in (self.model_extra or {}).items():
            if value is None or key in _IGNORED or value in _NEUTRAL.get(key, ()):
                continue
            if key in _NEUTRAL:
                raise invalid(f"{key}={value!r:.80} is not supported; leave {key} out", param=key)
            extra[key] = value
        messages = [*earlier, *_messages(self.input)]
        if self.instructions:
            messages.insert(0, Message(role="system", content=self.instructions))
        return single_reply(
            {
                "model": self.model,
                "messages": messages,
                "max_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "stream": bool(self.stream),
                "tool_choice": self.tool_choice,
                "tools": [_tool(tool, index) for index, tool in enumerate(self.tools)],
            },
            extra,
        )


class ResponsesFormatter:
    """Formats the answer to one request; a :class:`~services.extras.agents.streaming.Formatter`.

    Args:
        created: Unix seconds.
    """

    def __init__(self, request: ResponsesRequest, *, reply_id: str, created: int) -> None:
        self._request = request
        self._id = reply_id
        self._created = created
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def body(self, replies: Replies) -> dict[str, Any]:
        choice = replies.choices[0]
        return self._response(self._items(choice), choice, replies)

    def begin_events(self, num_replies: int, *, num_prompt_tokens: int) -> Iterator[str]:
        """Yields ``response.created`` and ``response.in_progress``."""
        del num_replies, num_prompt_tokens
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response([]))

    def tokens_events(self, new: NewTokens) -> Iterator[str]:
        """Yields deltas of the item that the new text belongs to."""
        yield from self._texts(new.piece)

    def end_events(self, index: int, choice: Choice, rest: Piece) -> Iterator[str]:
        """Yields the rest of the text and the function calls."""
        del index
        yield from self._texts(rest)
        yield from self._close()
        for item in self._items(choice):
            if item["type"] != "function_call":
                continue
            where = {"item_id": item["id"], "output_index": len(self._output)}
            empty_item = {**item, "arguments": "", "status": "in_progress"}
            yield self._event(
                "response.output_item.added", output_index=len(self._output), item=empty_item
            )
            arguments = item["arguments"]
            kind = "response.function_call_arguments"
            yield self._event(f"{kind}.delta", **where, delta=arguments)
            yield self._event(f"{kind}.done", **where, name=item["name"], arguments=arguments)
            yield from self._done(item)

    def last_events(self, replies: Replies) -> Iterator[str]:
        """Yields ``response.completed`` or ``response.incomplete``."""
        choice = replies.choices[0]
        response = self._response(self._output, choice, replies)
        yield self._event(f"response.{response['status']}", response=response)

    def error_event(self, error: ApiError) -> str:
        content = error.body["error"]
        return self._event(
            "error", code=content["code"], message=content["message"], param=content["param"]
        )

    def _texts(self, piece: Piece) -> Iterator[str]:
        for kind, text in (("reasoning", piece.reasoning), ("message", piece.content)):
            if not text:
                continue
            if self._open is None or self._open["type"] != kind:
                yield from self._close()
                yield from self._begin(kind)
            assert self._open is not None
            self._open["content"][0]["text"] += text
            name = "reasoning_text" if kind == "reasoning" else "output_text"
            fields: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._event(f"response.{name}.delta", **self._where(), delta=text, **fields)

    def _begin(self, kind: str) -> Iterator[str]:
        item = _item(kind, f"{self._id}_{len(self._output)}", "", "in_progress")
        self._open = item
        yield self._event(
            "response.output_item.added",
            output_index=len(self._output),
            item={**item, "content": []},
        )
        yield self._event(
            "response.content_part.added", **self._where(), part=dict(item["content"][0])
        )

    def _close(self) -> Iterator[str]:
        item, self._open = self._open, None
        if item is None:
            return
        self._open = item
        where, content_part = self._where(), item["content"][0]
        self._open = None
        name = "reasoning_text" if item["type"] == "reasoning" else "output_text"
        fields: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        yield self._event(f"response.{name}.done", **where, text=content_part["text"], **fields)
        yield self._event("response.content_part.done", **where, part=content_part)
        yield from self._done({**item, "status": "completed"})

    def _done(self, item: dict[str, Any]) -> Iterator[str]:
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    def _where(self) -> dict[str, Any]:
        assert self._open is not None
        return {
            "item_id": self._open["id"],
            "output_index": len(self._output),
            "content_index": 0,
        }

    def _items(self, choice: Choice) -> list[dict[str, Any]]:
        message = choice.message
        items: list[dict[str, Any]] = []

        def new_id() -> str:
            return f"{self._id}_{len(items)}"

        if message.reasoning_content:
            items.append(_item("reasoning", new_id(), message.reasoning_content, "completed"))
        if message.text or not message.tool_calls:
            items.append(_item("message", new_id(), message.text, "completed"))
        first = len(items)
        items += [
            {
                "type": "function_call",
                "id": f"{self._id}_{first + number}",
                "call_id": call.id,
                "name": call.function.name,
                "arguments": call.function.arguments,
                "status": "completed",
            }
            for number, call in enumerate(message.tool_calls or ())
        ]
        return items

    def _response(
        self,
        output: list[dict[str, Any]],
        choice: Choice | None = None,
        replies: Replies | None = None,
    ) -> dict[str, Any]:
        request = self._request
        is_cut = choice is not None and choice.finish_reason == "length"
        status = "in_progress" if choice is None else "incomplete" if is_cut else "completed"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": request.model,
            "output": output,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": (request.model_extra or {}).get("metadata") or {},
            "parallel_tool_calls": True,
            "previous_response_id": request.previous_response_id,
            "temperature": request.temperature,
            "top_p": 1.0,
            "text": {"format": {"type": "text"}},
            "tool_choice": request.tool_choice,
            "tools": list(request.tools),
            "truncation": "disabled",
            "usage": None if replies is None else _usage(replies),
        }

    def _event(self, kind: str, **fields: Any) -> str:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(body)}\n\n"


def parse_responses(body: bytes) -> ResponsesRequest:
    """Parses a request. Raises ApiError naming the invalid parameter."""
    return parse_body(ResponsesRequest, body)


def _item(kind: str, id_: str, text: str, status: str) -> dict[str, Any]:
    if kind == "reasoning":
        content_part = {"type": "reasoning_text", "text": text}
        return {"type": kind, "id": id_, "summary": [], "content": [content_part], "status": status}
    content = {
        "type": "output_text",
        "text": text,
        "annotations": list[Any](),
        "logprobs": list[Any](),
    }
    return {"type": kind, "id": id_, "role": "assistant", "status": status, "content": [content]}


def _usage(replies: Replies) -> dict[str, Any]:
    prompt, reply = replies.num_prompt_tokens, replies.num_reply_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": reply,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + reply,
    }


def _messages(inputs: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """Joins the items of one assistant turn (reasoning, text, calls) to one message of a chat."""
    if isinstance(inputs, str):
        return [Message(role="user", content=inputs)]
    messages: list[Message] = []
    turn: dict[str, Any] = {}

    def flush() -> None:
        if turn:
            calls = tuple(turn.get("calls", ()))
            messages.append(
                Message(
                    role="assistant",
                    content=turn.get("text") or (None if calls else ""),
                    reasoning_content=turn.get("reasoning") or None,
                    tool_calls=calls or None,
                )
            )
            turn.clear()

    for index, item in enumerate(inputs):
        kind = item.get("type", "message")
        key = f"input.{index}"
        if kind == "message" and item.get("role") == "assistant":
            turn["text"] = turn.get("text", "") + _text(item.get("content"), key)
        elif kind == "message":
            flush()
            role = str(item.get("role", "user"))
            role = "system" if role == "developer" else role
            messages.append(Message(role=role, content=_content(item.get("content"), key)))
        elif kind == "reasoning":
            turn["reasoning"] = turn.get("reasoning", "") + _text(item.get("content"), key)
        elif kind == "function_call":
            call = FunctionCall(
                name=str(item.get("name", "")), arguments=str(item.get("arguments", "{}"))
            )
            turn.setdefault("calls", []).append(
                ToolCall(id=str(item.get("call_id", "")), function=call)
            )
        elif kind == "function_call_output":
            flush()
            content = _content(item.get("output"), f"{key}.output")
            call_id = str(item.get("call_id", ""))
            messages.append(Message(role="tool", content=content, tool_call_id=call_id))
        else:
            raise invalid(
                f"{key}.type={kind!r:.80} is not supported; send messages, reasoning, function_call and "
                "function_call_output",
                param=f"{key}.type",
            )
    flush()
    return messages


def _content(content: object, key: str) -> Any:
    """Returns text, or parts if there are images."""
    items = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
    is_image = [isinstance(item, Mapping) and item.get("type") == "input_image" for item in items]
    if not any(is_image):
        return _text(content, key)
    converted = list[dict[str, str]]()
    for index, (item_part, shows) in enumerate(zip(items, is_image, strict=True)):
        if not shows:
            converted.append({"type": "text", "text": _text([item_part], f"{key}.{index}")})
            continue
        if not isinstance(url := item_part.get("image_url"), str) or not url:
            raise invalid(
                f"{key}.content.{index}.image_url must be a data URL or an http(s) URL, got {url!r:.80}",
                param=f"{key}.content.{index}.image_url",
            )
        converted.append({"type": "image", "image": url})
    return converted


def _text(content: object, key: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, item in enumerate(content if isinstance(content, Sequence) else [content]):
        if not isinstance(item, Mapping) or item.get("type") not in _TEXT_PARTS:
            raise invalid(
                f"{key}.content.{index} must be text, but is {item!r:.80}",
                param=f"{key}.content.{index}",
            )
        texts.append(str(item.get("text", "")))
    return "".join(texts)


def _tool(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise invalid(
            f"tools.{index}.type={tool.get('type')!r:.80} is not supported; give functions",
            param=f"tools.{index}.type",
        )
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key)}
    return {"type": "function", "function": function}


async def _reply(request: Request, session: Session) -> Response:
    parsed = parse_responses(await session.body(request))
    conversations: dict[str, tuple[Message, ...]] = session.notes.setdefault("responses", {})
    earlier: tuple[Message, ...] | None = ()
    if parsed.previous_response_id is not None:
        earlier = conversations.get(parsed.previous_response_id)
    if earlier is None:
        raise ApiError(
            404,
            f"this episode has no response {parsed.previous_response_id!r}; send the whole input",
            param="previous_response_id",
        )
    chat = parsed.as_chat(earlier)
    reply_id = new_id("resp_")

    def keep(replies: Replies) -> None:
        # The instructions are not kept, because the next request has its own.
        messages = chat.messages[1 if parsed.instructions else 0 :]
        conversations[reply_id] = (*messages, replies.choices[0].message)

    formatter = ResponsesFormatter(parsed, reply_id=reply_id, created=int(time.time()))
    return await session.answer(chat, formatter, on_answer=keep)


PROTOCOL: Final = AgentProtocol(paths={"/v1/responses": _reply})
