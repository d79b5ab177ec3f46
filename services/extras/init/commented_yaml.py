"""Writes a mapping as YAML with comments; no value can become a key, a comment or a further line."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import yaml

_COMMENT_COLUMN: Final = 32
# Other texts are quoted, so that no reader takes them for a number, a boolean or a date.
_UNQUOTED: Final = re.compile(r"(?:\.{0,2}/|[A-Za-z])[\w./:@-]*", re.ASCII)

Comments = Mapping[str, Sequence[str]]
"""Comments by key, nested ones with dots: the first at the end of the key's line, the others below it.

The empty key has the comments above the first line.
"""


def commented_yaml(document: Mapping[str, Any], comments: Comments) -> str:
    """Returns a mapping as YAML: nested mappings as blocks, the mappings and lists in them on one line.

    Args:
        document: Its keys are letters and underscores; its values may be any text.
    """
    header = [f"# {_on_one_line(comment)}\n" for comment in comments.get("", ())]
    return "".join([*header, *_block(document, comments, prefix="")])


def _block(document: Mapping[str, Any], comments: Comments, *, prefix: str) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for key, value in document.items():
        is_block = isinstance(value, Mapping) and not prefix
        first, *below = comments.get(prefix + key, ("",))
        line = f"{indent}{key}:" if is_block else f"{indent}{key}: {_inline(value)}"
        if not prefix and is_block:
            yield "\n"
        yield (f"{line:<{_COMMENT_COLUMN - 1}} # {_on_one_line(first)}" if first else line) + "\n"
        yield from (f"{indent}# {_on_one_line(comment)}\n" for comment in below)
        if is_block:
            yield from _block(value, comments, prefix=f"{prefix}{key}.")


def _inline(value: Any) -> str:
    """Returns a value as YAML without line breaks."""
    # YAML marks the end of a document that is only a text.
    text: str = yaml.dump(
        [value],
        Dumper=_Dumper,
        default_flow_style=True,
        width=math.inf,
        allow_unicode=True,
        sort_keys=False,
    )
    return text.strip()[1:-1]


def _on_one_line(comment: str) -> str:
    return comment if comment.isprintable() else json.dumps(comment)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that is not a plain word or path."""

    def ignore_aliases(self, data: Any) -> bool:
        del data
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = None if _UNQUOTED.fullmatch(text) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
