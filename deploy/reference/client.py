"""Generates the Python client from the API's description.

The synchronous half is generated from the asynchronous one.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "services" / "client" / "slipstream_client"
_NOTE = "\n\nWritten by deploy/reference/client.py: `make docs` keeps it current.\n"
_SCALARS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool"}
_JSON, _LINES = "application/json", "application/x-ndjson"
# A conditional request may have no answer; hand-written code follows streams of events.
_NOT_SENT = {"if-none-match", "last-event-id"}
# Replacements in the synchronous half.
_SYNC = {
    r"\basync (def|with|for)\b": r"\1",
    r"\bawait ": "",
    r"\basync_(transport|operations|client)\b": r"sync_\1",
    r"\bAsync(Iterator|Client|Transport|Run|Operations)\b": r"\1",
    r"__a(enter|exit)__": r"__\1__",
    r"\ba(close|read|iter_lines)\b": r"\1",
    r"\basyncio\.sleep\b": "time.sleep",
    r"^import asyncio\n": "",
}

_Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Operation:
    """An operation of the API with a single answer, or with one answer per line."""

    name: str
    method: str
    path: str
    described: _Schema
    answer: str
    """Type of the answer."""
    is_lines: bool


def modules(document: _Schema) -> dict[Path, str]:
    """Returns the generated modules for a description of the API."""
    operations = list(_operations(document))
    written = {
        "models": _models(document["components"]["schemas"], operations),
        "async_operations": _methods(document["components"]["schemas"], operations),
    }
    for name in ("transport", "operations", "client"):
        source = written.get(f"async_{name}") or (PACKAGE / f"async_{name}.py").read_text("utf-8")
        written[f"sync_{name}"] = _without_await(source)
    return {PACKAGE / f"{name}.py": _formatted(text) for name, text in written.items()}


def _operations(document: _Schema) -> Iterator[_Operation]:
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            answers = [of for status, of in described["responses"].items() if status[0] == "2"]
            contents = {
                kind: of for each in answers for kind, of in each.get("content", {}).items()
            }
            if contents.keys() - {_JSON, _LINES}:
                continue
            answer = contents.get(_JSON, {}).get("schema") or contents.get(_LINES, {}).get(
                "itemSchema"
            )
            yield _Operation(
                name=described["operationId"].partition("_v1_")[0],
                method=method.upper(),
                path=path,
                described=described,
                answer=_type(answer) if answer else "None",
                is_lines=_LINES in contents,
            )


def _type(schema: _Schema, *, is_sent: bool = False) -> str:  # noqa: PLR0911
    """Returns the type of a schema; answers may contain values that this release does not know."""
    if "$ref" in schema:
        name: str = schema["$ref"].rpartition("/")[2]
        return name
    if "anyOf" in schema:
        return " | ".join(_type(part, is_sent=is_sent) for part in schema["anyOf"])
    if "enum" in schema and is_sent:
        return f"Literal[{', '.join(map(repr, schema['enum']))}]"
    kind = schema.get("type")
    if schema.get("format") == "date-time":
        return "datetime"
    if kind == "array":
        return f"{'Sequence' if is_sent else 'list'}[{_type(schema['items'], is_sent=is_sent)}]"
    if kind == "object":
        inner = schema.get("additionalProperties")
        values = _type(inner, is_sent=is_sent) if isinstance(inner, dict) else "Any"
        return f"{'Mapping' if is_sent else 'dict'}[str, {values}]"
    return "None" if kind == "null" else _SCALARS.get(str(kind), "Any")


def _names(text: str) -> set[str]:
    return set(re.findall(r"\b[A-Z]\w+\b", text))


def _models(schemas: Mapping[str, _Schema], operations: list[_Operation]) -> str:
    """Returns the models of answers."""
    needed: set[str] = set()
    waiting = {name for operation in operations for name in _names(operation.answer)} & set(schemas)
    while waiting:
        needed.add(name := waiting.pop())
        fields = schemas[name]["properties"].values()
        waiting |= (
            {found for field in fields for found in _names(_type(field))} & set(schemas)
        ) - needed
    lines = [
        f'"""Answers of a controller, as pydantic models.{_NOTE}"""',
        "from __future__ import annotations",
        "from datetime import datetime",
        "from typing import Any",
        "from pydantic import BaseModel",
    ]
    for name in sorted(needed):
        schema = schemas[name]
        lines += [f"class {name}(BaseModel):", _docstring(schema["description"], indent="    ")]
        required = schema.get("required", ())
        for field in sorted(schema["properties"], key=lambda field: field not in required):
            lines.append(
                f"    {_field(field, schema['properties'][field], is_required=field in required)}"
            )
    return "\n".join(lines) + "\n"


def _field(name: str, schema: _Schema, *, is_required: bool) -> str:
    declared = f"{name}: {_type(schema)}"
    if is_required:
        return declared
    empty: Any = {} if schema.get("type") == "object" else None
    return f"{declared} = {schema.get('default', empty)!r}"


def _docstring(text: str, *, indent: str) -> str:
    body = text.strip().replace("\n", f"\n{indent}").replace(f"\n{indent}\n", "\n\n")
    end = f"\n{indent}" if "\n" in body else ""
    return f'{indent}"""{body}{end}"""'


def _methods(schemas: Mapping[str, _Schema], operations: list[_Operation]) -> str:
    """Returns all operations as methods of a class."""
    answers = sorted({name for each in operations for name in _names(each.answer)} & set(schemas))
    lines = [
        f'"""The operations of the API as methods.{_NOTE}"""',
        "import uuid",
        "from collections.abc import AsyncIterator, Mapping, Sequence",
        "from typing import Any, Literal",
        "from pydantic import TypeAdapter",
        "from slipstream_client.async_transport import AsyncTransport",
        f"from slipstream_client.models import {', '.join(answers)}",
        "from slipstream_client.request import Request, given",
        "class AsyncOperations:",
        '    """Whatever a controller can be asked; fields that are None are not sent."""',
        "    def __init__(self, transport: AsyncTransport) -> None:",
        "        self._transport = transport",
        "    async def _ask(self, kind: Any, request: Request) -> Any:",
        "        content = await self._transport.content(request)",
        '        return TypeAdapter(kind).validate_json(content or b"null")',
    ]
    for operation in operations:
        lines += _method(schemas, operation)
    return "\n".join(lines) + "\n"


def _method(schemas: Mapping[str, _Schema], operation: _Operation) -> Iterator[str]:
    places: dict[str, dict[str, str]] = {"path": {}, "query": {}, "header": {}, "body": {}}
    first, others = ["self"], list[str]()
    for parameter in operation.described.get("parameters", ()):
        if parameter["name"] in _NOT_SENT:
            continue
        argument = parameter["name"].replace("-", "_")
        places[parameter["in"]][parameter["name"]] = argument
        is_run = argument == "run_id"
        (first if is_run else others).append(
            _argument(schemas, argument, parameter["schema"], parameter)
        )
    is_document = False
    for name, schema in _body(schemas, operation.described):
        is_document = name == "spec"
        places["body"][name] = name
        (first if is_document else others).append(
            _argument(schemas, name, schema, {"required": is_document})
        )
    signature = ", ".join([*first, "*", *others] if others else first)
    answer = f"AsyncIterator[{operation.answer}]" if operation.is_lines else operation.answer
    yield f"    async def {operation.name}({signature}) -> {answer}:"
    yield _docstring(operation.described["description"], indent="        ")
    if "idempotency-key" in places["header"]:
        places["header"]["idempotency-key"] = "idempotency_key or uuid.uuid4().hex"
    body = "spec" if is_document else f"given({_dict(places['body'])})" if places["body"] else ""
    parts = {
        "names": _dict(places["path"]),
        "query": _dict(places["query"]),
        "headers": _dict(places["header"]),
    }
    sent = [f"method={operation.method!r}", f"path={operation.path!r}"]
    sent += [f"{name}={part}" for name, part in parts.items() if part != "{}"]
    yield f"        request = Request({', '.join([*sent, *([f'body={body}'] if body else [])])})"
    if operation.is_lines:
        yield "        async for _, item in self._transport.stream(request):"
        yield f"            yield {operation.answer}.model_validate(item)"
    elif operation.answer == "None":
        yield "        await self._ask(None, request)"
    else:
        yield f"        answer: {answer} = await self._ask({answer}, request)"
        yield "        return answer"


def _argument(schemas: Mapping[str, _Schema], name: str, schema: _Schema, about: _Schema) -> str:
    """Returns the declaration of an argument; references to schemas are expanded."""
    parts = [
        schemas[_type(part)] if "$ref" in part else part for part in schema.get("anyOf", (schema,))
    ]
    kind = " | ".join(_type(part, is_sent=True) for part in parts)
    if about.get("required"):
        return f"{name}: {kind}"
    default = schema.get("default")
    if default is None:
        return f"{name}: {kind.removesuffix(' | None')} | None = None"
    return f"{name}: {kind} = {() if default == [] else default!r}"


def _body(schemas: Mapping[str, _Schema], described: _Schema) -> Iterator[tuple[str, _Schema]]:
    """Yields the keys of a body, or ``spec`` if the body is a specification."""
    if "requestBody" not in described:
        return
    schema = described["requestBody"]["content"][_JSON]["schema"]
    name = _type(schema).removesuffix(" | None")
    if name == "RunSpec":
        yield "spec", {"type": "object"}
    else:
        yield from schemas[name]["properties"].items()


def _dict(items: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{key!r}: {value}" for key, value in items.items()) + "}"


def _without_await(text: str) -> str:
    head, end, rest = text.partition('"""\n')
    for words, others in _SYNC.items():
        rest = re.sub(words, others, rest, flags=re.MULTILINE)
    if _NOTE not in head:
        head += _NOTE
    return f"{head}{end}{rest}"


def _formatted(text: str) -> str:
    """Returns the text in the project's code format."""
    name = ["--stdin-filename", str(PACKAGE / "generated.py")]
    for command in (
        ["check", "--quiet", "--fix-only", "--select", "I", *name, "-"],
        ["format", *name, "-"],
    ):
        done = subprocess.run(  # noqa: S603
            [str(Path(sys.executable).with_name("ruff")), *command],
            input=text,
            capture_output=True,
            text=True,
            check=True,
        )
        text = done.stdout
    return text
