"""Tokenizers that mark the start of every text with a space, without that mark.

SentencePiece's "dummy prefix" (Llama 2, Mistral, Phi-3) belongs before the first word of a context. A text
that continues a context must not have it.
"""

import json
from typing import Any

from tokenizers import Tokenizer


def without_first_space(backend: Tokenizer) -> Tokenizer | None:
    """Returns a copy of a tokenizer that marks no start of a text; None if the tokenizer marks none."""
    parts = {"normalizer": backend.normalizer, "pre_tokenizer": backend.pre_tokenizer}
    # The whole tokenizer is large: it is copied only if one of these parts marks starts.
    if not any(part is not None and _marks_start(part) for part in parts.values()):
        return None
    content = json.loads(backend.to_str())
    for name in parts:
        content[name] = _unmarked(content[name])
    return Tokenizer.from_str(json.dumps(content))


def _marks_start(part: Any) -> bool:
    state = json.loads(part.__getstate__())
    return bool(_unmarked(state) != state)


def _unmarked(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the configuration of a normalizer or a pre-tokenizer without the mark of a start."""
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] == "Sequence":
        key = "normalizers" if "normalizers" in part else "pretokenizers"
        inner = [_unmarked(each) for each in part[key]]
        return {**part, key: [each for each in inner if each is not None]}
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if part["type"] == "ByteLevel":
        return {**part, "add_prefix_space": False}
    return part
