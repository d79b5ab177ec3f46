"""Writes one rank's shards as safetensors: straight from their memory, several files at a time.

Torch's own writer makes every file in memory first, which takes five times the processor time.
"""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

FILE_BYTES = 512 << 20
"""Of a file, as near as whole tensors come to it."""
THREADS: Final = 4


class ShardWriter(HuggingFaceStorageWriter):
    """Writes what torch's reader of safetensors puts together again.

    Args:
        folder: Where the files go, those of all ranks.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder = folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items; nobody asks where which of them went."""
        rank = plan.storage_data["shard_index"]

        def write(numbered: tuple[int, dict[str, tuple[WriteItem, Tensor]]]) -> None:
            number, items = numbered
            _write(self._folder / f"shard-{rank:05d}-{number:05d}.safetensors", items)

        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(write, enumerate(_files(plan, planner), start=1)):
                """Raise what went wrong."""
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done


def _files(plan: SavePlan, planner: SavePlanner) -> Iterator[dict[str, tuple[WriteItem, Tensor]]]:
    """Items in their order, by file."""
    items: dict[str, tuple[WriteItem, Tensor]] = {}
    num_bytes = 0
    for item in plan.items:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor), (
            "a checkpoint holds tensors; plain numbers are in its manifest"
        )
        if items and num_bytes + tensor.nbytes > FILE_BYTES:
            yield items
            items, num_bytes = {}, 0
        items[item.index.fqn] = item, tensor.detach().contiguous()
        num_bytes += tensor.nbytes
    if items:
        yield items


def _write(file: Path, items: dict[str, tuple[WriteItem, Tensor]]) -> None:
    """Write one file, with the place of each shard in its whole tensor."""
    places = {}
    for name, (item, _) in items.items():
        assert item.tensor_data is not None, "a tensor has its place"
        places[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
    about = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
    save_file({name: tensor for name, (_, tensor) in items.items()}, file, metadata=about)
    with file.open("rb") as written:
        os.fsync(written.fileno())
