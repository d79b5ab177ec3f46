"""Reads specification files for submission; the controller validates their content."""

import os.path
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def read_spec(spec: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Returns a specification as a dictionary.

    References to files next to a specification file, such as ``task.py:reward``, become absolute, because
    the controller resolves them in another working directory.

    Args:
        spec: Path of a YAML or JSON file, or a mapping, which is returned unchanged.

    Raises:
        ValueError: If the file does not contain a mapping.
        OSError: If the file cannot be read.
    """
    if isinstance(spec, Mapping):
        return dict(spec)
    path = Path(spec)
    document = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 -- it is a SafeLoader
    if not isinstance(document, dict):
        raise ValueError(  # noqa: TRY004 -- the content of the file is wrong, not an argument
            f"{path}: expected a mapping of keys, got {type(document).__name__}"
        )
    resolved: dict[str, Any] = _resolved(document, path.resolve().parent)
    return resolved


class _Loader(yaml.SafeLoader):
    """Reads scalars as in YAML 1.2, like the command line: ``no`` is a text, ``1e-3`` a number."""

    yaml_implicit_resolvers = {  # noqa: RUF012 -- the library's class variable
        first: [
            (tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":value"))
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"(?:[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+|[-+]?\.[0-9]+[eE][-+]?[0-9]+)$"),
    list("-+.0123456789"),
)


def _resolved(value: Any, folder: Path, key: str = "") -> Any:
    """Returns the value with absolute paths in place of references to existing files."""
    if isinstance(value, dict):
        return {name: _resolved(inner, folder, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [_resolved(inner, folder, key) for inner in value]
    if not isinstance(value, str) or not value:
        return value
    file, separator, function = value.rpartition(":")
    is_code = bool(separator) and file.endswith(".py")
    file_path = folder / (file if is_code else value)
    # Any word may be the name of a file. Treat it as a path if it has a folder or a suffix, or by its key.
    # Unlike Path.exists, this accepts texts that are too long for a name.
    if not (is_code or key == "path" or {"/", "."} & set(value)) or not os.path.exists(file_path):  # noqa: PTH110
        return value
    return f"{file_path.resolve()}:{function}" if is_code else str(file_path.resolve())
