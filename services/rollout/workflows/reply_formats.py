# ruff: noqa: RUF001 -- some models write their marks with fullwidth characters
"""Reads tool calls and reasoning out of the text that a policy sampled, in the format of its model family.

What trains are the sampled tokens; a parsed reply is only a view of them. Each parser is linear in the text,
because a policy may repeat a mark thousands of times, and none raises: text that is no call stays content.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from services.common.models.tokenizer import Tokenizer
from services.common.runspec.base import did_you_mean

_DECODER = json.JSONDecoder()
_NO_JSON = (ValueError, RecursionError)
_LLAMA_CALL = re.compile(r'\{\s*"(?:name|type|parameters|arguments)"')
# Max tokens of a begin mark of reasoning, which has only a few.
_MAX_MARK_TOKENS = 16
# Bounds the time for a text that begins thousands of objects and ends none.
_MAX_FAILED = 64
Tools = Sequence[Mapping[str, Any]]
"""Tools in the format of OpenAI's API: ``{"type": "function", "function": {"name", "parameters"}}``."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One tool call in a reply."""

    start: int
    """Index of its first character in the reply."""
    name: str
    """Name of the tool; empty if the call has none."""
    arguments: Any
    """Arguments, normally an object; their text if it is not JSON but the call has a separate name."""
    id: str = ""
    """Id that the policy wrote (Kimi K2, Mistral); empty in all other formats."""
    problem: str = ""
    """Why the text is no valid call; empty if it is one."""

    @property
    def is_reported(self) -> bool:
        """True if agents receive it: it is valid, or it names a tool and only its arguments are broken."""
        return not self.problem or (bool(self.name) and isinstance(self.arguments, str))


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """Parts of a reply."""

    content: str
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()
    """All calls, including invalid ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Format in which a model family writes tool calls."""

    find: Callable[[str, Tools], Iterator[ParsedCall]]
    """Yields the calls of a text in order."""
    begins: tuple[str, ...]
    """Marks with which calls begin; a streamed reply's visible text ends before the first one."""
    template_marks: tuple[str, ...]
    """Texts by which a chat template is recognized; one of them suffices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Marks around a reply's reasoning."""

    begin: str
    end: str
    label: str = ""
    """Text after the begin mark that is not part of the reasoning."""

    def split(self, text: str, *, is_open: bool, calls: Sequence[str] = ()) -> tuple[str, str]:
        """Splits a reply into reasoning and the rest.

        Args:
            is_open: True if the prompt ends with the begin mark, so that the reply starts inside.
            calls: Marks with which calls begin; the first one ends a reasoning that has no end mark.
        """
        start = text.lstrip()
        if start.startswith(self.begin):
            text, is_open = start[len(self.begin) :].removeprefix(self.label), True
        before, separator, rest = text.partition(self.end)
        if separator and (is_open or self.begin not in before):
            return before.strip(), rest.lstrip()
        if not is_open:
            return "", text
        end = min([index for mark in calls if (index := text.find(mark)) >= 0], default=len(text))
        return text[:end].strip(), text[end:]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormat:
    """Format of a model's replies."""

    name: str
    tools: ToolFormat
    reasoning: ReasoningFormat | None
    has_special_marks: bool
    """True if some marks are special tokens, which a plain decode leaves out."""
    special_tokens: tuple[str, ...]
    """Special tokens, which are removed from content and reasoning."""

    def decode(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
        """Returns a reply's text, with special tokens if marks are among them, without its end token."""
        if not self.has_special_marks:
            return tokenizer.decode(token_ids)
        ends = tokenizer.stop_ids
        content = token_ids[:-1] if token_ids and token_ids[-1] in ends else token_ids
        return tokenizer.decode(content, keeps_special=True)

    def parse(
        self, text: str, tools: Tools = (), *, has_tools: bool = True, is_open: bool = False
    ) -> ParsedReply:
        """Splits a reply into reasoning, content and calls.

        Args:
            text: The reply, as :meth:`decode` returns it.
            tools: Tools that the prompt offers; their schemas give arguments their types in formats
                without types.
            has_tools: False to treat calls as content.
            is_open: True if the prompt opened the reasoning.
        """
        if self.name == "gpt_oss":
            return _harmony(text, has_tools=has_tools)
        reasoning = ""
        if self.reasoning is not None:
            marks = self.tools.begins if has_tools else ()
            reasoning, text = self.reasoning.split(text, is_open=is_open, calls=marks)
        calls = tuple(self.tools.find(text, tools)) if has_tools else ()
        reported_calls = [call for call in calls if call.is_reported]
        content = text[: reported_calls[0].start].strip() if reported_calls else text
        return ParsedReply(self._plain(content), self._plain(reasoning), calls)

    def opens_reasoning(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
        """Returns True if a prompt that ends with these tokens has opened the reasoning."""
        if self.reasoning is None:
            return False
        end = tokenizer.decode(prompt_ids[-_MAX_MARK_TOKENS:], keeps_special=True)
        return end.rstrip().endswith(self.reasoning.begin)

    def _plain(self, text: str) -> str:
        if self.has_special_marks:
            for token in self.special_tokens:
                text = text.replace(token, "")
        return text


def reply_format(tokenizer: Tokenizer, name: str = "auto") -> ReplyFormat:
    """Returns the format of a model's replies.

    Args:
        tokenizer: The model's tokenizer, whose chat template determines the formats of calls and reasoning.
        name: Name of the tool format, or ``auto``, which is ``hermes`` if the template shows none.

    Raises:
        ValueError: If there is no such format.
    """
    check_tool_format(name)
    return _reply_format(tokenizer, name)


def check_tool_format(name: str) -> None:
    """Raises a ValueError that names the key if there is no such tool format."""
    if name != "auto" and name not in TOOL_FORMATS:
        raise ValueError(
            "rollout.workflow_arguments.tool_format must be auto or one of "
            f"{', '.join(TOOL_FORMATS)}, but is {name!r}." + did_you_mean(name, tuple(TOOL_FORMATS))
        )


@lru_cache(maxsize=16)
def _reply_format(tokenizer: Tokenizer, name: str) -> ReplyFormat:
    template, vocabulary = tokenizer.chat_template, tokenizer.vocabulary
    if name == "auto":
        names = (
            key
            for key, kind in TOOL_FORMATS.items()
            if any(mark in template for mark in kind.template_marks)
        )
        name = next(names, "hermes")
    tools = TOOL_FORMATS[name]
    reasoning = next(
        (
            item
            for item in REASONING_FORMATS
            if item.end in template or (item.end in vocabulary and item.begin in vocabulary)
        ),
        None,
    )
    marks = [*tools.begins, *((reasoning.begin, reasoning.end) if reasoning else ())]
    special = tuple(tokenizer.special_tokens)
    return ReplyFormat(
        name=name,
        tools=tools,
        reasoning=reasoning,
        has_special_marks=any(token in mark for mark in marks for token in special),
        special_tokens=special,
    )


def _hermes(text: str, _tools: Tools) -> Iterator[ParsedCall]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen2.5, Qwen3)."""
    for start, inner, is_closed in _blocks(text, "<tool_call>", "</tool_call>"):
        if inner.startswith("{") and (inner.endswith("}") or not is_closed):
            call = _json_call(start, inner)
            if is_closed or not call.problem:
                yield call


def _blocks(text: str, begin: str, end: str) -> Iterator[tuple[int, str, bool]]:
    """Yields place, stripped inner text and whether it is closed, for each pair of marks.

    If a mark is repeated before its end, the earlier ones may be prose, and the last one counts unless the
    text between the first and the end is an object.
    """
    start = text.find(begin)
    while start >= 0:
        stop = text.find(end, start)
        is_closed = stop >= 0
        stop = stop if is_closed else len(text)
        inner = text[start + len(begin) : stop].strip()
        if begin in inner and not inner.startswith("{"):
            start = text.rfind(begin, start, stop)
            inner = text[start + len(begin) : stop].strip()
        yield start, inner, is_closed
        start = text.find(begin, stop)


def _json_call(start: int, text: str) -> ParsedCall:
    try:
        call = json.loads(text)
        name = call["name"]
        arguments = call.get("arguments", call.get("parameters", {}))
    except (*_NO_JSON, KeyError, TypeError) as error:
        return ParsedCall(
            start,
            _name_in(text),
            {},
            problem=f"a call must be JSON with name and arguments ({error})",
        )
    if not isinstance(name, str):
        return ParsedCall(start, "", {}, problem="a call's name must be text")
    return ParsedCall(start, name, {} if arguments is None else arguments)


def _name_in(text: str) -> str:
    """Returns the value of ``name`` in a malformed JSON object; empty if it cannot be read."""
    _, separator, rest = text.partition('"name"')
    rest = rest.lstrip().removeprefix(":").lstrip()
    if not separator or not rest.startswith('"'):
        return ""
    return rest[1:].partition('"')[0]


def _qwen3_coder(text: str, tools: Tools) -> Iterator[ParsedCall]:
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``."""
    begin, end, opens = "<function=", "</function>", "<tool_call>"
    start = text.find(begin)
    while start >= 0:
        stop = text.find(end, start)
        stop = len(text) if stop < 0 else stop
        name, closes, body = text[start + len(begin) : stop].partition(">")
        if closes and name.strip():
            wrapped = text.rfind(opens, 0, start)
            is_wrapped = wrapped >= 0 and not text[wrapped + len(opens) : start].strip()
            types = _types(tools, name.strip())
            arguments = {key: _typed(value, types, key) for key, value in _xml_parameters(body)}
            yield ParsedCall(wrapped if is_wrapped else start, name.strip(), arguments)
        start = text.find(begin, stop)


def _xml_parameters(body: str) -> Iterator[tuple[str, str]]:
    begin, end = "<parameter=", "</parameter>"
    start = body.find(begin)
    while start >= 0:
        following = body.find(begin, start + 1)
        limit = len(body) if following < 0 else following
        stop = body.find(end, start, limit)
        key, closes, value = body[start + len(begin) : limit if stop < 0 else stop].partition(">")
        if closes:
            yield key.strip(), value.removeprefix("\n").removesuffix("\n")
        start = following


def _glm(text: str, tools: Tools) -> Iterator[ParsedCall]:
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`` (GLM-4.5 to 4.7)."""
    for start, inner, _ in _blocks(text, "<tool_call>", "</tool_call>"):
        name = inner.partition("<arg_key>")[0].strip()
        if not name or any(mark in name for mark in '<>{}"\n '):
            continue
        types, arguments = _types(tools, name), {}
        for pair in inner.split("<arg_key>")[1:]:
            key, _, rest = pair.partition("</arg_key>")
            value = rest.partition("<arg_value>")[2].partition("</arg_value>")[0]
            arguments[key.strip()] = _typed(value, types, key.strip())
        yield ParsedCall(start, name, arguments)


def _deepseek_v3(text: str, _tools: Tools) -> Iterator[ParsedCall]:
    """DeepSeek V3 and R1 (a fenced block after ``function<sep>NAME``), and V3.1 (``NAME<sep>JSON``)."""
    section = text.find("<｜tool▁calls▁begin｜>")
    blocks = _blocks(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    for number, (start, inner, _) in enumerate(blocks):
        kind, separator, rest = inner.partition("<｜tool▁sep｜>")
        if not separator:
            continue
        name, body = kind.strip(), rest
        if name == "function" and "```" in rest:
            name, _, body = rest.partition("\n")
            body = body.strip().removeprefix("```json").removesuffix("```")
        at = section if number == 0 and 0 <= section < start else start
        yield _named_call(at, name.strip(), body)


def _kimi_k2(text: str, _tools: Tools) -> Iterator[ParsedCall]:
    """``<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>JSON<|tool_call_end|>``."""
    section = text.find("<|tool_calls_section_begin|>")
    for number, (start, inner, _) in enumerate(
        _blocks(text, "<|tool_call_begin|>", "<|tool_call_end|>")
    ):
        id_, separator, body = inner.partition("<|tool_call_argument_begin|>")
        id_ = id_.strip()
        name, _, index = id_.removeprefix("functions.").rpartition(":")
        if separator and name and index.isdigit():
            at = section if number == 0 and 0 <= section < start else start
            yield _named_call(at, name, body, id_)


def _named_call(start: int, name: str, body: str, id_: str = "") -> ParsedCall:
    try:
        return ParsedCall(start, name, json.loads(body) if body.strip() else {}, id_)
    except _NO_JSON as error:
        return ParsedCall(
            start, name, body, id_, problem=f"the arguments of {name} must be JSON ({error})"
        )


def _llama3_json(text: str, _tools: Tools) -> Iterator[ParsedCall]:
    """``{"name": ..., "parameters": {...}}``, several separated by ``;`` (Llama 3.1 to 3.3)."""
    mark, stop, num_failed = "<|python_tag|>", 0, 0
    for match in _LLAMA_CALL.finditer(text):
        start = match.start()
        if start < stop:  # inside the last call
            continue
        try:
            call, stop = _DECODER.raw_decode(text, start)
        except _NO_JSON:
            num_failed += 1
            if num_failed == _MAX_FAILED:
                return
            continue
        arguments = call.get("parameters", call.get("arguments"))
        if isinstance(call.get("name"), str) and isinstance(arguments, dict):
            before = text[:start].rstrip()
            start_of_call = len(before) - len(mark) if before.endswith(mark) else start
            yield ParsedCall(start_of_call, call["name"], arguments)


def _pythonic(text: str, _tools: Tools) -> Iterator[ParsedCall]:
    """``[NAME(KEY=VALUE), ...]``, the whole reply (Llama 3.2 and 4, and OLMo)."""
    code = text.strip()
    for mark in ("<|python_tag|>", "<|python_start|>"):
        code = code.removeprefix(mark)
    code = code.removesuffix("<|python_end|>").strip()
    if not (code.startswith("[") and code.endswith(")]")):
        return
    try:
        calls = ast.parse(code, mode="eval").body
        assert isinstance(calls, ast.List)
        for call in calls.elts:
            assert isinstance(call, ast.Call)
            assert not call.args
            arguments = {str(pair.arg): ast.literal_eval(pair.value) for pair in call.keywords}
            json.dumps(arguments)
            yield ParsedCall(0, ast.unparse(call.func), arguments)
    except (AssertionError, SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return


def _mistral(text: str, _tools: Tools) -> Iterator[ParsedCall]:
    """``[TOOL_CALLS][{"name", "arguments"}]`` or ``[TOOL_CALLS]NAME[ARGS]{...}`` for each call."""
    mark = "[TOOL_CALLS]"
    start = text.find(mark)
    while start >= 0:
        stop = text.find(mark, start + 1)
        body = text[start + len(mark) : len(text) if stop < 0 else stop].strip()
        if body.startswith(("[", "{")):
            try:
                value, _ = _DECODER.raw_decode(body)
            except _NO_JSON as error:
                yield ParsedCall(start, "", {}, problem=f"calls must be JSON ({error})")
                return
            for call in value if isinstance(value, list) else [value]:
                yield _json_call(start, json.dumps(call))
        elif "{" in body:
            head, _, rest = body.partition("{")
            id_ = head.partition("[CALL_ID]")[2].partition("[ARGS]")[0].strip()
            name = head.partition("[")[0].strip()
            try:
                arguments, _ = _DECODER.raw_decode("{" + rest)
            except _NO_JSON as error:
                yield ParsedCall(
                    start, name, {}, problem=f"the arguments of {name} must be JSON ({error})"
                )
            else:
                yield ParsedCall(start, name, arguments, id_)
        start = stop


def _gemma(begin: str, end: str, quote: str) -> Callable[[str, Tools], Iterator[ParsedCall]]:
    """``<begin>call:NAME{KEY:VALUE, ...}<end>`` with quoted texts (FunctionGemma, Gemma 4)."""

    def find(text: str, tools: Tools) -> Iterator[ParsedCall]:
        for start, inner, _ in _blocks(text, begin, end):
            name, separator, body = inner.removeprefix("call:").partition("{")
            name = name.strip()
            if not inner.startswith("call:") or not separator or not name:
                continue
            try:
                values = _GemmaObject("{" + body, quote).read()
            except (IndexError, RecursionError):
                yield ParsedCall(
                    start, name, {}, problem=f"the arguments of {name} must end with a brace"
                )
                continue
            types = _types(tools, name)
            arguments = {
                key: _typed(value, types, key) if isinstance(value, str) else value
                for key, value in values.items()
            }
            yield ParsedCall(start, name, arguments)

    return find


class _GemmaObject:
    """Reads ``{key:value, ...}`` with ``[...]`` arrays and quoted texts; raises IndexError if incomplete."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self._at = 0

    def read(self) -> dict[str, Any]:
        value = self._value()
        return value if isinstance(value, dict) else {}

    def _value(self) -> Any:
        self._skip(" \n\t")
        if self._text.startswith(self._quote, self._at):
            start = self._at + len(self._quote)
            end = self._text.find(self._quote, start)
            if end < 0:
                raise IndexError
            self._at = end + len(self._quote)
            return self._text[start:end]
        opens = self._text[self._at]
        if opens == "{":
            return dict(self._items("}", has_keys=True))
        if opens == "[":
            return [value for _, value in self._items("]", has_keys=False)]
        start = self._at
        while self._text[self._at] not in ",}]":
            self._at += 1
        return _literal(self._text[start : self._at].strip())

    def _items(self, closes: str, *, has_keys: bool) -> Iterator[tuple[str, Any]]:
        self._at += 1
        while True:
            self._skip(" ,\n\t")
            if self._text[self._at] == closes:
                self._at += 1
                return
            if self._text[self._at] in "}]":
                raise IndexError
            key = ""
            if has_keys:
                end = self._text.find(":", self._at)
                if end < 0:
                    raise IndexError
                key = self._text[self._at : end].replace(self._quote, "").strip()
                self._at = end + 1
            yield key, self._value()

    def _skip(self, characters: str) -> None:
        while self._text[self._at] in characters:
            self._at += 1


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except _NO_JSON:
        return text


def _types(tools: Tools, name: str) -> Mapping[str, Any] | None:
    """Returns the schemas of a tool's parameters; None if no such tool is offered."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            parameters = function.get("parameters") or {}
            return parameters.get("properties") or {}
    return None


def _typed(text: str, schemas: Mapping[str, Any] | None, key: str) -> Any:
    """Converts an argument that is written without a type to the type that its schema states.

    An argument without a schema is parsed as JSON or as a Python literal, if possible. Text that does not fit
    its schema stays text.
    """
    types = _names_of_types((schemas or {}).get(key) or {})
    if types == {"string"}:
        return text
    plain = text.strip()
    if "boolean" in types and plain.lower() in ("true", "false"):
        return plain.lower() == "true"
    if "string" in types:
        return None if plain == "null" and "null" in types else text
    try:
        return json.loads(plain)
    except _NO_JSON:
        pass
    try:
        literal = ast.literal_eval(plain)
        json.dumps(literal)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return text
    return literal


def _names_of_types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    type_names = schema.get("type", ())
    names = {type_names} if isinstance(type_names, str) else set(map(str, type_names))
    for key in ("anyOf", "oneOf", "allOf"):
        for alternative in schema.get(key) or ():
            names |= _names_of_types(alternative)
    return names


def _harmony(text: str, *, has_tools: bool) -> ParsedReply:
    """Messages of several channels (gpt-oss): analysis is reasoning, commentary may call a tool."""
    content, reasoning, calls = [], [], []
    start = 0
    for message in text.split("<|start|>"):
        header, separator, body = message.partition("<|message|>")
        for end in ("<|end|>", "<|call|>", "<|return|>"):
            body = body.partition(end)[0]
        recipient = header.partition("to=")[2]
        recipient = recipient.replace("<", " ").split(" ")[0] if recipient else ""
        if not separator:
            content.append(header if "<|channel|>" not in header else "")
        elif recipient and has_tools:
            calls.append(_named_call(start, recipient.removeprefix("functions."), body))
        elif "<|channel|>analysis" in header:
            reasoning.append(body)
        else:
            content.append(body)
        start += len(message) + len("<|start|>")
    return ParsedReply(
        "\n".join(filter(None, content)), "\n".join(filter(None, reasoning)), tuple(calls)
    )


TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    # In the order in which a chat template is matched: later formats are less specific.
    "kimi_k2": ToolFormat(
        find=_kimi_k2,
        begins=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        template_marks=("<|tool_calls_section_begin|>",),
    ),
    "deepseek_v3": ToolFormat(
        find=_deepseek_v3,
        begins=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        template_marks=("<｜tool▁calls▁begin｜>",),
    ),
    "gpt_oss": ToolFormat(
        find=lambda text, _tools: iter(_harmony(text, has_tools=True).calls),
        begins=("<|channel|>", "<|start|>"),
        template_marks=("<|channel|>",),
    ),
    "mistral": ToolFormat(
        find=_mistral, begins=("[TOOL_CALLS]",), template_marks=("[TOOL_CALLS]",)
    ),
    "gemma4": ToolFormat(
        find=_gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
        begins=("<|tool_call>",),
        template_marks=("<|tool_call>",),
    ),
    "functiongemma": ToolFormat(
        find=_gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        begins=("<start_function_call>",),
        template_marks=("<start_function_call>",),
    ),
    "qwen3_coder": ToolFormat(
        find=_qwen3_coder, begins=("<tool_call>", "<function="), template_marks=("<function=",)
    ),
    "glm": ToolFormat(find=_glm, begins=("<tool_call>",), template_marks=("<arg_key>",)),
    "hermes": ToolFormat(find=_hermes, begins=("<tool_call>",), template_marks=("<tool_call>",)),
    "pythonic": ToolFormat(
        find=_pythonic,
        begins=("<|python_start|>", "<|python_tag|>", "["),
        template_marks=("[func_name1(", "<|python_start|>"),
    ),
    "llama3_json": ToolFormat(
        find=_llama3_json,
        begins=("<|python_tag|>", '{"name"', '{"type"'),
        template_marks=("<|python_tag|>", '{"name": function name, "parameters"'),
    ),
}
"""Formats of tool calls by name."""

REASONING_FORMATS: Final = (
    ReasoningFormat(begin="<think>", end="</think>"),
    ReasoningFormat(begin="[THINK]", end="[/THINK]"),
    ReasoningFormat(begin="<|channel>", end="<channel|>", label="thought\n"),
)
"""Formats of reasoning, in the order in which a chat template is matched."""
