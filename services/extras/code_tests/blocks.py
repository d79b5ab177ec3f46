"""Finds the Python program in a response: the last fenced block of it, or all of the response. Pure."""

import ast
import html
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from services.extras.code_tests.judging.source import MODULES, NO_PYTHON, free_names

_OPENING: Final = re.compile(r"^[ \t]*(?:>[ \t]?)*(?:(?:[-*+]|\d+[.)])[ \t]+)?(`{3,}|~{3,})(.*)$")
_INLINE: Final = re.compile(r"`{3,}(?:(?:python3?|py)[ \t]+)?([^`]+?)[ \t]*`{3,}", re.IGNORECASE)
_LANGUAGE: Final = re.compile(r"\W*(?:lang(?:uage)?\s*=\s*\W?)?([A-Za-z0-9+#_.-]*)")
_PYTHON: Final = re.compile(r"(?:i?python|py)[\d._-]*|pycon|sage|.*\.py", re.IGNORECASE)
_MARKDOWN: Final = ("markdown", "md")
_LINE: Final = re.compile(r"\r\n|\r|\n")
_PROMPT: Final = re.compile(r"^[ \t]*(?:>>>|\.\.\.)(?: |$)")
_AFTER_PROSE: Final = re.compile(
    r"\A([^`]*[^`\s][ \t]*)(`{3,}(?:python3?|py)[ \t]*\r?\n)", re.IGNORECASE
)
"""First fence of a response, after other text in its line, such as ``Code:``."""
_MAGIC: Final = re.compile(r"^[ \t]*[%!].*$", re.MULTILINE)
_TAGGED: Final = re.compile(
    r"<(answer|code|solution)\b[^>]*>(.*?)</\1>|\[(?:BEGIN|PYTHON)\](.*?)\[(?:DONE|END|/PYTHON)\]"
    r"|\\begin\{(lstlisting|verbatim|minted)\}(?:\[[^\]]*\]|\{[^}]*\})*(.*?)\\end\{\4\}",
    re.DOTALL | re.IGNORECASE,
)
_MAX_FENCES: Final = 16
"""Fences inside the strings of one program that are looked behind."""


@dataclass(frozen=True, slots=True)
class _Block:
    language: str
    content: str


def find_program(response: str) -> str:
    """Returns the last block that is labelled as Python and compiles, else the last other program.

    Blocks are fenced by at least three backticks or tildes, as in CommonMark: they may be indented, quoted
    or without an end, and their label may have a title. A fence inside a string of the program is no end.
    Blocks of output and examples that follow the program, and blocks in other languages, are not programs.
    A program that continues an earlier block has that one, too. A response without blocks, or the part of it
    between tags such as ``<answer>``, is one.
    """
    response = response.replace("\ufeff", "").replace("\u200b", "")
    opening = _AFTER_PROSE.match(response)
    is_glued = opening and not _OPENING.match(_LINE.split(opening[0])[-2])
    if opening and is_glued and not compiles(response):
        response = f"{opening[1]}\n{response[opening.end(1) :]}"
    blocks = _blocks(_LINE.split(response))
    if not blocks:
        return _unfenced(response)
    labelled = [block.content for block in blocks if _PYTHON.fullmatch(block.language)]
    unlabelled = [block.content for block in blocks if not block.language]
    candidates = labelled or [text for text in unlabelled if _does_something(text)] or unlabelled
    if not candidates:
        nested = [block.content for block in blocks if block.language.casefold() in _MARKDOWN]
        if nested:
            return find_program(nested[-1])
        candidates = [block.content for block in blocks if _does_something(block.content)]
    return _chosen(candidates) if candidates else ""


def _unfenced(response: str) -> str:
    inline = _INLINE.findall(response)
    if inline and not compiles(response):
        return str(inline[-1])
    text = re.sub(r"^\s*(?:python3?|py)[ \t]*\n", "", _content(response))
    if not compiles(text):
        for match in reversed(list(_TAGGED.finditer(response))):
            program = _content(html.unescape(match[2] or match[3] or match[5] or ""))
            if program.strip() and compiles(program):
                return program
    return text


def _chosen(candidates: Sequence[str]) -> str:
    """Returns the last program that is no example of how an earlier one is used."""
    programs = [text for text in candidates if compiles(text)]
    for number in reversed(range(len(programs))):
        program = programs[number]
        tree = ast.parse(program)
        missing_names = free_names(program)
        earlier = [
            text for text in programs[:number] if missing_names & _definitions(ast.parse(text))
        ]
        if not earlier and not (number and _imports_solution(tree)):
            return program
        if any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body):
            return "\n".join([*earlier, program])
    return programs[-1] if programs else candidates[-1]


def _definitions(tree: ast.Module) -> set[str]:
    names = {str(getattr(node, "name", "")) for node in tree.body}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return names - {""}


def _imports_solution(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.ImportFrom) and node.module in MODULES for node in tree.body)


def _blocks(lines: list[str]) -> list[_Block]:
    blocks, number = list[_Block](), 0
    while number < len(lines):
        opening = _OPENING.match(lines[number])
        if not opening or "`" in opening[2]:
            number += 1
            continue
        block, number = _block(lines, number, opening)
        blocks.append(block)
    return blocks


def _block(lines: list[str], start: int, opening: re.Match[str]) -> tuple[_Block, int]:
    """Returns the block that a line opens, and the number of the line after it."""
    match = _LANGUAGE.match(opening[2].strip())
    language = match[1].rstrip(".") if match else ""
    prefix = lines[start][: opening.start(1)]
    first: tuple[_Block, int] | None = None
    raw = ""
    for number, last in _endings(lines, start + 1, opening[1]):
        inner = [*lines[start + 1 : number], *last]
        block = _Block(language, _content("\n".join(inner) + "\n", prefix))
        if compiles(block.content) or not (not language or _PYTHON.fullmatch(language)):
            return block, number + 1
        if first is None:
            first, raw = (block, number + 1), "\n".join(inner)
    block, number = first or (_Block(language, ""), len(lines))
    code = opening[2].strip().removeprefix(language).strip()
    with_opening = _content(f"{code}\n{raw}\n", prefix)
    if code and not compiles(block.content) and compiles(with_opening):
        return _Block(language, with_opening), number
    return block, number


def _endings(lines: list[str], start: int, fence: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the lines that may end a block, each with the code before its fence; at last the end of all."""
    num_ends = num_inline = 0
    for number in range(start, len(lines)):
        opening = _OPENING.match(lines[number])
        if opening and opening[1][0] == fence[0] and len(opening[1]) >= len(fence):
            if re.match(r"\s*[\w.{]", opening[2]):  # opens another block
                continue
            num_ends += 1
            yield number, []
        elif num_inline < _MAX_FENCES and lines[number].count(fence) == 1:
            num_inline += 1
            before, last = lines[start:number], lines[number].partition(fence)[0]
            is_inside = compiles("\n".join([*before, lines[number]]))
            if not is_inside and compiles(_content("\n".join([*before, last]))):
                num_ends += 1
                yield number, [last]
        if num_ends == _MAX_FENCES:
            return
    if num_ends == 0:
        yield len(lines), []


def _content(text: str, prefix: str = "") -> str:
    """Returns a program without the quotation marks and the indentation of its fence.

    Spaces that do not break, prompts of the interpreter and commands of notebooks are no part of it, either.
    """
    if ">" in prefix:
        text = re.sub(r"^[ \t]*(?:>[ \t]?)+", "", text, flags=re.MULTILINE)
    if compiles(text):
        return text
    text = textwrap.dedent(text.replace("\N{NO-BREAK SPACE}", " "))
    if not compiles(text) and compiles(plain := _MAGIC.sub("", text)):
        return plain
    lines = text.splitlines()
    prompts = [_PROMPT.sub("", line) for line in lines if _PROMPT.match(line)]
    if prompts and not compiles(text) and compiles(session := "\n".join(prompts) + "\n"):
        return session
    return text


def _does_something(text: str) -> bool:
    """Returns False for output, which may be valid Python, such as ``6``."""
    try:
        tree = ast.parse(text)
    except NO_PYTHON:
        return False
    return any(
        not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in tree.body
    )


def compiles(text: str) -> bool:
    """Returns True if a text is a Python program that can also be read as a tree."""
    try:
        ast.parse(text)  # fails at a smaller depth of expressions than compile
        compile(text, "program.py", "exec", dont_inherit=True)
    except NO_PYTHON:
        return False
    return True
