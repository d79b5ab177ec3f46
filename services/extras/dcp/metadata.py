"""Reads the metadata of a DCP folder, which torch pickles, without executing anything that it holds.

The pickle creates only records, tuples, dictionaries and dtypes, from which torch's own objects are made
after their types are checked. Files of tensors are read with torch's ``weights_only``, and must be inside the
folder.
"""

import io
import pickle  # noqa: TID251 -- torch's writer pickles metadata; no global of it is loaded but dtypes
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

_MARKER: Final = ".metadata"
_MAX_BYTES: Final = 1 << 30
_METADATA: Final = "torch.distributed.checkpoint.metadata"
_FILES: Final = "torch.distributed.checkpoint.filesystem"
_DTYPES: Final = frozenset(
    {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}
    | {"int64", "int32", "int16", "int8", "uint8", "bool"}
)


class _Record:
    """Stands for an object of torch's metadata.

    ``__setstate__`` keeps pickles from changing attributes, also those of the class.
    """

    state: Any = None

    def __init__(self, *_args: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


_NAMES: Final = (
    *(
        (_METADATA, name)
        for name in (
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata"),
            *("ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
    ),
    *((_FILES, name) for name in ("_StorageInfo", "_StoragePrefix")),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
)
_RECORDS: Final[dict[str, type[_Record]]] = {name: type(name, (_Record,), {}) for _, name in _NAMES}
_GLOBALS: Final[dict[tuple[str, str], Any]] = {
    **{(module, name): _RECORDS[name] for module, name in _NAMES},
    **{("torch", name): getattr(torch, name) for name in _DTYPES},
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _GLOBALS:
            return _GLOBALS[module, name]
        raise pickle.UnpicklingError(f"it holds an object of {module}.{name}")


def read_metadata(folder: Path) -> Metadata:
    """Returns the metadata of the tensors of a folder.

    Raises:
        ValueError: If the file is damaged, holds other objects than torch's metadata, or names files outside
            of the folder.
    """
    file = folder / _MARKER
    try:
        size = file.stat().st_size
        loaded = _Unpickler(io.BytesIO(file.read_bytes())).load() if size <= _MAX_BYTES else None
        metadata = None if loaded is None else _metadata_of(loaded)
    except (
        *(OSError, EOFError, pickle.UnpicklingError, AttributeError, TypeError, LookupError),
        *(ValueError, OverflowError),
    ) as error:
        raise ValueError(
            f"{file} is not the metadata of a checkpoint of torch.distributed.checkpoint: {error}; copy the "
            "folder again, or save the model as safetensors"
        ) from error
    if metadata is None:
        raise ValueError(f"{file} is larger than 1 GiB, which no metadata is")
    for info in metadata.storage_data.values():
        path = PurePosixPath(info.relative_path)
        if len(path.parts) != 1 or path.parts[0] in {"..", "/"} or (folder / path).is_symlink():
            raise ValueError(f"{file} names {str(path)!r}, which is not a file of the folder")
        if not (folder / path).is_file():
            raise ValueError(
                f"{folder / path} is missing, but {_MARKER} lists it; copy the folder again"
            )
    return metadata


def _metadata_of(loaded: Any) -> Metadata:
    """Returns torch's object of the tensors in a record.

    Raises:
        TypeError: If a value has another type than torch's writer gives it.
        KeyError: If a value is missing.
        ValueError: If a file is compressed.
    """
    values = _values(loaded, "Metadata")
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        _typed(name, str): _tensor_of(entry)
        for name, entry in _typed(values["state_dict_metadata"], dict).items()
        if type(entry) is _RECORDS["TensorStorageMetadata"]
    }
    version = values.get("version")
    return Metadata(
        tensors,
        storage_data=dict(_files_of(_typed(values["storage_data"], dict))),
        version=version if type(version) is str else None,
    )


def _tensor_of(entry: Any) -> TensorStorageMetadata:
    values = _values(entry, "TensorStorageMetadata")
    properties = _typed(values["properties"], _RECORDS["TensorProperties"])
    dtype = _typed(_typed(properties.state, tuple)[0], torch.dtype)
    chunks = [_values(chunk, "ChunkStorageMetadata") for chunk in _typed(values["chunks"], list)]
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        _size_of(values["size"]),
        [
            ChunkStorageMetadata(_size_of(each["offsets"]), _size_of(each["sizes"]))
            for each in chunks
        ],
    )


def _files_of(stored: dict[Any, Any]) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
    for key, value in stored.items():
        index, info = _values(key, "MetadataIndex"), _values(value, "_StorageInfo")
        if info.get("transform_descriptors"):
            raise ValueError("its files are compressed; save the model without transforms")
        offset, number = index.get("offset"), index.get("index")
        yield (
            MetadataIndex(
                _typed(index["fqn"], str),
                None if offset is None else _size_of(offset),
                None if number is None else _typed(number, int),
            ),
            _StorageInfo(
                _typed(info["relative_path"], str),
                _typed(info["offset"], int),
                _typed(info["length"], int),
            ),
        )


def _size_of(value: Any) -> torch.Size:
    return torch.Size([_typed(number, int) for number in _typed(value, tuple)])


def _values(record: Any, name: str) -> dict[str, Any]:
    values: dict[str, Any] = _typed(_typed(record, _RECORDS[name]).state, dict)
    return values


def _typed(value: Any, expected: type) -> Any:
    if type(value) is not expected:
        raise TypeError(f"it holds {type(value).__name__} in place of {expected.__name__}")
    return value
