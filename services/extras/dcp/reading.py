"""Opens a DCP folder whose tensors have Hugging Face's names, with or without the prefix of a module."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from services.extras.dcp.metadata import read_metadata

_EMBEDDING: Final = "embed_tokens.weight"
_MODULE: Final = "model."
"""Prefix of names if the module that was saved holds the model, as in Slipstream's own checkpoints."""
_MEGATRON: Final = ("decoder.layers.", "embedding.word_embeddings.", "output_layer.")
_TITAN: Final = ("tok_embeddings.", "layers.0.attention.wq.")


class _Reader(FileSystemReader):
    """Reads tensors by their names in Hugging Face checkpoints."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(str(folder))
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        return self._metadata


@dataclass(frozen=True, slots=True)
class DcpWeights:
    """Weights of a DCP folder."""

    folder: Path
    metadata: Metadata
    names: frozenset[str]

    def reader(self) -> FileSystemReader:
        """Returns a new reader."""
        return _Reader(self.folder, self.metadata)


def open_weights(folder: Path) -> DcpWeights:
    """Opens a folder that torch's ``FileSystemWriter`` wrote; optimizer states in it are ignored.

    Raises:
        ValueError: If the metadata cannot be trusted or read, or if the names are of another kind.
    """
    metadata = read_metadata(folder)
    tensors = {
        name: entry
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    prefix = _prefix_of(tensors, folder)
    stored_names = {
        name: name.removeprefix(prefix)
        for name in tensors
        if name.startswith(prefix) and not name.startswith("optimizer.")
    }
    storage = {
        MetadataIndex(stored_names[index.fqn], index.offset, index.index): info
        for index, info in metadata.storage_data.items()
        if index.fqn in stored_names
    }
    renamed = replace(
        metadata,
        state_dict_metadata={stored_names[name]: tensors[name] for name in stored_names},
        planner_data=None,
        storage_data=storage,
    )
    return DcpWeights(folder, renamed, frozenset(stored_names.values()))


def _prefix_of(tensors: Mapping[str, object], folder: Path) -> str:
    """Returns what precedes Hugging Face's names.

    Raises:
        ValueError: If there is no embedding under such a name; the message says whose names they are.
    """
    embeddings = [
        name for name in tensors if name.endswith(_EMBEDDING) and not name.startswith("optimizer.")
    ]
    if any(name.startswith(f"{_MODULE}model.") for name in embeddings):
        return _MODULE
    if embeddings:
        return ""
    first = min(tensors, default="none")
    if any(name.startswith(_MEGATRON) or f".{_MEGATRON[0]}" in name for name in tensors):
        raise ValueError(
            f"{folder} is a checkpoint of Megatron ({first}), whose matrices are fused and divided as its "
            "configuration says; convert it with Megatron-Bridge (export_ckpt) to a Hugging Face folder"
        )
    if any(name.removeprefix(_MODULE).startswith(_TITAN) for name in tensors):
        raise ValueError(
            f"{folder} has names of torchtitan ({first}); convert it with its convert_to_hf.py to a "
            "Hugging Face folder"
        )
    raise ValueError(
        f"{folder} has no tensor ...{_EMBEDDING}, but {len(tensors)} such as {first}; tensors must be named "
        "as in Hugging Face's checkpoint of the model"
    )
