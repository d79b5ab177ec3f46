"""The training state of a rank in host memory, while others have its GPU.

Where there is room for it beside them it stays, and at most what a step takes besides is given back.
Tensors stay the objects that they are, DTensors and the flat buffers of FSDP2 among them: what moves are the
bytes that lie under them.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, UntypedStorage, nn

from services.common.errors import FailedPreconditionError
from services.common.models.turns_memory import Stays
from services.trainer.model.local_parts import local_part
from services.trainer.model.parallel import free_gathered


class OffloadedState:
    """Moves weights, buffers and optimizer state to host memory and back.

    Args:
        modules: What is trained or compared with.
        optimizers: Of what is trained.
        device: What is moved lies there.
        stays: What has room there beside what others have.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        device: torch.device,
        stays: Stays = "nothing",
    ) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self._device = device
        self._stays = stays
        self._buffers: list[Tensor] = []
        self._moved: dict[int, tuple[UntypedStorage, Tensor]] = {}
        self._is_away = False

    @property
    def is_away(self) -> bool:
        """Whether others have the device."""
        return self._is_away

    def check_here(self) -> None:
        """See that the device is this rank's.

        Raises:
            FailedPreconditionError: If others have it.
        """
        if self.is_away:
            raise FailedPreconditionError("the trainer sleeps; wake it first")

    @torch.no_grad()
    def put_away(self) -> None:
        """Move everything to host memory unless it stays, and give the device's memory back."""
        if self.is_away:
            return
        self._is_away = True
        if self._stays == "all":
            self._synchronize()
            return
        for module in self._modules:
            free_gathered(module)
        self._synchronize()  # with streams of their own, on which layers are gathered
        if self._stays == "nothing":
            self._move()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _move(self) -> None:
        found = {_key(tensor): tensor.untyped_storage() for tensor in self._tensors()}
        for number, (key, storage) in enumerate(found.items()):
            buffer = self._buffer(number, storage.nbytes())
            buffer.copy_(_bytes(storage), non_blocking=True)
            self._moved[key] = storage, buffer
        self._synchronize()
        for storage in found.values():
            storage.resize_(0)

    @torch.no_grad()
    def bring_back(self) -> None:
        """Move everything back."""
        for storage, buffer in self._moved.values():
            storage.resize_(buffer.nbytes)
            _bytes(storage).copy_(buffer, non_blocking=True)
        self._synchronize()
        self._moved.clear()
        self._is_away = False

    def read(self, tensor: Tensor) -> Tensor:
        """What this rank holds of a tensor of the state, where its values are now."""
        local = local_part(tensor)
        if _key(local) not in self._moved:
            return local
        _, buffer = self._moved[_key(local)]
        values = buffer.view(local.dtype)
        return values.as_strided(local.size(), local.stride(), local.storage_offset())

    def _tensors(self) -> Iterator[Tensor]:
        """Local tensors with memory of their own that can be taken and given."""
        for module in self._modules:
            yield from self._movable([*module.parameters(), *module.buffers()])
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                yield from self._movable([v for v in state.values() if isinstance(v, Tensor)])

    def _movable(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        for tensor in tensors:
            local = local_part(tensor)
            storage = local.untyped_storage()
            # Files that are mapped into memory keep it.
            if local.device.type == self._device.type and storage.nbytes() and storage.resizable():
                yield local

    def _buffer(self, number: int, num_bytes: int) -> Tensor:
        """Host memory, the same one each time."""
        if number == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if self._buffers[number].nbytes != num_bytes:
            is_pinned = self._device.type == "cuda"
            self._buffers[number] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        return self._buffers[number]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _key(tensor: Tensor) -> int:
    """Names the memory under a tensor, also while it has none."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 -- the address changes with the memory


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
