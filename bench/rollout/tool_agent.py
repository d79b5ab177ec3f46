"""An agent with slow tools and a client with almost no cost."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any
from urllib.parse import urlsplit

Post = Callable[[bytes], Awaitable[bytes]]
"""Function that sends the body of a request and returns the body of the response."""

_TOOL = {
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
    connection = _Connection(base_url, api_key)
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
        row: ``number`` of the episode, its ``turns``, and ``sleep``: min and max seconds of a tool.

    Returns:
        ``turns``: for each, seconds of the event loop's clock when it was sent and when it was
            answered, and the tokens of the reply.
    """
    random, now = Random(row["number"]), asyncio.get_running_loop().time
    head = json.dumps({"model": model, "tools": [_TOOL]})[:-1].encode() + b', "messages": ['
    said = [_message("system", _SYSTEM), _message("user", prompt)]
    turns = []
    for number in range(row["turns"]):
        if number:
            await asyncio.sleep(random.uniform(*row["sleep"]))
            said.append(_message("tool", f"{_RESULT}{number}", tool_call_id=f"call_{number}"))
        body = head + b",".join(said) + b"]}"
        sent = now()
        answer = json.loads(await post(body))
        received = now()
        turns.append((sent, received, answer["usage"]["completion_tokens"]))
        said.append(json.dumps(answer["choices"][0]["message"]).encode())
    return {"turns": turns}


def _message(role: str, content: str, **more: str) -> bytes:
    return json.dumps({"role": role, "content": content, **more}).encode()


class _Connection:
    """A persistent connection, reopened if the server has closed it."""

    def __init__(self, base_url: str, api_key: str) -> None:
        url = urlsplit(base_url)
        self._address = url.hostname, url.port
        self._head = (
            f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\n"
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
