"""Workflow in which the policy calls tools and reads their results until it answers."""

import json
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from services.common.callables import call_problems
from services.common.models.tokenizer import Tokenizer
from services.common.runspec.base import AtLeastOne, PositiveSeconds
from services.extras.multi_turn.templates import (
    ToolCallAndResult,
    ToolRound,
    check_offered_tools,
    check_tool_results,
    tool_result_ids,
)
from services.rollout.calls.pool import CallPool
from services.rollout.data.images import has_images, with_parts
from services.rollout.data.prompts import Prompt
from services.rollout.failures import CallError, GroupError
from services.rollout.workflows.base import Episode, WorkflowResources
from services.rollout.workflows.reply_formats import ParsedCall, check_tool_format, reply_format
from services.rollout.workflows.turns import Turn

_MCP = "services.extras.multi_turn.mcp"
_SCHEMAS = "services.extras.multi_turn.mcp"


class MultiTurn:
    """Samples turns, each followed by the results of the tools that it called, until one calls none.

    The policy calls tools in the format of its model family, for example
    ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. A turn without a call is the answer,
    which the reward scores. Results are observed tokens and do not train. If a tool fails, the policy
    reads the error as its result; the sample does not fail. A result may be a list of parts
    ``{type: text, text}`` and ``{type: image, image}`` with a data URL, an http(s) URL or a Pillow
    image; a bad image fails the sample. Tools run in separate processes. The model's chat template renders
    results as messages of the role ``tool`` and opens the next turn; it also receives the tools that may be
    called.

    Args:
        tools: Python functions, ``module:function`` or ``file.py:function``, called with keyword arguments.
        mcp_servers: Commands of Model Context Protocol servers; all their tools are offered. The names of all
            tools must be distinct.
        max_turn_tokens: Max tokens of one turn; None applies only the response's limit.
        result_template: Text to add for each result instead of the chat template's rendering; it contains
            ``{result}`` in place of the result. It must end the policy's turn and open the next one.
        offer_tools: True to give the tools' names, docstrings and parameters to the chat template.
        tool_format: Format of calls; ``auto`` derives it from the chat template, with ``hermes`` as default.
    """

    def __init__(
        self,
        *,
        tools: Sequence[str] = (),
        mcp_servers: Sequence[Annotated[Sequence[str], Field(min_length=1)]] = (),
        max_turns: AtLeastOne = 8,
        max_turn_tokens: AtLeastOne | None = None,
        tool_timeout_s: PositiveSeconds = 30.0,
        result_template: str | None = None,
        offer_tools: bool = True,
        tool_format: str = "auto",
    ) -> None:
        check_tool_format(tool_format)
        if result_template is not None and "{result}" not in result_template:
            raise ValueError(
                "rollout.workflow_arguments.result_template must contain '{result}', got "
                f"{result_template!r}"
            )
        self._functions = {reference.rpartition(":")[2]: reference for reference in tools}
        if len(self._functions) < len(tools):
            raise ValueError(
                f"rollout.workflow_arguments.tools must have functions with different names, got {tools}"
            )
        self._mcp_servers = [list(command) for command in mcp_servers]
        self._mcp_tools: dict[str, list[str]] | None = None
        self._schemas: list[dict[str, Any]] = []
        self._offers_tools = offer_tools and bool(tools or mcp_servers)
        self._max_turns = max_turns
        self._max_turn_tokens = max_turn_tokens
        self._tool_timeout_s = tool_timeout_s
        self._result_template = result_template
        self._tool_format = tool_format

    def code_problems(self) -> Iterator[str]:
        """Yields why its tools cannot be imported, each with its key."""
        for reference in self._functions.values():
            yield from call_problems(reference, key="rollout.workflow_arguments.tools")

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Checks that tools can be offered and their results rendered.

        Args:
            tokenizer: The model's tokenizer; None if prompts do not use its chat template.

        Raises:
            ValueError: If tools cannot be offered or results cannot be rendered; the message has the
                configuration key and the fix.
        """
        if self._offers_tools and tokenizer is not None:
            try:
                check_offered_tools(tokenizer)
            except ValueError as error:
                raise ValueError(
                    f"rollout.workflow_arguments.offer_tools is true, but {error}; set it to false and "
                    "describe the tools in the prompts, or use the tokenizer of a chat model that calls tools"
                ) from error
        self._check_results(tokenizer)

    def _check_results(self, tokenizer: Tokenizer | None) -> None:
        if self._result_template is not None:
            return
        problem = "data.chat_template is false"
        if tokenizer is not None:
            try:
                check_tool_results(tokenizer)
            except ValueError as error:
                problem = str(error)
            else:
                return
        raise ValueError(
            "rollout.workflow_arguments: multi_turn renders tool results with the model's chat template, "
            f"but {problem}; use data.chat_template with the tokenizer of a chat model that supports tools, "
            "or set result_template"
        )

    async def run(self, episode: Episode) -> None:
        """Samples and calls tools until there is an answer or a limit is reached.

        Raises:
            CallError: If a server or a function cannot be described.
            GroupError: If the prompt with its tools leaves no room for a response, or the chat
                template cannot render results.
        """
        if self._offers_tools and episode.prompt.messages:
            await self._offer(episode)
        rounds: list[ToolRound] = []
        for _ in range(self._max_turns):
            if episode.remaining_tokens < 1:
                return
            turn = await episode.generate(max_tokens=self._max_turn_tokens)
            text = episode.text(turn)
            calls = self._calls(episode, turn)
            if not calls:
                return
            results = partial(self._results, episode, rounds, text, calls)
            if (observation := await episode.observe(results)) is None:
                return
            # Derived from the observed text, so that a resumed episode sees the same results.
            result = episode.text(observation)
            executed = tuple(
                ToolCallAndResult(name=call.name or "unknown", result=result) for call in calls
            )
            rounds.append(ToolRound(reply=text, calls=executed))

    def _calls(self, episode: Episode, turn: Turn) -> tuple[ParsedCall, ...]:
        layout = reply_format(episode.tokenizer, self._tool_format)
        text = layout.decode(episode.tokenizer, turn.token_ids)
        return layout.parse(text, self._tools(episode.prompt)).calls

    def _tools(self, prompt: Prompt) -> list[Mapping[str, Any]]:
        """Returns the tools that a prompt offers: the workflow's, and those of its row with other names."""
        tools: list[Mapping[str, Any]] = [*self._schemas] if self._offers_tools else []
        names = [_name_of(tool) for tool in tools]
        return [*tools, *(tool for tool in prompt.tools if _name_of(tool) not in names)]

    async def _offer(self, episode: Episode) -> None:
        """Renders the prompt again, with descriptions of the tools."""
        await self._servers(episode)
        prompt, tokenizer = episode.prompt, episode.tokenizer
        try:
            token_ids = tokenizer.encode(
                tokenizer.render_chat(prompt.messages, self._tools(prompt))
            )
        except ValueError as error:
            raise GroupError("tools_not_rendered", str(error), retryable=False) from error
        inputs = prompt.model_inputs
        if episode.images is not None and inputs is not None and inputs.tensors:
            token_ids, inputs = episode.images.with_places(token_ids, inputs.tensors)
        episode.prompt = replace(prompt, token_ids=tuple(token_ids), model_inputs=inputs)
        if episode.remaining_tokens < 1:
            raise GroupError(
                "prompt_too_long",
                f"the prompt with its tools has {len(token_ids)} tokens, which leaves no room for a "
                "response; offer fewer tools, or set rollout.workflow_arguments.offer_tools to false",
                retryable=False,
            )

    async def _results(
        self, episode: Episode, rounds: Sequence[ToolRound], text: str, calls: Sequence[ParsedCall]
    ) -> str | list[int] | Turn:
        results = [await self._result(episode, call) for call in calls]
        images = [image for _, result_images in results for image in result_images]
        if self._result_template is not None:
            if images:
                raise CallError(
                    "invalid_image",
                    "a tool returned an image, but rollout.workflow_arguments.result_template shows text "
                    "only; remove it and use the model's chat template",
                )
            escaped = [episode.tokenizer.escape(text) for text, _ in results]
            return "".join(self._result_template.replace("{result}", text) for text in escaped)
        executed = tuple(
            ToolCallAndResult(name=call.name or "unknown", result=result)
            for call, (result, _) in zip(calls, results, strict=True)
        )
        try:
            self._check_results(episode.tokenizer if episode.prompt.messages else None)
            token_ids = tool_result_ids(
                episode.tokenizer,
                episode.prompt.messages,
                [*rounds, ToolRound(reply=text, calls=executed)],
                self._tools(episode.prompt),
                last_id=episode.turns[-1].token_ids[-1],
            )
        except ValueError as error:
            raise GroupError("results_not_rendered", str(error), retryable=False) from error
        return await episode.look(token_ids, images) if images else token_ids

    async def _result(self, episode: Episode, call: ParsedCall) -> tuple[Any, list[Any]]:
        """Returns a call's result, as text or parts of a message, and its images."""
        if call.problem:
            return f"error: {call.problem}", []
        if not isinstance(call.arguments, Mapping):
            return "error: arguments must be an object", []
        try:
            value = await self._call(episode, call.name, call.arguments)
        except CallError as error:
            # The policy reads the tool's name, and not the path of its file on this machine.
            reference = self._functions.get(call.name, call.name)
            return f"error: {error.message.replace(repr(reference), call.name)}", []
        if has_images(value):
            (message,), images = with_parts([{"role": "tool", "content": value}], ())
            return message["content"], images
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        # Half of a surrogate pair, as of an emoji that a tool cut, cannot be encoded.
        return text.encode(errors="replace").decode(), []

    async def _call(self, episode: Episode, name: str, arguments: Mapping[str, Any]) -> Any:
        timeout_s = self._tool_timeout_s
        if name in self._functions:
            return await episode.call(self._functions[name], (), arguments, timeout_s=timeout_s)
        servers = await self._servers(episode)
        if name in servers:
            return await episode.call(
                f"{_MCP}:call_tool", (servers[name], name, arguments), timeout_s=timeout_s
            )
        names = ", ".join(sorted([*self._functions, *servers])) or "none"
        return f"error: unknown tool {name!r}; tools: {names}"

    async def _servers(self, episode: Episode) -> Mapping[str, list[str]]:
        """Returns the server command of each MCP tool; lists the tools first if that was not done before."""
        if self._mcp_tools is None:
            await self.describe_tools(episode, functions=bool(episode.prompt.messages))
        assert self._mcp_tools is not None
        return self._mcp_tools

    @asynccontextmanager
    async def serving(self, resources: WorkflowResources) -> AsyncIterator[None]:
        """Reads the schemas of the tools; their servers run in the processes of the calls.

        Raises:
            ValueError: If the tools cannot be described, or cannot be offered with this tokenizer.
        """
        self.check_tokenizer(resources.tokenizer)
        try:
            await self.describe_tools(resources.calls, functions=resources.tokenizer is not None)
        except CallError as error:
            raise ValueError(f"rollout.workflow_arguments: {error.message}") from error
        yield

    async def describe_tools(self, calls: CallPool | Episode, *, functions: bool) -> None:
        """Reads the schemas of all tools from servers and functions.

        Args:
            functions: False leaves out the schemas of functions, if no prompt shows them.

        Raises:
            CallError: If a server or a function cannot be described, or two tools have one name.
        """
        timeout_s = self._tool_timeout_s
        schemas = [
            await calls.call(f"{_SCHEMAS}:tool_schema", (reference,), timeout_s=timeout_s)
            for reference in self._functions.values()
            if self._offers_tools and functions
        ]
        origins = {name: f"the function {name!r} of tools" for name in self._functions}
        commands: dict[str, list[str]] = {}
        for command in self._mcp_servers:
            origin = f"the MCP server {shlex.join(command)!r}"
            tools = await calls.call(f"{_MCP}:list_tools", (command,), timeout_s=timeout_s)
            for tool in tools:
                name = tool["function"]["name"]
                if name in origins:
                    raise CallError(
                        "exception",
                        f"{origins[name]} and {origin} both offer a tool {name!r}, and a call names only the "
                        "tool; remove one of them, or rename it",
                    )
                origins[name], commands[name] = origin, command
            schemas += tools
        self._mcp_tools, self._schemas = commands, schemas


def _name_of(tool: Mapping[str, Any]) -> Any:
    return tool.get("function", tool).get("name")
