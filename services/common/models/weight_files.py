"""Checks the weight files of a folder by the headers of its safetensors; reads no tensors."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""Max bytes of a header; the format itself rejects more."""
_TRAINED = ("BF16", "F16", "F32", "F64")


def file_problems(folder: Path) -> Iterator[str]:
    """Yields the reasons why weights cannot be read from a folder, each with the file.

    Args:
        folder: Folder of a model with safetensors of any name.
    """
    names = _files(folder)
    if names is None:
        yield (
            f"{folder} has neither {_SINGLE} nor {_INDEX}, the index of its *.safetensors files; "
            "download the index"
        )
        return
    for name, tensors in names.items():
        try:
            stored_entries = _head(folder / name)
        except ValueError as error:
            yield str(error)
            continue
        if lacking := sorted(set(tensors) - set(stored_entries)):
            yield (
                f"{folder / name} lacks {named(lacking)}, which {_INDEX} lists; download both again"
            )
        other_dtypes = {entry["dtype"] for entry in stored_entries.values()} - set(_TRAINED)
        if other_dtypes:
            yield (
                f"{folder / name} has weights of dtype {', '.join(sorted(other_dtypes))}, which is not "
                "supported; use a copy in bfloat16"
            )


def stored_names(folder: Path) -> set[str]:
    """Returns the names of all tensors in a folder's safetensors.

    Raises:
        ValueError: If a file is truncated, or of another kind.
    """
    return {name for path in folder.glob("*.safetensors") for name in _head(path)}


def named(names: Sequence[str]) -> str:
    """Returns a text with the first of several tensor names and the number of the others."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors"


def _files(folder: Path) -> Mapping[str, list[str]] | None:
    """Returns the expected tensors of each file; None without ``model.safetensors`` and without an index."""
    if (folder / _SINGLE).is_file():
        return {_SINGLE: []}
    if not (folder / _INDEX).is_file():
        return None
    try:
        files_by_tensor = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        names: dict[str, list[str]] = {file: [] for file in sorted(set(files_by_tensor.values()))}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder / _INDEX} has no weight_map ({error}); download it again"
        ) from error
    for tensor, file in files_by_tensor.items():
        names[file].append(tensor)
    return names


def _head(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the header of a file: the facts of its tensors, by name.

    Raises:
        ValueError: If the file is missing, truncated, or of another kind.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing, but {_INDEX} lists it; download it")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        text = file.read(length) if length <= min(size, _MAX_HEADER_BYTES) else b""
    try:
        head = json.loads(text)
        entries = {name: entry for name, entry in head.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a complete safetensors file: it has no valid header, as after an incomplete "
            "download or a Git LFS pointer; download it again"
        ) from error
    if (expected_bytes := _LENGTH_BYTES + length + end) != size:
        raise ValueError(f"{path} has {size} bytes, expected {expected_bytes}; download it again")
    return entries
