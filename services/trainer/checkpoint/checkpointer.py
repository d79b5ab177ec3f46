"""Saves and loads checkpoints, sharded by torch DCP into safetensors and written while training continues.

snapshot   copies this rank's shards into host memory; training waits only for this
write      every rank writes its shards; then rank 0 publishes the folder with its manifest
load       reads the newest complete checkpoint, resharded to the current number of ranks
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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

from services.common.errors import FailedPreconditionError
from services.common.models.loading import stored_tensors
from services.trainer.checkpoint import manifest
from services.trainer.engines.fsdp.parallel import RankTopology
from services.trainer.model.local_parts import local_part, spread_like

FILE_BYTES = 512 << 20
"""Max bytes of a file, unless one tensor is larger."""
THREADS: Final = 4


class ShardWriter(HuggingFaceStorageWriter):
    """Writes safetensors that torch's ``HuggingFaceStorageReader`` reassembles.

    Args:
        folder: Folder of all ranks' files.
    """

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
                """Raise what went wrong."""
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done


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
    places = {}
    for name, (item, _) in items.items():
        assert item.tensor_data is not None, "a tensor has its place"
        places[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
    about = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
    save_file({name: tensor for name, (_, tensor) in items.items()}, file, metadata=about)
    with file.open("rb") as written:
        os.fsync(written.fileno())


_MOMENTS = ("exp_avg", "exp_avg_sq")
MODEL_PREFIX = "model."


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the training state in host memory."""

    step: int
    """Newest trained step."""
    tensors: Mapping[str, Tensor]
    """This rank's shards by name."""
    facts: Mapping[str, Any]
    """Plain numbers, the same on every rank."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all ranks' shards."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class Checkpointer:
    """Saves and loads modules with their optimizers.

    Args:
        parts: Modules, whose parameters may be sharded, and their AdamW, by the prefix of their names.
        root: Folder of all checkpoints of the run, visible to every rank.
        keep: Number of newest checkpoints to keep.
        topology: Parallelism of the worker's processes.
        read: Returns this rank's part of a tensor, even while its device memory is released.
        saves_frozen: True if frozen parameters are saved too, because their source cannot be read again.
    """

    def __init__(
        self,
        parts: Mapping[str, tuple[nn.Module, torch.optim.AdamW]],
        *,
        root: Path,
        keep: int,
        topology: RankTopology,
        read: Callable[[Tensor], Tensor] = local_part,
        saves_frozen: bool = True,
    ) -> None:
        self._parts = parts
        self._root = root
        self._keep = keep
        self._read = read
        self._saves_frozen = saves_frozen
        self._rank = topology.rank
        # Writing has its own process group, because its collectives run concurrently with those of training.
        is_alone = topology.world_size == 1
        self._group = None if is_alone else distributed.new_group(backend="gloo")
        self._buffers: dict[str, Tensor] = {}
        self._writing: Snapshot | None = None
        # Create the moments now, so that every checkpoint holds the same tensors.
        self._make_moments()

    @torch.no_grad()
    def snapshot(self, step: int, facts: Mapping[str, Any]) -> Snapshot:
        """Copies the state; the copy is valid until the next snapshot.

        Args:
            step: Newest trained step.
            facts: Plain numbers to store, including the ``num_updates`` of each part, after its prefix.
        """
        tensors = {name: self._copied(name, value) for name, value in self._state().items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return Snapshot(step=step, tensors=tensors, facts=dict(facts))

    def write(self, snapshot: Snapshot, keep_steps: Collection[int] = ()) -> Path:
        """Writes a snapshot. Blocks; runs in a thread while training continues. All ranks must call it.

        Args:
            snapshot: The state to write.
            keep_steps: Steps whose folders are kept besides the newest ones; only rank 0 needs them.

        Returns:
            The published folder.

        Raises:
            FailedPreconditionError: If writing fails, as on a full disk.
        """
        self._writing = snapshot
        try:
            return self._write(snapshot, keep_steps)
        except (OSError, CheckpointException) as error:
            raise FailedPreconditionError(
                f"step {snapshot.step} cannot be written to {self._root}: {_cause(error)}; make room there, "
                "or lower trainer.checkpoint.keep",
                step=snapshot.step,
            ) from error
        finally:
            self._writing = None

    def progress(self) -> tuple[int, int]:
        """Returns written and total bytes of all ranks, counted file by file; zeros if none is being written.

        Once all bytes are written, the files are hashed.
        """
        snapshot = self._writing
        if snapshot is None:
            return 0, 0
        total = snapshot.num_bytes
        try:
            # A file is allocated at full size, and gets this name once it is written.
            files = manifest.unfinished_of(self._root, snapshot.step).glob("*.safetensors")
            return min(sum(file.stat().st_size for file in files), total), total
        except FileNotFoundError:  # the folder was renamed meanwhile
            return total, total

    def _write(self, snapshot: Snapshot, keep_steps: Collection[int]) -> Path:
        unfinished = manifest.unfinished_of(self._root, snapshot.step)
        if self._rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        if self._group is not None:
            distributed.barrier(self._group)
        save_shards(
            dict(snapshot.tensors),
            storage_writer=ShardWriter(unfinished),
            process_group=self._group,
            no_dist=self._group is None,
        )
        if self._rank == 0:
            manifest.publish(
                self._root,
                snapshot.step,
                dict(snapshot.facts),
                keep=self._keep,
                keep_steps=keep_steps,
            )
        return manifest.folder_of(self._root, snapshot.step)

    def load(self, folder: Path | None = None) -> dict[str, Any]:
        """Loads a checkpoint in place; returns its facts. All ranks must call it.

        Args:
            folder: The checkpoint; None selects the newest complete one of this run.

        Raises:
            NotFoundError: If there is none.
            DataLossError: If ``folder`` is not complete.
        """
        if folder is None:
            folder, facts = manifest.newest(self._root)
        else:
            facts = manifest.verify(folder)
        load_shards(
            self._state(),
            storage_reader=HuggingFaceStorageReader(str(folder)),
            process_group=self._group,
            no_dist=self._group is None,
        )
        for prefix, (_, optimizer) in self._parts.items():
            for state in optimizer.state.values():
                state["step"].fill_(float(facts[f"{prefix}num_updates"]))
        return facts

    def _state(self) -> dict[str, Tensor]:
        """Returns the live tensors by name: parameters, buffers, and both moments of trained parameters."""
        state: dict[str, Tensor] = {}
        for prefix, (module, optimizer) in self._parts.items():
            for name, parameter in stored_tensors(module).items():
                is_frozen = isinstance(parameter, nn.Parameter) and not parameter.requires_grad
                if is_frozen and not self._saves_frozen:
                    continue
                state[prefix + name] = parameter.detach()
                if parameter.requires_grad:
                    for moment in _MOMENTS:
                        value = optimizer.state[parameter][moment]
                        state[f"optimizer.{moment}.{prefix}{name}"] = value
        return state

    def _make_moments(self) -> None:
        """Creates the optimizer states that AdamW otherwise creates in its first update."""
        for module, optimizer in self._parts.values():
            for parameter in module.parameters():
                if parameter.requires_grad and not optimizer.state[parameter]:
                    optimizer.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                        **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
                    }

    def _copied(self, name: str, value: Tensor) -> Tensor:
        local = self._read(value)
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = torch.empty_like(local, device="cpu", pin_memory=value.is_cuda)
            self._buffers[name] = buffer
        buffer.copy_(local, non_blocking=True)
        return spread_like(buffer, value)


def _cause(error: OSError | CheckpointException) -> str:
    """Returns the error messages without the traces that torch adds for every rank."""
    if isinstance(error, OSError):
        return str(error)
    return "; ".join(dict.fromkeys(str(inner) for inner, _ in error.failures.values()))
