"""Frozen base weights in host memory, into which LoRA adapters are merged on the way to the engine.

::

    host memory              slots on the device               engine, between two steps
    bucket i  -- copied -->  adapters are merged           -->  copied to the live weights
                             later buckets are filled meanwhile

Two slots suffice, so that a model of any size needs no second copy of its weights on the device. The engine
generates no tokens while its weights are written, and reading them from host memory takes most of that
time. With more slots, that many buckets are merged beforehand, while the engine still generates.
"""

import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PretrainedConfig

from services.common.memory.rollout import BUCKET_BYTES
from services.common.models.loading import find_folder, read_weights
from services.common.models.quantization import BaseDtype, is_quantized, rounded
from services.common.runspec.run import ModelSpec
from services.common.runspec.weight_modes import STAGING_SLOTS
from services.weightsync.adapters import (
    FROZEN_DIGEST,
    adapters_by_weight,
    frozen_digest,
    frozen_tensors,
    merged_weight,
)
from services.weightsync.endpoints import Place, on_device
from services.weightsync.modes.placing import bucket_parts, whole_buffers
from services.weightsync.modes.staged import Slots
from services.weightsync.weight_plan import make_plan

logger = logging.getLogger(__name__)

_HOST: Final = torch.device("cpu")


class FrozenWeights:
    """Reads the weights of ``model.path`` and writes them into an engine with adapters merged.

    Attributes:
        plan: Assignment of the weights to buckets.
    """

    def __init__(
        self,
        model: ModelSpec,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        base_dtype: BaseDtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        num_slots: int = STAGING_SLOTS,
    ) -> None:
        """Reads the weights; blocks while it reads from disk.

        Args:
            model: The policy's model; not a preset.
            config: Its configuration.
            dtype: Dtype of the trainer's frozen weights and of the engine's weights.
            base_dtype: ``trainer.lora.base_dtype``; the weights are rounded as the trainer's are.
            num_slots: Number of buckets that the device holds; they are merged while the engine generates.

        Raises:
            ValueError: If the model does not load.
        """
        specs, buffers = frozen_tensors(config, str(dtype).removeprefix("torch."))
        self.plan = make_plan(specs, bucket_bytes)
        self._bytes, self._tensors = whole_buffers(self.plan, [_HOST])
        read_weights(self._tensors, find_folder(model), config.to_dict())
        if base_dtype is not None:
            for name, value in self._tensors.items():
                if is_quantized(name, tuple(value.shape)):
                    value.copy_(rounded(value.to(device), base_dtype))
        self._digest = frozen_digest(
            (name, value) for name, value in self._tensors.items() if name not in buffers
        )
        self._device = device
        self._num_slots = num_slots
        self._filled: list[torch.cuda.Event | None] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._merged: tuple[int, Tensor] = (-1, torch.empty(0))
        if device.type == "cuda":
            _pin(self._bytes[0])

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Checks that the trainer's frozen weights equal these.

        Args:
            weights: Tensors that the trainer sent.

        Raises:
            ValueError: If the frozen weights differ or an adapter belongs to an unknown weight.
        """
        if unknown := sorted(adapters_by_weight(weights).keys() - self._tensors.keys()):
            raise ValueError(
                f"received adapters for weights that the model does not have: {unknown[:3]}"
            )
        if not torch.equal(weights[FROZEN_DIGEST].cpu(), self._digest):
            raise ValueError(
                "the frozen weights of model.path differ from the trainer's; give both the "
                "same files, or set trainer.lora.sync to merged"
            )

    @cached_property
    def slots(self) -> Slots:
        """Bucket-sized buffers on the device, in rotation.

        They are allocated when weights arrive for the first time, because an engine that starts counts
        memory that disappears meanwhile as its own.
        """
        return Slots(self.plan, self._device, count=self._num_slots)

    @torch.no_grad()
    def merge_ahead(self, weights: Mapping[str, Tensor]) -> None:
        """Merges adapters into as many buckets as there are slots, while the engine generates. Blocks.

        Args:
            weights: Adapters, and other tensors that replace frozen ones, on the device.
        """
        self._merged = (-1, torch.empty(0))
        changes = adapters_by_weight(weights)
        count = min(len(self.slots.buffers[0]), len(self.plan.sources[0].buckets))
        self._filled = [self._fill(index, weights, changes) for index in range(count)]
        for event in self._filled:
            if event is not None:
                event.synchronize()

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor], copy_slot: Place) -> None:
        """Writes all weights, bucket by bucket, after :meth:`merge_ahead`. Blocks.

        Args:
            weights: As for :meth:`merge_ahead`.
            copy_slot: Copies a slot to the live weights of its bucket.
        """
        changes = adapters_by_weight(weights)
        count, num_slots = len(self.plan.sources[0].buckets), len(self.slots.buffers[0])
        for index in range(count):
            event = self._filled[index]
            if event is not None:
                event.synchronize()
            copy_slot(0, index, self.slots.slot(0, index))
            if index + num_slots < count:  # the bucket in this slot has been written
                self._filled.append(self._fill(index + num_slots, weights, changes))
        self._filled = []
        self._merged = (-1, torch.empty(0))

    @torch.no_grad()
    def merged(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns all merged weights on the device, for engines without in-place weight updates."""
        changes = adapters_by_weight(weights)
        with on_device(self._device):
            return {
                name: weights[name]
                if name in weights
                else self._with_adapter(name, changes).to(self._device)
                for name in self._tensors
            }

    def _fill(
        self,
        index: int,
        weights: Mapping[str, Tensor],
        changes: Mapping[str, tuple[Tensor, Tensor]],
    ) -> torch.cuda.Event | None:
        """Starts to fill the slot of a bucket; returns an event for its completion, or None on the CPU."""
        slot = self.slots.slot(0, index)
        with on_device(self._device), torch.cuda.stream(self._stream):
            for piece in bucket_parts(self.plan, 0, index):
                full = self._whole(piece.tensor, weights, changes)
                values = full[piece.first : piece.first + piece.end - piece.begin]
                slot[piece.begin : piece.end].copy_(values, non_blocking=True)
            return None if self._stream is None else self._stream.record_event()

    def _whole(
        self,
        tensor: int,
        weights: Mapping[str, Tensor],
        changes: Mapping[str, tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Returns the bytes of a tensor that the engine receives, as flat uint8.

        Caches the last merged tensor, because it may span several buckets.
        """
        name = self.plan.tensors[tensor].name
        if name in weights:
            return _flat(weights[name])
        if name not in changes:
            return self._bytes[tensor]
        if self._merged[0] != tensor:
            self._merged = (tensor, _flat(self._with_adapter(name, changes)))
        return self._merged[1]

    def _with_adapter(self, name: str, changes: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        if name not in changes:
            return self._tensors[name]
        weight = self._tensors[name].to(self._device, non_blocking=True)
        return merged_weight(weight, *changes[name])


def _flat(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _pin(tensor: Tensor) -> None:
    """Pins the memory of a tensor for direct transfers; torch's own pinning would round its size up."""
    storage = tensor.untyped_storage()
    runtime: Any = torch.cuda.cudart()
    if error := int(runtime.cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0)):
        logger.warning(
            "frozen weights cannot be pinned; merging takes longer",
            extra={"bytes": storage.nbytes(), "cuda_error": error},
        )
