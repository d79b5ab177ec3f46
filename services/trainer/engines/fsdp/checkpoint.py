"""Saves and loads one model with its optimizer, sharded by torch DCP into safetensors.

Any number of ranks can load a checkpoint that another number of ranks wrote.
"""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from services.common.models.loading import stored_tensors
from services.trainer.collectives import local_part, spread_like
from services.trainer.engines.base import PendingSave
from services.trainer.engines.fsdp.parallel import RankTopology

FILE_BYTES = 512 << 20
"""Max bytes of a file, unless one tensor is larger."""
THREADS: Final = 4


class ShardWriter(HuggingFaceStorageWriter):
    """Writes safetensors that torch's ``HuggingFaceStorageReader`` reassembles."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder = folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items; the results are empty because no code reads them."""
        rank = plan.storage_data["shard_index"]

        def write(numbered: tuple[int, dict[str, tuple[WriteItem, Tensor]]]) -> None:
            number, items = numbered
            _write(self._folder / f"shard-{rank:05d}-{number:05d}.safetensors", items)

        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(write, enumerate(_files(plan, planner), start=1)):
                """Raise the error of a write, if one failed."""
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future


def _files(plan: SavePlan, planner: SavePlanner) -> Iterator[dict[str, tuple[WriteItem, Tensor]]]:
    """Groups items into files, in order."""
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
    """Writes one file, with the offsets of each shard in its whole tensor."""
    offsets = {}
    for name, (item, _) in items.items():
        assert item.tensor_data is not None, "a tensor has its place"
        offsets[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
    about = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    save_file({name: tensor for name, (_, tensor) in items.items()}, file, metadata=about)
    with file.open("rb") as descriptor:
        os.fsync(descriptor.fileno())


_MOMENTS = ("exp_avg", "exp_avg_sq")


class ModelCheckpoint:
    """Saves and loads a module, whose parameters may be sharded, with its optimizer.

    Args:
        read: Returns this rank's part of a tensor, even while its device memory is released.
        saves_frozen: True if frozen parameters are saved too, because their source cannot be read again.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        topology: RankTopology,
        read: Callable[[Tensor], Tensor] = local_part,
        saves_frozen: bool = True,
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._read = read
        self._saves_frozen = saves_frozen
        self._rank = topology.rank
        # Writing has its own process group, because its collectives run concurrently with those of training.
        is_alone = topology.world_size == 1
        self._group = None if is_alone else distributed.new_group(backend="gloo")
        self._buffers: dict[str, Tensor] = {}
        # Create the moments now, so that every checkpoint holds the same tensors.
        self._make_moments()
        self._names = frozenset(self._state())

    @torch.no_grad()
    def save(self) -> PendingSave:
        """Copies the state to host memory; the copy is valid until the next one."""
        if late := (state := self._state()).keys() - self._names:  # ``load`` would leave it out
            raise TypeError(f"the optimizer made {min(late)} in an update; it must begin with it")
        tensors = {name: self._copied(name, value) for name, value in state.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()

        def write(folder: Path) -> None:
            if self._rank == 0:
                # Raised here, an error would leave the others in the barrier; all fail in the write below.
                with suppress(OSError):
                    folder.mkdir(parents=True, exist_ok=True)
            if self._group is not None:
                distributed.barrier(self._group)
            try:
                save_shards(
                    dict(tensors),
                    storage_writer=ShardWriter(folder),
                    process_group=self._group,
                    no_dist=self._group is None,
                )
            except CheckpointException as error:
                # The message omits the traces that torch adds for every rank.
                causes = dict.fromkeys(str(inner) for inner, _ in error.failures.values())
                failure = OSError("; ".join(causes))
                failure.errno = next(
                    (getattr(e, "errno", None) for e, _ in error.failures.values()), None
                )
                raise failure from error

        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        return PendingSave(num_bytes, write, tensors)

    def load(self, folder: Path, *, num_updates: int) -> None:
        load_shards(
            self._state(),
            storage_reader=HuggingFaceStorageReader(str(folder)),
            process_group=self._group,
            no_dist=self._group is None,
        )
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(float(num_updates))

    def _state(self) -> dict[str, Tensor]:
        """Returns the live tensors by name: parameters, buffers, and the moments of trained parameters."""
        state: dict[str, Tensor] = {}
        for name, parameter in stored_tensors(self._module).items():
            is_frozen = isinstance(parameter, nn.Parameter) and not parameter.requires_grad
            if is_frozen and not self._saves_frozen:
                continue
            state[name] = parameter.detach()
            if parameter.requires_grad:
                for moment, value in self._optimizer.state[parameter].items():
                    if moment != "step":
                        state[f"optimizer.{moment}.{name}"] = value
        return state

    def _make_moments(self) -> None:
        """Creates the states that AdamW otherwise creates in its first update; others have theirs already."""
        parameters = self._module.parameters()
        for parameter in parameters if isinstance(self._optimizer, torch.optim.AdamW) else ():
            if parameter.requires_grad and not self._optimizer.state[parameter]:
                self._optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
                }

    def _copied(self, name: str, value: Tensor) -> Tensor:
        local = self._read(value)
        if (buffer := self._buffers.get(name)) is None:
            buffer = torch.empty_like(local, device="cpu", pin_memory=value.is_cuda)
            self._buffers[name] = buffer
        buffer.copy_(local, non_blocking=True)
        return spread_like(buffer, value)
