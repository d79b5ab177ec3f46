"""Offloads a rank's training state to host memory during turns of other processes on its GPU.

If the GPU has room for both sides, the state stays there, and at most the additional memory of a step is
released. Tensors keep their identity, including DTensors and the flat buffers of FSDP2: only the bytes of
their storages move.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, UntypedStorage, nn

from services.common.memory.trainer import Stays
from services.trainer.collectives import local_part
from services.trainer.engines.fsdp.parallel import free_gathered


class OffloadedState:
    """Moves weights, buffers and optimizer state to host memory and back.

    Args:
        modules: Trained modules and frozen ones that they are compared with.
        device: Device that the state is moved from.
        stays: State that has room on the device during turns of other processes.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        device: torch.device,
        contents: Stays = "nothing",
    ) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self._device = device
        self._stays = contents
        self._buffers: list[Tensor] = []
        self._moved: dict[int, tuple[UntypedStorage, Tensor]] = {}
        self._is_away = False

    @property
    def is_offloaded(self) -> bool:
        """True if other processes have the device."""
        return self._is_away

    @torch.no_grad()
    def offload(self) -> None:
        """Moves the state to host memory, unless it stays on the device, and releases device memory."""
        if self.is_offloaded:
            return
        self._is_away = True
        self._free_gathered()
        if self._stays == "nothing":
            self._move()
        self._empty_cache()

    def release(self) -> None:
        """Releases the device memory that holds no state, unless everything stays on the device."""
        self._free_gathered()
        self._empty_cache()

    def _free_gathered(self) -> None:
        if self._stays != "all":
            for module in self._modules:
                free_gathered(module)
        self._synchronize()  # also with FSDP's streams, on which layers are gathered

    def _move(self) -> None:
        storages = {_key(tensor): tensor.untyped_storage() for tensor in self._tensors()}
        for number, (key, storage) in enumerate(storages.items()):
            buffer = self._buffer(number, storage.nbytes())
            buffer.copy_(_bytes(storage), non_blocking=True)
            self._moved[key] = storage, buffer
        self._synchronize()
        for storage in storages.values():
            storage.resize_(0)

    @torch.no_grad()
    def reload(self) -> None:
        """Moves everything back to the device."""
        for storage, buffer in self._moved.values():
            storage.resize_(buffer.nbytes)
            _bytes(storage).copy_(buffer, non_blocking=True)
        self._synchronize()
        self._moved.clear()
        self._is_away = False

    def read(self, tensor: Tensor) -> Tensor:
        """Returns this rank's part of a tensor of the state, from wherever its values are now."""
        local = local_part(tensor)
        if _key(local) not in self._moved:
            return local
        _, buffer = self._moved[_key(local)]
        values = buffer.view(local.dtype)
        return values.as_strided(local.size(), local.stride(), local.storage_offset())

    def _tensors(self) -> Iterator[Tensor]:
        """Yields local tensors whose storage can be released and allocated again."""
        for module in self._modules:
            yield from self._movable([*module.parameters(), *module.buffers()])
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                yield from self._movable([v for v in state.values() if isinstance(v, Tensor)])

    def _movable(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        for tensor in tensors:
            local = local_part(tensor)
            storage = local.untyped_storage()
            # Files that are mapped into memory cannot be released.
            if local.device.type == self._device.type and storage.nbytes() and storage.resizable():
                yield local

    def _buffer(self, number: int, num_bytes: int) -> Tensor:
        """Returns host memory for a storage, reused from one move to the next."""
        if number == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if self._buffers[number].nbytes != num_bytes:
            is_pinned = self._device.type == "cuda"
            self._buffers[number] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        return self._buffers[number]

    def _empty_cache(self) -> None:
        if self._stays != "all" and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _key(tensor: Tensor) -> int:
    """Returns a number that identifies the storage of a tensor, also while the storage is empty."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 -- the address changes with the memory


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
