"""Writes a Hugging Face folder as a DCP folder."""

import shutil
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

_INDEX = "model.safetensors.index.json"


def write_weights(source: Path, folder: Path) -> None:
    """Writes the tensors of a folder under their names, and copies its other files.

    Args:
        source: Folder with safetensors, ``config.json`` and a tokenizer.
        folder: New or empty folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        elif path.name != _INDEX:
            shutil.copy(path, folder / path.name)
    save(tensors, storage_writer=FileSystemWriter(folder), no_dist=True)
