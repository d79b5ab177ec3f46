"""Secrets by reference: a specification holds ``{"secret": "NAME"}``, a worker has the file ``NAME``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from services.common.errors import FailedPreconditionError
from services.common.spec.base import SpecPart

_Part = TypeVar("_Part", bound=SpecPart)


def with_secrets(part: _Part, folder: Path | None) -> _Part:
    """A copy of a part of a specification that has its secrets; it must not be stored or logged.

    Args:
        part: Refers to secrets, or to none.
        folder: Holds a file per secret.

    Raises:
        FailedPreconditionError: If a secret is not there; names it and the folder, never a value.
    """
    return type(part).model_validate(_filled(part.model_dump(mode="json"), folder))


def _filled(value: Any, folder: Path | None) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {"secret"} and isinstance(value["secret"], str):
            return _read(value["secret"], folder)
        return {key: _filled(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, folder) for inner in value]
    return value


def _read(name: str, folder: Path | None) -> str:
    file = None if folder is None else folder / name
    if file is None or file.parent != folder or not file.is_file():
        raise FailedPreconditionError(
            f"the specification refers to the secret {name!r}, but there is no such file in "
            f"{folder or 'secrets_directory, which is not set'}; add it to the installation's secrets",
            secret=name,
        )
    return file.read_text(encoding="utf-8").strip()
