"""Answers as OpenAI's API gives them, in one piece or as server-sent events."""

import json
from collections.abc import Iterator
from typing import Any

from services.common.models.tokenizer import Tokenizer
from services.rollout.openai.record import Choice, Replies
from services.rollout.openai.requests import ChatRequest, CompletionRequest, Message
from services.rollout.workflows.turns import Turn

_DONE = "data: [DONE]\n\n"


class Formatter:
    """Writes the answers to one request.

    Args:
        request: What was asked.
        replies: What was sampled.
        tokenizer: The model's; for the texts of single tokens.
        reply_id: Names the answer.
        created: Unix seconds.
    """

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        replies: Replies,
        *,
        tokenizer: Tokenizer,
        reply_id: str,
        created: int,
    ) -> None:
        self._request = request
        self._replies = replies
        self._tokenizer = tokenizer
        self._is_chat = isinstance(request, ChatRequest)
        self._name = "chat.completion" if self._is_chat else "text_completion"
        self._head = {"id": reply_id, "created": created, "model": request.model}

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            self._choice(index, choice) for index, choice in enumerate(self._replies.choices)
        ]
        return {**self._head, "object": self._name, "choices": choices, "usage": self._usage()}

    def events(self) -> Iterator[str]:
        """The answer as server-sent events. A reply is sent when it is complete, in one event."""
        for index, choice in enumerate(self._replies.choices):
            for part in self._parts(index, choice):
                yield self._event([part])
        if self._request.with_usage:
            yield self._event([], usage=self._usage())
        yield _DONE

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        name = f"{self._name}.chunk" if self._is_chat else self._name
        chunk = {**self._head, "object": name, "choices": choices, **more}
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
            "logprobs": self._logprobs(choice.turn),
        }

    def _parts(self, index: int, choice: Choice) -> Iterator[dict[str, Any]]:
        """The pieces of one choice in a stream."""
        if not self._is_chat:
            yield self._choice(index, choice)
            return
        delta = _message(choice.message)
        for number, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = number
        logprobs = self._logprobs(choice.turn)
        yield {"index": index, "delta": delta, "finish_reason": None, "logprobs": logprobs}
        yield {"index": index, "delta": {}, "finish_reason": choice.finish_reason}

    def _usage(self) -> dict[str, int]:
        prompt, reply = self._replies.num_prompt_tokens, self._replies.num_reply_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": reply,
            "total_tokens": prompt + reply,
        }

    def _logprobs(self, turn: Turn) -> dict[str, Any] | None:
        """Logprobs of the sampled tokens, if they were asked for."""
        wanted = self._request.logprobs
        if wanted is None or wanted is False:
            return None
        texts = [self._tokenizer.decode([token]) for token in turn.token_ids]
        if isinstance(self._request, CompletionRequest):
            offsets = [sum(map(len, texts[:place])) for place in range(len(texts))]
            return {
                "tokens": texts,
                "token_logprobs": list(turn.logprobs),
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
                for text, logprob in zip(texts, turn.logprobs, strict=True)
            ]
        }


def _message(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": call.function.model_dump()}
            for call in message.tool_calls
        ]
    return body
