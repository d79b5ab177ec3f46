"""Answers in the format of OpenAI's chat and text completions, as a body or as server-sent events."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from services.common.models.tokenizer import Tokenizer
from services.extras.agents.record import Choice, Replies
from services.extras.agents.requests import ApiError, ChatRequest, CompletionRequest, Message
from services.extras.agents.streaming import NewTokens, Piece

_DONE = "data: [DONE]\n\n"


class CompletionFormatter:
    """Formats the answers to one request; a :class:`~services.extras.agents.streaming.Formatter`.

    Args:
        tokenizer: The model's tokenizer; decodes single tokens for logprobs.
        created: Unix seconds.
    """

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        *,
        tokenizer: Tokenizer,
        reply_id: str,
        created: int,
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._is_chat = isinstance(request, ChatRequest)
        self._name = "chat.completion" if self._is_chat else "text_completion"
        self._head = {"id": reply_id, "created": created, "model": request.model}

    def body(self, replies: Replies) -> dict[str, Any]:
        choices = [self._choice(index, choice) for index, choice in enumerate(replies.choices)]
        return {**self._head, "object": self._name, "choices": choices, "usage": _usage(replies)}

    def begin_events(self, num_replies: int, *, num_prompt_tokens: int) -> Iterator[str]:
        """Yields the first event of each chat reply, which has the role."""
        del num_prompt_tokens
        for index in range(num_replies if self._is_chat else 0):
            delta = {"role": "assistant", "content": ""}
            yield self._event([{"index": index, "delta": delta, "finish_reason": None}])

    def tokens_events(self, new: NewTokens) -> Iterator[str]:
        choice_chunk = {
            "index": new.reply_index,
            **({"delta": _delta(new.piece)} if self._is_chat else {"text": new.piece.content}),
            "finish_reason": None,
            "logprobs": self._logprobs(new.token_ids, new.logprobs, begin=new.begin),
        }
        yield self._event([choice_chunk])

    def end_events(self, index: int, choice: Choice, rest: Piece) -> Iterator[str]:
        """Yields the last event of a reply: finish reason, tool calls, and the text that was held back."""
        if not self._is_chat:
            choice_chunk = {
                "index": index,
                "text": rest.content,
                "finish_reason": choice.finish_reason,
            }
            yield self._event([choice_chunk])
            return
        delta = {"role": "assistant", **_delta(rest), **_tool_calls(choice.message)}
        for number, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = number
        yield self._event([{"index": index, "delta": delta, "finish_reason": choice.finish_reason}])

    def last_events(self, replies: Replies) -> Iterator[str]:
        if self._request.with_usage:
            yield self._event([], usage=_usage(replies))
        yield _DONE

    def error_event(self, error: ApiError) -> str:
        return f"data: {json.dumps(error.body)}\n\n"

    def _event(self, choices: list[dict[str, Any]], **fields: Any) -> str:
        name = f"{self._name}.chunk" if self._is_chat else self._name
        chunk = {**self._head, "object": name, "choices": choices, **fields}
        return f"data: {json.dumps(chunk)}\n\n"

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        content: dict[str, Any] = (
            {"message": _message(choice.message)}
            if self._is_chat
            else {"text": choice.message.text}
        )
        return {
            "index": index,
            **content,
            "finish_reason": choice.finish_reason,
            "logprobs": self._logprobs(choice.turn.token_ids, choice.turn.logprobs, begin=0),
        }

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], *, begin: int
    ) -> dict[str, Any] | None:
        """Returns logprobs of sampled tokens, if the request asks for them."""
        num_logprobs = self._request.logprobs
        if num_logprobs is None or num_logprobs is False:
            return None
        texts = [self._tokenizer.decode([token]) for token in tokens]
        if isinstance(self._request, CompletionRequest):
            offsets = [begin + sum(map(len, texts[:index])) for index in range(len(texts))]
            return {
                "tokens": texts,
                "token_logprobs": list(logprobs),
                "top_logprobs": None,
                "text_offset": offsets,
            }
        return {
            "content": [
                {
                    "token": text,
                    "logprob": logprob,
                    "bytes": list(text.encode()),
                    "top_logprobs": [],
                }
                for text, logprob in zip(texts, logprobs, strict=True)
            ]
        }


def _usage(replies: Replies) -> dict[str, int]:
    prompt, reply = replies.num_prompt_tokens, replies.num_reply_tokens
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}


def _delta(piece: Piece) -> dict[str, Any]:
    reasoning = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
    return {"content": piece.content, **reasoning}


def _message(message: Message) -> dict[str, Any]:
    body = {"role": "assistant", "content": message.content, **_tool_calls(message)}
    if message.reasoning_content:
        body["reasoning_content"] = message.reasoning_content
    return body


def _tool_calls(message: Message) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": call.function.model_dump()}
        for call in message.tool_calls or ()
    ]
    return {"tool_calls": calls} if calls else {}
