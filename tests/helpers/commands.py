"""Commands that documents show, in shell blocks and inline."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_SHELLS = {"sh", "bash", "console"}
# Assignments that may precede the name of a program.
_ASSIGNMENT = re.compile(r"\w+=")
_ENDS = set("();<>|&")


@dataclass(frozen=True)
class Command:
    """A program with its arguments, as a document shows it."""

    program: str
    arguments: tuple[str, ...]
    is_whole: bool
    """True if the command is in a block, where nothing is left out."""

    def __str__(self) -> str:
        return " ".join((self.program, *self.arguments))


def blocks(path: Path, *languages: str) -> list[str]:
    """Returns the fenced blocks of some languages, without their indentation."""
    matches = _BLOCK.findall(path.read_text(encoding="utf-8"))
    return [
        re.sub(f"^{indent}", "", text, flags=re.MULTILINE)
        for indent, language, text in matches
        if language in languages
    ]


def commands(path: Path, programs: set[str]) -> Iterator[Command]:
    """Yields the commands of some programs in a document."""
    text = path.read_text(encoding="utf-8")
    for block in blocks(path, *_SHELLS):
        for line in block.replace("\\\n", " ").splitlines():
            yield from _commands(line.removeprefix("$ "), programs, is_whole=True)
    for code in _INLINE.findall(_BLOCK.sub("", text)):
        yield from _commands(code.replace("\n", " "), programs, is_whole=False)


def _commands(line: str, programs: set[str], *, is_whole: bool) -> Iterator[Command]:
    # A command substitution is a command too and is examined separately.
    for inner in re.findall(r"\$\(([^()]*)\)", line):
        yield from _commands(inner, programs, is_whole=is_whole)
    line = re.sub(r"\$\([^()]*\)", "SUBSTITUTED", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quotation that spans several lines, or prose
        return
    command: list[str] = []
    for word in [*words, ";"]:
        if not set(word) <= _ENDS:
            command.append(word)
            continue
        while command and _ASSIGNMENT.match(command[0]):
            command.pop(0)
        if command and (name := command[0].rpartition("/")[2]) in programs:
            yield Command(name, tuple(command[1:]), is_whole)
        command = []
