"""Reads the metadata of a DCP folder, which torch pickles, without executing anything that it holds.

Only the classes of which torch's writer makes metadata are created. Files of tensors are read with torch's
``weights_only``, and must be inside the folder.
"""

import io
import pickle  # noqa: TID251 -- torch's writer pickles metadata; no global beyond its own is loaded
from pathlib import Path, PurePosixPath
from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata

_MARKER: Final = ".metadata"
_MAX_BYTES: Final = 1 << 30
_METADATA: Final = "torch.distributed.checkpoint.metadata"
_CLASSES: Final = frozenset(
    {
        *(
            (_METADATA, name)
            for name in (
                "Metadata",
                "MetadataIndex",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
    }
)
_DTYPES: Final = frozenset(
    {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}
    | {"int64", "int32", "int16", "int8", "uint8", "bool"}
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and name in _DTYPES
        if is_dtype or (module, name) in _CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds an object of {module}.{name}")


def read_metadata(folder: Path) -> Metadata:
    """Returns the metadata of a folder.

    Raises:
        ValueError: If the file is damaged, holds other objects than torch's metadata, or names files outside
            of the folder.
    """
    file = folder / _MARKER
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{file} is larger than 1 GiB, which no metadata is")
        metadata = _Unpickler(io.BytesIO(file.read_bytes())).load()
    except (
        OSError,
        EOFError,
        pickle.UnpicklingError,
        AttributeError,
        TypeError,
        IndexError,
    ) as error:
        raise ValueError(
            f"{file} is not the metadata of a checkpoint of torch.distributed.checkpoint: {error}; copy the "
            "folder again, or save the model as safetensors"
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError(  # noqa: TRY004 -- a file of a user
            f"{file} holds no metadata of torch's FileSystemWriter; save the model with it, or as safetensors"
        )
    for info in metadata.storage_data.values():
        path = PurePosixPath(str(info.relative_path))
        if len(path.parts) != 1 or path.parts[0] in {"..", "/"} or (folder / path).is_symlink():
            raise ValueError(f"{file} names {str(path)!r}, which is not a file of the folder")
        if not (folder / path).is_file():
            raise ValueError(
                f"{folder / path} is missing, but {_MARKER} lists it; copy the folder again"
            )
    return metadata
