"""An agent with slow tools and a client with almost no cost."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any
from urllib.parse import urlsplit

Post = Callable[[bytes], Awaitable[bytes]]
"""Function that sends the body of a request and returns the body of the response."""

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the documents.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
_SYSTEM = "You answer questions about documents. Search them as often as you need to. " * 12
_RESULT = "A passage of a document that has something to do with what was searched for. " * 6


async def use_tools(
    base_url: str, api_key: str, model: str, prompt: str, row: Mapping[str, Any]
) -> dict[str, Any]:
    """Plays an episode over HTTP; returns the same as :func:`converse`."""
    connection = _Connection(base_url, api_key, _TALKS[row["protocol"]].path)
    try:
        return await converse(connection.post, model, prompt, row)
    finally:
        connection.close()


async def converse(post: Post, model: str, prompt: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Alternates between requests with the whole conversation so far and a tool.

    Args:
        post: Sends a request to the endpoint.
        model: Name of the model.
        prompt: The question.
        row: ``number`` of the episode, its ``turns``, ``sleep``: min and max seconds of a tool,
            and ``protocol``: one of :data:`PROTOCOLS`.

    Returns:
        ``turns``: for each, seconds of the event loop's clock when it was sent and when it was
            answered, and the tokens of the reply.
    """
    random, now = Random(row["number"]), asyncio.get_running_loop().time
    talk = _TALKS[row["protocol"]](model, prompt)
    turns = []
    for number in range(row["turns"]):
        if number:
            await asyncio.sleep(random.uniform(*row["sleep"]))
            talk.add_result(f"{_RESULT}{number}", f"call_{number}")
        body = talk.body()
        sent = now()
        answer = json.loads(await post(body))
        received = now()
        turns.append((sent, received, talk.add_reply(answer)))
    return {"turns": turns}


class _Chat:
    """A conversation in OpenAI's chat completions."""

    path = "/chat/completions"
    list_key = "messages"

    def __init__(self, model: str, prompt: str) -> None:
        self._head = json.dumps({"model": model, **self.more()})[:-1].encode()
        self._said = [json.dumps(message).encode() for message in self.first(prompt)]

    def more(self) -> dict[str, Any]:
        return {"tools": [_TOOL]}

    def first(self, prompt: str) -> list[dict[str, Any]]:
        return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": prompt}]

    def body(self) -> bytes:
        return self._head + f', "{self.list_key}": ['.encode() + b",".join(self._said) + b"]}"

    def add_result(self, result: str, call_id: str) -> None:
        self._add({"role": "tool", "content": result, "tool_call_id": call_id})

    def add_reply(self, answer: dict[str, Any]) -> int:
        """Adds the reply; returns its number of tokens."""
        self._add(answer["choices"][0]["message"])
        return int(answer["usage"]["completion_tokens"])

    def _add(self, *items: Any) -> None:
        self._said += [json.dumps(item).encode() for item in items]


class _Messages(_Chat):
    """A conversation in Anthropic's messages."""

    path = "/messages"

    def more(self) -> dict[str, Any]:
        function = _TOOL["function"]
        tool = {"name": function["name"], "input_schema": function["parameters"]}
        return {"max_tokens": 4096, "system": _SYSTEM, "tools": [tool]}

    def first(self, prompt: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": prompt}]

    def add_result(self, result: str, call_id: str) -> None:
        block = {"type": "tool_result", "tool_use_id": call_id, "content": result}
        self._add({"role": "user", "content": [block]})

    def add_reply(self, answer: dict[str, Any]) -> int:
        self._add({"role": "assistant", "content": answer["content"]})
        return int(answer["usage"]["output_tokens"])


class _Responses(_Chat):
    """A conversation in OpenAI's responses."""

    path = "/responses"
    list_key = "input"

    def more(self) -> dict[str, Any]:
        return {"instructions": _SYSTEM, "tools": [{"type": "function", **_TOOL["function"]}]}

    def first(self, prompt: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": prompt}]

    def add_result(self, result: str, call_id: str) -> None:
        self._add({"type": "function_call_output", "call_id": call_id, "output": result})

    def add_reply(self, answer: dict[str, Any]) -> int:
        self._add(*answer["output"])
        return int(answer["usage"]["output_tokens"])


class _Completions(_Chat):
    """A text in OpenAI's completions."""

    path = "/completions"

    def __init__(self, model: str, prompt: str) -> None:
        self._model = model
        self._text = f"{_SYSTEM}\n{prompt}\n"

    def body(self) -> bytes:
        return json.dumps({"model": self._model, "prompt": self._text}).encode()

    def add_result(self, result: str, call_id: str) -> None:
        del call_id
        self._text += f"\n{result}\n"

    def add_reply(self, answer: dict[str, Any]) -> int:
        self._text += answer["choices"][0]["text"]
        return int(answer["usage"]["completion_tokens"])


_TALKS: Mapping[str, type[_Chat]] = {
    "chat": _Chat,
    "completions": _Completions,
    "messages": _Messages,
    "responses": _Responses,
}
PROTOCOLS = tuple(_TALKS)


class _Connection:
    """A persistent connection, reopened if the server has closed it."""

    def __init__(self, base_url: str, api_key: str, path: str) -> None:
        url = urlsplit(base_url)
        self._address = url.hostname, url.port
        self._head = (
            f"POST {url.path}{path} HTTP/1.1\r\nHost: {url.netloc}\r\n"
            f"Authorization: Bearer {api_key}\r\nContent-Type: application/json\r\nContent-Length: "
        ).encode()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: bytes) -> bytes:
        if self._streams is None or self._streams[0].at_eof():
            self.close()
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        writer.write(self._head + b"%d\r\n\r\n" % len(body) + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r")[0])
        answer = await reader.readexactly(length)
        if not head.startswith(b"http/1.1 200"):
            raise ValueError(answer.decode())
        return answer

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
