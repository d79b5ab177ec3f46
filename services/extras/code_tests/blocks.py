"""Finds the Python program in a response: the last fenced block of it, or all of the response. Pure."""

import ast
import re
import textwrap
from dataclasses import dataclass
from typing import Final

_OPENING: Final = re.compile(r"^[ \t]*(?:>[ \t]?)*(?:(?:[-*+]|\d+[.)])[ \t]+)?(`{3,}|~{3,})(.*)$")
_INLINE: Final = re.compile(r"`{3,}(?:python3?|py)?[ \t]+([^`]+?)[ \t]*`{3,}", re.IGNORECASE)
_LANGUAGE: Final = re.compile(r"\W*(?:lang(?:uage)?\s*=\s*\W?)?([A-Za-z0-9+#_-]*)")
_PYTHON: Final = re.compile(r"(?:i?python|py)[\d.]*|pycon|sage", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Block:
    language: str
    content: str


def find_program(response: str) -> str:
    """Returns the last block that is labelled as Python and compiles, else the last other program.

    Blocks are fenced by at least three backticks or tildes, as in CommonMark: they may be indented, quoted
    or without an end, and their label may have a title. Blocks in other languages, and blocks of output
    that follow the program, are not programs. A response without blocks is one.
    """
    blocks = _blocks(response)
    if not blocks:
        inline = _INLINE.findall(response)
        return inline[-1] if inline else textwrap.dedent(response)
    labelled = [block.content for block in blocks if _PYTHON.fullmatch(block.language)]
    unlabelled = [block.content for block in blocks if not block.language]
    candidates = labelled or [text for text in unlabelled if _does_something(text)] or unlabelled
    if not candidates:
        return ""
    return next((text for text in reversed(candidates) if compiles(text)), candidates[-1])


def _blocks(response: str) -> list[_Block]:
    blocks, lines = list[_Block](), list[str]()
    fence, language, prefix = "", "", ""
    for line in response.splitlines():
        opening = _OPENING.match(line)
        if fence:
            mark = opening[1] if opening else ""
            if (
                opening
                and mark[0] == fence[0]
                and len(mark) >= len(fence)
                and not opening[2].strip()
            ):
                blocks.append(_Block(language, _content(lines, prefix)))
                fence, lines = "", []
            else:
                lines.append(line)
        elif opening and "`" not in opening[2]:
            fence, prefix = opening[1], line[: opening.start(1)]
            label = _LANGUAGE.match(opening[2].strip())
            language = label[1] if label else ""
    if fence:  # the response ends inside the block
        blocks.append(_Block(language, _content(lines, prefix)))
    return blocks


def _content(lines: list[str], prefix: str) -> str:
    """Returns the lines without the quotation marks and the indentation of their fence."""
    if ">" in prefix:
        lines = [re.sub(r"^[ \t]*(?:>[ \t]?)+", "", line) for line in lines]
    text = "\n".join(lines) + "\n"
    return text if compiles(text) else textwrap.dedent(text)


def _does_something(text: str) -> bool:
    """Returns False for output, which may be valid Python, such as ``6``."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in tree.body
    )


def compiles(text: str) -> bool:
    """Returns True if a text is a Python program."""
    try:
        compile(text, "program.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
