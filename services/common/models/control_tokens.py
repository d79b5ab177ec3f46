"""Keeps texts apart from what tokenizers add: control tokens, and marks of the start of a text.

A chat template writes control tokens and the texts of messages into one text. A control token in a message is
escaped before: its number between two private characters replaces it. The rendered text is then encoded in
pieces, so that an escaped token becomes ordinary text.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_BEGIN, _END = "\uf8f0", "\uf8f1"
_ESCAPED = re.compile(f"{_BEGIN}([0-9]{{1,6}}){_END}")


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a rendered chat that is encoded by itself."""

    start: int
    """Index of its first character, or of the escaped token that it is part of, in the rendered text."""
    text: str


class ControlTokens:
    """Escapes control tokens in the texts of messages.

    Args:
        tokens: Texts of the control tokens. One of a single character cannot be encoded as text, and is
            not escaped.
        normalize: The tokenizer's normalization, after which a text may contain further control tokens; None
            if it has none.
    """

    def __init__(
        self, tokens: Collection[str], normalize: Callable[[str], str] | None = None
    ) -> None:
        texts = sorted((token for token in tokens if len(token) > 1), key=lambda t: (-len(t), t))
        # The private character is escaped too, so that every text is encoded as it was.
        self._texts = [*texts, _BEGIN]
        self._numbers = {text: number for number, text in enumerate(self._texts)}
        self._pattern = re.compile("|".join(map(re.escape, self._texts)))
        self._spelled = [self._spell(text) for text in self._texts]
        self._normalize = normalize if texts else None

    def escape(self, value: Any) -> Any:
        """Returns a JSON value with all its texts escaped, the keys of objects included."""
        if isinstance(value, str):
            return self._escape_text(value)
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(item) for item in value]
        return value

    def pieces(self, text: str) -> Iterator[Piece]:
        """Divides a rendered text, so that no piece with an escaped token contains a control token."""
        end = 0
        for match in _ESCAPED.finditer(text):
            number = int(match[1])
            if number >= len(self._spelled):  # the template wrote it
                continue
            yield Piece(end, text[end : match.start()])
            for spelling in self._spelled[number]:
                yield Piece(match.start(), spelling)
            end = match.end()
        yield Piece(end, text[end:])

    def _escape_text(self, text: str) -> str:
        if self._normalize is not None:
            normalized = self._normalize(text)
            if normalized != text and len(self._pattern.findall(normalized)) > len(
                self._pattern.findall(text)
            ):
                text = normalized
        return self._pattern.sub(lambda match: f"{_BEGIN}{self._numbers[match[0]]}{_END}", text)

    def _spell(self, token: str) -> tuple[str, ...]:
        """Returns parts of a token that contain no control token."""
        half = len(token) // 2
        halves = (token[:half], token[half:])
        is_plain = not any(self._pattern.search(text) for text in halves)
        return tuple(text for text in halves if text) if is_plain else tuple(token)


def without_first_space(backend: Tokenizer) -> Tokenizer | None:
    """Returns a copy of a tokenizer that marks no start of a text; None if the tokenizer marks none."""
    stages = {"normalizer": backend.normalizer, "pre_tokenizer": backend.pre_tokenizer}
    # The whole tokenizer is large: it is copied only if one of these parts marks starts.
    if not any(stage is not None and _marks_start(stage) for stage in stages.values()):
        return None
    content = json.loads(backend.to_str())
    for name in stages:
        content[name] = _unmarked(content[name])
    return Tokenizer.from_str(json.dumps(content))


def _marks_start(stage: Any) -> bool:
    state = json.loads(stage.__getstate__())
    return bool(_unmarked(state) != state)


def _unmarked(stage: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the configuration of a normalizer or a pre-tokenizer without the mark of a start."""
    if stage is None or stage["type"] == "Prepend":
        return None
    if stage["type"] == "Sequence":
        key = "normalizers" if "normalizers" in stage else "pretokenizers"
        inner = [_unmarked(item) for item in stage[key]]
        return {**stage, key: [item for item in inner if item is not None]}
    if stage["type"] == "Metaspace":
        return {**stage, "prepend_scheme": "never"}
    if stage["type"] == "ByteLevel":
        return {**stage, "add_prefix_space": False}
    return stage
