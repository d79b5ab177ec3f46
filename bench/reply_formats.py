"""Compares our parsers of replies with vLLM's tests: ``python -m bench.reply_formats --sdist vllm-X.tar.gz``.

Runs the cases of vLLM's tests of tool parsers and reasoning parsers that concern single, complete replies,
with :mod:`services.rollout.workflows.reply_formats` in place of vLLM, whose package need not be installed.
White space around content and reasoning, and in the JSON of arguments, is not compared. Bar: 98 %. The
source distribution is at https://pypi.org/project/vllm/#files. Results go to
``bench/results/reply-formats.json``.
"""

import argparse
import importlib.machinery
import json
import runpy
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench.report import write_json
from bench.whole_run import REPOSITORY
from services.rollout.workflows.reply_formats import REASONING_FORMATS, TOOL_FORMATS

RESULTS = REPOSITORY / "bench" / "results" / "reply-formats.json"
BAR = 0.98
_TOOL_TESTS = {
    "test_hermes_tool_parser.py": "hermes",
    "test_qwen3coder_tool_parser.py": "qwen3_coder",
    "test_glm4_moe_tool_parser.py": "glm",
    "test_glm47_moe_tool_parser.py": "glm",
    "test_llama3_json_tool_parser.py": "llama3_json",
    "test_llama4_pythonic_tool_parser.py": "pythonic",
    "test_pythonic_tool_parser.py": "pythonic",
    "test_deepseekv3_tool_parser.py": "deepseek_v3",
    "test_deepseekv31_tool_parser.py": "deepseek_v3",
    "test_kimi_k2_tool_parser.py": "kimi_k2",
    "test_functiongemma_tool_parser.py": "functiongemma",
    "test_gemma4_tool_parser.py": "gemma4",
}
_REASONING_TESTS = {
    "test_qwen3_reasoning_parser.py": 0,
    "test_deepseekr1_reasoning_parser.py": 0,
    "test_glm4_moe_reasoning_parser.py": 0,
    "test_kimi_k2_reasoning_parser.py": 0,
    "test_gemma4_reasoning_parser.py": 2,
}
# Tests of streams, of vLLM's own helpers, of its request objects, and of another model's parser.
_OTHER = ("stream", "_args", "parseg", "parsearg", "adjust", "structural", "regex_timeout",
          "granite4", "uses_shared", "registry", "delta", "chunk", "responses_output")  # fmt: skip


class _Any:
    """Stands in for a class of vLLM: keeps its keyword arguments as attributes."""

    def __init__(self, *_: Any, **fields: Any) -> None:
        self.__dict__.update(fields)
        self.__dict__.setdefault("type", "function")

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    def __eq__(self, other: object) -> bool:
        mine, theirs = vars(self), vars(other)
        return all(mine[key] == theirs[key] for key in {*mine} & {*theirs})

    def __hash__(self) -> int:
        return id(self)


class _Text(str):
    """Content of a reply; comparisons ignore white space at both ends."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.strip() == other.strip()


class _Json(str):
    """Arguments of a call as JSON text; comparisons compare the parsed values."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and json.loads(self) == json.loads(other)


class _Parser:
    """Stands in for a tool parser of vLLM."""

    format = ""

    def __init__(self, tokenizer: Any = None, tools: Any = None, **_: Any) -> None:
        del tokenizer
        self.tools = tools

    def extract_tool_calls(self, model_output: str, request: Any = None) -> Any:
        tools = [_plain(tool) for tool in self.tools or getattr(request, "tools", None) or ()]
        kind = TOOL_FORMATS[self.format]
        reported_calls = [call for call in kind.find(model_output, tools) if call.is_reported]
        calls = [
            SimpleNamespace(
                id=call.id or f"call_{number}",
                type="function",
                function=_Any(
                    name=call.name,
                    arguments=_Json(call.arguments if call.problem else json.dumps(call.arguments)),
                ),
            )
            for number, call in enumerate(reported_calls)
        ]
        content = (
            model_output[: reported_calls[0].start].strip() if reported_calls else model_output
        )
        return _Any(tools_called=bool(calls), tool_calls=calls, content=_Text(content) or None)


class _Stubs:
    """Imports every module of vLLM, and the helpers of its tests, as a stand-in."""

    def __init__(self) -> None:
        self.format = ""

    def find_spec(self, name: str, *_: Any) -> Any:
        first = name.split(".")[0]
        if first in ("vllm", "xgrammar") or name.startswith("tests.parser"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> ModuleType:
        format_of = self

        class Stub(ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                if name == "get_tokenizer":
                    return lambda *_, **__: _Any()
                if name == "ToolParserManager":
                    return SimpleNamespace(get_tool_parser=lambda _: format_of.parser())
                if name.endswith("ToolParser") and name != "ToolParser":
                    return format_of.parser()
                if name == "ExtractedToolCallInformation":
                    return _Any
                return type(name, (_Any,), {})

        module = Stub(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass

    def parser(self) -> type[_Parser]:
        return type("Parser", (_Parser,), {"format": self.format})


class _Plugin:
    """Selects cases and counts their results."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []

    @pytest.fixture(scope="session")
    def default_tokenizer(self) -> Any:
        return _Any()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        selected = []
        for item in items:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            name = item.nodeid.rpartition(".py::")[2].lower()
            is_other = any(word in name for word in _OTHER) and "nonstream" not in name
            if not is_other and params.get("streaming") is not True:
                selected.append(item)
        items[:] = selected

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid.rpartition("/")[2])
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid.rpartition("/")[2])


def _plain(tool: Any) -> Any:
    if hasattr(tool, "model_dump"):
        return tool.model_dump()
    if isinstance(tool, _Any | SimpleNamespace):
        return {key: _plain(value) for key, value in vars(tool).items()}
    return tool


def _run_tool_extraction(parser: _Parser, text: str, request: Any = None, **_: Any) -> Any:
    extracted = parser.extract_tool_calls(text, request)
    return extracted.content, extracted.tool_calls


def tool_cases(folder: Path) -> tuple[list[str], list[str]]:
    """Runs the tests of tool parsers; returns the ids of those that passed and of those that failed."""
    stubs, plugin = _Stubs(), _Plugin()
    sys.meta_path.insert(0, stubs)
    import transformers

    transformers.AutoTokenizer.from_pretrained = lambda *_, **__: _Any()  # type: ignore[assignment]
    helpers = ModuleType("tests.tool_parsers.utils")
    helpers.run_tool_extraction = _run_tool_extraction  # type: ignore[attr-defined]
    helpers.run_tool_extraction_streaming = None  # type: ignore[attr-defined]
    tests = ModuleType("tests")
    tests.__path__ = [str(folder / "tests")]
    sys.modules |= {"tests": tests, "tests.tool_parsers.utils": helpers}
    for name, stubs.format in _TOOL_TESTS.items():
        if (path := folder / "tests" / "tool_parsers" / name).exists():
            options = ["-q", "--noconftest", "--runxfail", "-p", "no:cacheprovider", "--tb=no"]
            config = ["-c", "/dev/null", "--rootdir", str(folder), "--import-mode=importlib"]
            pytest.main([*options, *config, str(path)], plugins=[plugin])
    return plugin.passed, plugin.failed


def reasoning_cases(folder: Path) -> tuple[list[str], list[str]]:
    """Compares the replies in the tests of reasoning parsers; returns the names of both results."""
    passed, failed = list[str](), list[str]()
    for file, number in _REASONING_TESTS.items():
        path = folder / "tests" / "reasoning" / file
        for name, case in _replies(path) if path.exists() else ():
            is_open = number == 0
            reasoning, content = REASONING_FORMATS[number].split(
                case["output"], is_open=is_open, calls=("<tool_call>",)
            )
            expected = (case["reasoning"] or "").strip(), (case["content"] or "").strip()
            same = (reasoning.strip(), content.strip()) == expected
            (passed if same else failed).append(f"{file}::{name}")
    return passed, failed


def _replies(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in runpy.run_path(str(path)).items():
        streams = "STREAM" in name and "NO_STREAM" not in name and "NONSTREAM" not in name
        if (
            isinstance(value, dict)
            and {"output", "reasoning", "content"} <= set(value)
            and not streams
        ):
            yield name, value


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sdist", type=Path, required=True, help="vllm-X.tar.gz")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        with tarfile.open(options.sdist) as archive:
            members = [member for member in archive if "/tests/tool_parsers/" in member.name
                      or "/tests/reasoning/" in member.name]  # fmt: skip
            archive.extractall(temporary, members=members, filter="data")
        (folder,) = Path(temporary).iterdir()
        version = folder.name
        results = {"tools": tool_cases(folder), "reasoning": reasoning_cases(folder)}
    passed = sum(len(good) for good, _ in results.values())
    failed = [name for _, bad in results.values() for name in bad]
    share = passed / max(1, passed + len(failed))
    figures = {
        "source": version,
        "cases": passed + len(failed),
        "passed": passed,
        "share": round(share, 4),
        "bar": BAR,
        "different": failed,
    }
    write_json(RESULTS, figures)
    print(json.dumps(figures, indent=2))
    return 0 if share >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
