"""Specification files, as they are sent: the controller checks what is in them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def read_spec(spec: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """A specification as a document.

    Files that it names and that lie beside it, such as ``task.py:reward``, are named by their whole paths:
    they are read where the controller is.

    Args:
        spec: A YAML or JSON file, or a document, which is taken as it is.

    Raises:
        ValueError: If the file is no mapping.
        OSError: If it cannot be read.
    """
    if isinstance(spec, Mapping):
        return dict(spec)
    path = Path(spec)
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(  # noqa: TRY004 -- what is wrong is the file
            f"{path}: expected a mapping of keys, got {type(document).__name__}"
        )
    found: dict[str, Any] = _resolved(document, path.resolve().parent)
    return found


def _resolved(value: Any, folder: Path, key: str = "") -> Any:
    """The same with whole paths of files that are there."""
    if isinstance(value, dict):
        return {name: _resolved(inner, folder, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [_resolved(inner, folder, key) for inner in value]
    if not isinstance(value, str) or not value:
        return value
    file, separator, function = value.rpartition(":")
    is_code = bool(separator) and file.endswith(".py")
    named = folder / (file if is_code else value)
    # Any word may be the name of a file; a path has a folder or a suffix, or its key says that it is one.
    if not (is_code or key == "path" or {"/", "."} & set(value)) or not named.exists():
        return value
    return f"{named.resolve()}:{function}" if is_code else str(named.resolve())
