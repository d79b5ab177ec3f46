"""Requests of the endpoint: the subset of OpenAI's API that is compatible with recording for training."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError


class ApiError(Exception):
    """Answers a request with a status other than 200.

    Attributes:
        status: HTTP status.
        body: ``{"error": {"message", "type", "param", "code"}}``.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": _type(status), "param": param, "code": code}
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer; for an ending episode, they ask clients to wait before a retry."""
        return {"Retry-After": "1"} if self.status == 503 else {}

    @property
    def is_too_long(self) -> bool:
        """True if the conversation has no room for another reply."""
        return bool(self.body["error"]["code"] == "context_length_exceeded")


def invalid(message: str, *, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def too_long(message: str) -> ApiError:
    """Returns the error for a conversation that exceeds the sample's limits."""
    return ApiError(400, message, code="context_length_exceeded")


def _type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    return "invalid_request_error" if status < 500 else "server_error"


# Parameters that affect neither sampling nor rendering.
_IGNORED = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "request_id",
    )
)
# Parameters that may change the prompt, the distribution of tokens or the reply, with the values that
# change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "bad_words": ([],),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "priority": (0,),
    "chat_template_kwargs": ({},),
}
_MAX_CHOICES = 64
_Request = TypeVar("_Request", bound=BaseModel)


class ContentPart(BaseModel):
    """One part of a message: a text or an image."""

    model_config = ConfigDict(frozen=True)
    type: Literal["text", "image_url", "image"]
    text: str = ""
    url: str = ""
    """For an image: data URL or http(s) URL."""

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, value: Any) -> Any:
        """Converts ``{image_url: {url}}``, ``{image_url}`` and ``{image}`` of an image to ``url``."""
        if not isinstance(value, Mapping) or value.get("type") not in ("image_url", "image"):
            if isinstance(value, Mapping) and not isinstance(value.get("text"), str):
                raise ValueError("a part must have a text, or be an image")
            return value
        url = value.get("image_url", value.get("image", value.get("url")))
        url = url.get("url") if isinstance(url, Mapping) else url
        if not isinstance(url, str) or not url:
            raise ValueError(f"an image must have a data URL or an http(s) URL, got {url!r:.80}")
        return {"type": "image", "url": url}


class FunctionCall(BaseModel):
    """The function that an assistant called."""

    model_config = ConfigDict(frozen=True)
    name: str
    arguments: str = "{}"

    @property
    def parsed_arguments(self) -> Any:
        """The arguments as JSON values, or as text if they are not JSON."""
        try:
            return json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments


class ToolCall(BaseModel):
    """A tool call in an assistant's message."""

    model_config = ConfigDict(frozen=True)
    id: str = ""
    function: FunctionCall


class Message(BaseModel):
    """One message of a chat; :attr:`meaning` compares messages by content."""

    model_config = ConfigDict(frozen=True)
    role: str
    content: str | tuple[ContentPart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """Reasoning of an assistant's message, which some chat templates render; :attr:`meaning` ignores it."""

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)

    @property
    def num_characters(self) -> int:
        """Characters of the message, without those of its images."""
        calls = sum(
            len(call.function.name) + len(call.function.arguments) for call in self.tool_calls or ()
        )
        return len(self.text) + len(self.reasoning_content or "") + calls

    @property
    def images(self) -> tuple[str, ...]:
        """URLs of the images."""
        if self.content is None or isinstance(self.content, str):
            return ()
        return tuple(part.url for part in self.content if part.url)

    @property
    def meaning(self) -> bytes:
        """Digest that is equal for equivalent messages; it keeps the records of long chats small."""
        calls = [
            (call.function.name, call.function.parsed_arguments) for call in self.tool_calls or ()
        ]
        calls_text = json.dumps(calls, sort_keys=True) if calls else ""
        text: Any = self.text.strip()
        if self.images:
            text = [
                (part.text, part.url) for part in self.content or () if not isinstance(part, str)
            ]
        identity = (self.role, text, self.name, calls_text, self.tool_call_id)
        return hashlib.sha256(repr(identity).encode()).digest()

    def for_template(self) -> dict[str, Any]:
        """Returns the message as chat templates expect it, with the arguments of calls as objects."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.images:
            message["content"] = [
                {"type": "image"} if part.url else {"type": "text", "text": part.text}
                for part in self.content or ()
                if not isinstance(part, str)
            ]
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
            if not self.text:  # gpt-oss's template reads this key, and refuses it next to content
                message["thinking"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": call.function.parsed_arguments,
                    },
                }
                for call in self.tool_calls
            ]
        return message


class GenerateRequest(BaseModel):
    """Parameters that chat and completion requests share."""

    model_config = ConfigDict(frozen=True, extra="allow")
    model: str
    n: int = Field(1, ge=1, le=_MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None

    @property
    def stop_texts(self) -> tuple[str, ...]:
        if isinstance(self.stop, str):
            return (self.stop,)
        return self.stop or ()

    @property
    def with_usage(self) -> bool:
        """True if a stream ends with token counts."""
        return bool((self.stream_options or {}).get("include_usage"))

    @model_validator(mode="after")
    def _changes_no_distribution(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            is_neutral = value is None or name in _IGNORED or value in _NEUTRAL.get(name, ())
            if not is_neutral:
                raise PydanticCustomError(
                    "unsupported",
                    "{what} is not supported: tokens for training must be sampled from the policy itself, "
                    "with the settings of the run; remove {param}",
                    {"what": f"{name}={value!r:.80}", "param": name},
                )
        return self


class ChatRequest(GenerateRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: tuple[Message, ...] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def num_characters(self) -> int:
        """Characters of all messages and tools, approximately."""
        return sum(message.num_characters for message in self.messages) + sum(
            len(str(tool)) for tool in self.tools
        )

    @property
    def has_tools(self) -> bool:
        """True if replies may call tools."""
        return bool(self.tools) and (self.model_extra or {}).get("tool_choice") != "none"

    @property
    def reply_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(GenerateRequest):
    """Body of ``POST /v1/completions``."""

    prompt: str | tuple[int, ...]
    logprobs: int | None = Field(None, ge=0, le=0)

    @property
    def num_characters(self) -> int:
        """Characters of the prompt, or its tokens."""
        return len(self.prompt)


def parse_chat(body: bytes) -> ChatRequest:
    """Parses a chat request. Raises ApiError naming the invalid parameter."""
    return parse_body(ChatRequest, body)


def parse_completion(body: bytes) -> CompletionRequest:
    """Parses a completion request. Raises ApiError naming the invalid parameter."""
    return parse_body(CompletionRequest, body)


def single_reply(fields: Mapping[str, Any], extra: Mapping[str, Any]) -> ChatRequest:
    """Validates a chat of a protocol whose answers have one reply.

    Args:
        fields: Parameters of the chat that follow from the protocol's own.
        extra: Parameters that the protocol does not know.

    Raises:
        ApiError: If a parameter is not supported; the message names it.
    """
    if foreign := sorted(extra.keys() & fields.keys()):
        raise invalid(
            f"{foreign[0]} is not a parameter of this API; use the API's own one", param=foreign[0]
        )
    request = parse_body(ChatRequest, {**extra, **fields})
    if request.n != 1:
        raise invalid(
            f"n={request.n} is not supported: the answer has one reply; leave n out", param="n"
        )
    return request


def parse_body(kind: type[_Request], body: bytes | Mapping[str, Any]) -> _Request:
    """Validates a request, as JSON or as an object. Raises ApiError naming the invalid parameter."""
    try:
        if isinstance(body, bytes):
            return kind.model_validate_json(body)
        return kind.model_validate(body)
    except ValidationError as error:
        raise _refused(error.errors(include_url=False)) from error


def _refused(problems: Sequence[Any]) -> ApiError:
    first = problems[0]
    if first["type"] == "unsupported":
        return invalid(first["msg"], param=first["ctx"]["param"])
    param = ".".join(str(step) for step in first["loc"]) or None
    message = f"{param}: {first['msg']}" if param else str(first["msg"])
    return invalid(message, param=param)
