"""``trainer.activation_offloading``: what layers keep for the backward pass, in host memory.

Kept tensors are copied to host memory while the next layer computes, and back while the layer after theirs
runs its backward pass; results are the same, bit for bit.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from services.trainer.collectives import local_part

_Forward = Callable[..., Any]
_PIECE_BYTES: Final = 1 << 26
"""Host memory is allocated in pieces of this size: torch rounds pinned memory up to powers of two, and
reuses a free piece for any allocation of its size.
"""


class HostMemory:
    """Host memory for the activations of a decoder's layers.

    Args:
        device: Device of the layers. A CPU has no other memory, but the same copies are made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._newest: ReferenceType[_LayerActivations] | None = None

    def wrap(self, layer: nn.Module, forward: _Forward) -> _Forward:
        """Wraps ``forward`` of a layer so that it offloads its activations."""

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            before = None if self._newest is None else self._newest()
            # The addresses of the weights that FSDP has gathered for this pass.
            leaves = chain(layer.parameters(), layer.buffers())
            weights = frozenset(_address(local_part(weight)) for weight in leaves)
            activations = _LayerActivations(self._device, self._stream, weights, before)
            self._newest = ref(activations)
            with saved_tensors_hooks(activations.pack, activations.unpack):
                output = forward(*args, **kwargs)
            activations.offload()
            return output

        return offloaded


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor in a storage that was offloaded."""

    storage: int
    """Index of the storage."""
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _LayerActivations:
    """Activations of one layer in one pass, as whole storages, so that tensors that share memory still do.

    Lives as long as autograd needs it. Memory is allocated and freed only in the order of the computing
    stream, which waits for copies, so that the allocator does not have to track a second stream.

    Args:
        stream: Stream for copies; None on a CPU.
        weights: Addresses of the layer's weights, which are not offloaded.
        before: Activations of the previous layer in the same pass.
    """

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        weights: frozenset[int],
        before: "_LayerActivations | None",
    ) -> None:
        self._device, self._stream = device, stream
        self._weights = weights
        self._before = before
        self._numbers: dict[int, int] = {}
        self._on_device: list[Tensor] = []
        self._on_host: list[list[Tensor]] = []
        self._copied: torch.cuda.Event | None = None

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Registers a tensor that autograd saves; it is copied when the layer is done."""
        if not self._must_offload(tensor):
            return tensor
        address = _address(tensor)
        if address not in self._numbers:
            self._numbers[address] = len(self._on_device)
            self._on_device.append(_bytes_of(tensor))
        return _View(
            self._numbers[address],
            tensor.dtype,
            int(tensor.storage_offset()),
            tensor.size(),
            tensor.stride(),
        )

    def offload(self) -> None:
        """Copies the registered storages, and frees those of the previous layer on the device."""
        self._on_host = [
            [_host_bytes(len(piece), pinned=self._stream is not None) for piece in _pieces(tensor)]
            for tensor in self._on_device
        ]
        self._copy(chain(*self._on_host), chain.from_iterable(map(_pieces, self._on_device)))
        self._numbers, self._weights = {}, frozenset()
        if self._before is not None:
            self._before._free_device()  # noqa: SLF001

    def unpack(self, packed: Tensor | _View) -> Tensor:
        """Returns the tensor that autograd saved."""
        if isinstance(packed, Tensor):
            return packed
        self._reload()
        if self._stream is not None and self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        if self._before is not None:
            self._before._reload()  # noqa: SLF001
            self._before = None
        storage = self._on_device[packed.storage].untyped_storage()
        empty = torch.empty(0, dtype=packed.dtype, device=self._device)
        return empty.set_(storage, packed.offset, packed.size, packed.stride)

    def _must_offload(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.device == self._device
            and tensor.is_floating_point()
            and tensor.numel() > 0
            and _address(tensor) not in self._weights
        )

    def _free_device(self) -> None:
        if self._stream is not None and self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        self._on_device = []

    def _reload(self) -> None:
        if self._on_device or not self._on_host:
            return
        self._on_device = [
            torch.empty(sum(map(len, pieces)), dtype=torch.uint8, device=self._device)
            for pieces in self._on_host
        ]
        self._copy(chain.from_iterable(map(_pieces, self._on_device)), chain(*self._on_host))

    def _copy(self, targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
        if self._stream is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        self._copied = self._stream.record_event()


def _pieces(storage: Tensor) -> Sequence[Tensor]:
    pieces: Sequence[Tensor] = storage.split(_PIECE_BYTES)
    return pieces


def _host_bytes(size: int, *, pinned: bool) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns the whole storage of a tensor as ``[B]`` uint8."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
