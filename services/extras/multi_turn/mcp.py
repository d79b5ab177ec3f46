"""Client for tools of Model Context Protocol servers, over standard input and output.

It runs in a worker process. A server starts at its first call and lives as long as the worker
process. Protocol: JSON-RPC 2.0, one message per line (modelcontextprotocol.io, revision
2025-06-18).
"""

import functools
import inspect
import itertools
import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from services.common.callables import load_callable


def tool_schema(reference: str) -> dict[str, Any]:
    """Describes a function in the format of OpenAI's API: name, docstring, and parameters from their types.

    Args:
        reference: ``module:function`` or ``file.py:function``.

    Raises:
        ValueError: If its parameters have no JSON schema.
    """
    function: Any = load_callable(reference)
    try:
        parameters = TypeAdapter(function).json_schema()
    except Exception as error:
        raise ValueError(
            f"no JSON schema can be generated for {reference!r}: {error}; annotate its parameters with JSON "
            "types"
        ) from error
    return {
        "type": "function",
        "function": {
            "name": reference.rpartition(":")[2],
            "description": inspect.getdoc(function) or "",
            "parameters": parameters,
        },
    }


_PROTOCOL_VERSION = "2025-06-18"


class _Server:
    """Running MCP server."""

    def __init__(self, command: Sequence[str]) -> None:
        self._numbers = itertools.count(1)
        self._name = f"the MCP server {shlex.join(command)!r}"
        self._process = subprocess.Popen(  # noqa: S603 -- the run's specification names the command
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
        )
        self.request(
            "initialize",
            {
                "protocolVersion": _PROTOCOL_VERSION,
                "capabilities": {},
                "clientInfo": {"name": "slipstream", "version": "1"},
            },
        )
        self._send({"method": "notifications/initialized"})

    def request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        self._send({"id": number, "method": method, "params": params})
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = _message(line)
            if message.get("id") != number or "method" in message:
                continue  # a notification, or a request that this client does not serve
            if "error" in message:
                raise RuntimeError(f"{self._name} rejected {method}: {message['error']!s:.500}")
            result: dict[str, Any] = message["result"]
            return result
        raise RuntimeError(
            f"{self._name} exited during {method} (exit status {self._process.wait()})"
        )

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self._process.stdin.flush()


def list_tools(command: Sequence[str]) -> list[dict[str, Any]]:
    """Lists the tools of a server, in the format of OpenAI's API."""
    tools: list[dict[str, Any]] = []
    params: dict[str, Any] = {}
    while True:
        result = _server(tuple(command)).request("tools/list", params)
        tools += map(_described, result["tools"])
        if not result.get("nextCursor"):
            return tools
        params = {"cursor": result["nextCursor"]}


def call_tool(command: Sequence[str], name: str, arguments: Mapping[str, Any]) -> Any:
    """Calls a tool and returns the text of its result, or parts with texts and data URLs if it has images.

    Raises:
        RuntimeError: If the tool reports an error.
    """
    result = _server(tuple(command)).request("tools/call", {"name": name, "arguments": arguments})
    text = "\n".join(block["text"] for block in result["content"] if block.get("type") == "text")
    if result.get("isError"):
        raise RuntimeError(text or f"tool {name!r} failed")
    if all(block.get("type") != "image" for block in result["content"]):
        return text
    return [
        {"type": "text", "text": block["text"]}
        if block["type"] == "text"
        else {"type": "image", "image": f"data:{block['mimeType']};base64,{block['data']}"}
        for block in result["content"]
        if block.get("type") in ("text", "image")
    ]


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool["name"],
            "description": tool.get("description", ""),
            "parameters": tool.get("inputSchema", {"type": "object", "properties": {}}),
        },
    }


def _message(line: str) -> dict[str, Any]:
    """Parses a message of a server; returns an empty dict for other output."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


@functools.cache
def _server(command: tuple[str, ...]) -> _Server:
    return _Server(command)
