"""Reads the metadata of a DCP folder, which torch pickles, without executing anything that it holds.

The pickle creates only records, tuples, lists, dictionaries and dtypes, from which torch's own objects are
made after their types are checked. Memory and time grow with the size of the file: the standard library's
unpickler in Python allocates nothing by a number in the file, opcodes that torch's writer does not use are
refused, and so are keys whose hash could take long, many arguments, and lists that many tensors share. Files
of tensors are read with torch's ``weights_only``, and must be inside the folder.
"""

import io
import pickle  # noqa: TID251 -- torch's writer pickles metadata; no global of it is loaded but dtypes
from collections.abc import Iterable, Iterator
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
_MAX_DIMENSIONS: Final = 64
_MAX_ARGUMENTS: Final = 256
_MAX_NAME: Final = 255
"""Max characters of a file's name."""
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


def _size(dimensions: tuple[Any, ...] | list[Any]) -> tuple[Any, ...]:
    """Returns the dimensions of a tensor; repeated copies of a long list would fill the memory."""
    if len(dimensions) > _MAX_DIMENSIONS:
        raise pickle.UnpicklingError(f"a tensor has {len(dimensions)} dimensions")
    return tuple(dimensions)


def _empty_dict() -> dict[Any, Any]:
    """Returns a dictionary, whose items follow in the pickle."""
    return {}


_GLOBALS: Final[dict[tuple[str, str], Any]] = {
    **{(module, name): _RECORDS[name] for module, name in _NAMES},
    **{("torch", name): getattr(torch, name) for name in _DTYPES},
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): _empty_dict,
}
_OPCODES: Final = (
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD"),
    *("MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT"),
)
"""Opcodes that torch's writer uses, in the protocols from 2 on."""


class _Dispatch(dict[int, Any]):
    def __missing__(self, opcode: int) -> Any:
        raise pickle.UnpicklingError(f"it uses the opcode {bytes([opcode])!r}")


class _Unpickler(pickle._Unpickler):  # noqa: SLF001 -- the unpickler in C allocates by numbers in the file
    """Loads the globals and opcodes above."""

    stack: list[Any]
    dispatch = _Dispatch(
        {
            code[0]: pickle._Unpickler.dispatch[code[0]]  # noqa: SLF001
            for code in (getattr(pickle, name) for name in _OPCODES)
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _GLOBALS:
            return _GLOBALS[module, name]
        raise pickle.UnpicklingError(f"it holds an object of {module[:80]}.{name[:80]}")

    def load_setitem(self) -> None:
        _check_keys(self.stack[-2:-1])
        super().load_setitem()  # type: ignore[misc]

    def load_setitems(self) -> None:
        _check_keys(self.stack[::2])  # the items since the last mark
        super().load_setitems()  # type: ignore[misc]

    def load_build(self) -> None:
        """Sets the state of a record, never attributes of a class or function."""
        if not isinstance(self.stack[-2], _Record):
            raise pickle.UnpicklingError("it changes another object than a record")
        super().load_build()  # type: ignore[misc]

    def load_reduce(self) -> None:
        _check_arguments(self.stack[-1])
        super().load_reduce()  # type: ignore[misc]

    def load_newobj(self) -> None:
        _check_arguments(self.stack[-1])
        super().load_newobj()  # type: ignore[misc]

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.BUILD[0]] = load_build


def _check_keys(keys: Iterable[Any]) -> None:
    """Refuses keys of dictionaries whose hash follows references: nested tuples."""
    for key in keys:
        if type(key) is not str and not isinstance(key, _Record):
            raise pickle.UnpicklingError(f"a key is of type {type(key).__name__}")


def _check_arguments(arguments: Any) -> None:
    """Refuses many arguments, which each call copies."""
    if type(arguments) is not tuple or len(arguments) > _MAX_ARGUMENTS:
        raise pickle.UnpicklingError("the arguments of a call are no short tuple")


def read_metadata(folder: Path) -> Metadata:
    """Returns the metadata of the tensors of a folder.

    Raises:
        ValueError: If the file is damaged, holds other objects than torch's metadata, or names files outside
            of the folder.
    """
    file = folder / _MARKER
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ValueError("it is larger than 1 GiB, which no metadata is")
        content = file.read_bytes()
        metadata = _metadata_of(_Unpickler(io.BytesIO(content)).load(), len(content))
    except (
        *(OSError, EOFError, pickle.UnpicklingError, AttributeError, TypeError, LookupError),
        *(ValueError, OverflowError, AssertionError),
    ) as error:
        raise ValueError(
            f"{file} is not the metadata of a checkpoint of torch.distributed.checkpoint: {error}; copy the "
            "folder again, or save the model as safetensors"
        ) from error
    for info in metadata.storage_data.values():
        path = PurePosixPath(info.relative_path)
        if len(path.parts) != 1 or path.parts[0] in {"..", "/"} or (folder / path).is_symlink():
            raise ValueError(f"{file} names {str(path)!r}, which is not a file of the folder")
        if not (folder / path).is_file():
            raise ValueError(
                f"{folder / path} is missing, but {_MARKER} lists it; copy the folder again"
            )
    return metadata


def _metadata_of(loaded: Any, num_bytes: int) -> Metadata:
    """Returns torch's object of the tensors in a record.

    Args:
        num_bytes: Size of the file.

    Raises:
        TypeError: If a value has another type than torch's writer gives it.
        KeyError: If a value is missing.
        ValueError: If a file is compressed, or tensors have more parts than the file has bytes.
    """
    values = _values(loaded, "Metadata")
    entries = {
        _typed(name, str): entry
        for name, entry in _typed(values["state_dict_metadata"], dict).items()
        if type(entry) is _RECORDS["TensorStorageMetadata"]
    }
    num_parts = sum(
        len(_typed(_values(entry, "TensorStorageMetadata")["chunks"], list))
        for entry in entries.values()
    )
    if num_parts > num_bytes:
        raise ValueError(
            f"its tensors have {num_parts} parts, which a file of its size cannot list"
        )
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        name: _tensor_of(entry) for name, entry in entries.items()
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
            ChunkStorageMetadata(_size_of(chunk_values["offsets"]), _size_of(chunk_values["sizes"]))
            for chunk_values in chunks
        ],
    )


def _files_of(entries: dict[Any, Any]) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
    for key, value in entries.items():
        index, info = _values(key, "MetadataIndex"), _values(value, "_StorageInfo")
        if info.get("transform_descriptors"):
            raise ValueError("its files are compressed; save the model without transforms")
        if len(_typed(info["relative_path"], str)) > _MAX_NAME:
            raise ValueError("the name of a file is too long")
        offset, number = index.get("offset"), index.get("index")
        yield (
            MetadataIndex(
                _typed(index["fqn"], str),
                None if offset is None else _size_of(offset),
                None if number is None else _typed(number, int),
            ),
            _StorageInfo(
                info["relative_path"],
                _typed(info["offset"], int),
                _typed(info["length"], int),
            ),
        )


def _size_of(value: Any) -> torch.Size:
    return torch.Size([_typed(number, int) for number in _size(_typed(value, tuple))])


def _values(record: Any, name: str) -> dict[str, Any]:
    values: dict[str, Any] = _typed(_typed(record, _RECORDS[name]).state, dict)
    return values


def _typed(value: Any, expected_type: type) -> Any:
    if type(value) is not expected_type:
        raise TypeError(f"it holds {type(value).__name__} in place of {expected_type.__name__}")
    return value
