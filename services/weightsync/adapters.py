"""LoRA adapters that are sent without the weights they modify.

The trainer sends ``OWNER.lora_A.weight`` and ``OWNER.lora_B.weight`` of each adapted module, all
other tensors that it trains, and a digest of its frozen weights. A receiver merges the adapters
into its own copy of the frozen weights, which must have the same digest. Trainer, receivers and
exports all merge with ``merged_weight``, so the results are bitwise equal on one kind of device.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping

import torch
import xxhash
from torch import Tensor
from transformers import PretrainedConfig

from services.common.models.loading import build_model, stored_buffers, stored_tensors
from services.weightsync.weight_plan import LORA_DOWN, LORA_UP, TensorSpec

FROZEN_DIGEST = "frozen.digest"
"""Name on the wire of the frozen weights' digest."""
DIGEST_SPEC = TensorSpec(FROZEN_DIGEST, (hashlib.sha256().digest_size,), "uint8")


def merged_weight(weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Returns a weight merged with its adapter, in the weight's dtype; the sum is computed in float32.

    Args:
        weight: ``[out, in]``.
        down: ``[r, in]`` float32.
        up: ``[out, r]`` float32, scaled.
    """
    return torch.addmm(weight.float(), up, down).to(weight.dtype)


def adapters_by_weight(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns ``(down, up)`` by the name of the weight that they modify."""
    return {
        f"{owner}.weight": (tensors[owner + LORA_DOWN], up)
        for name, up in tensors.items()
        for owner, suffix, _ in [name.partition(LORA_UP)]
        if suffix
    }


def frozen_tensors(
    config: PretrainedConfig, dtype: str
) -> tuple[list[TensorSpec], Collection[str]]:
    """Returns the tensors of a model's frozen weights, and the names of those that are buffers.

    Args:
        dtype: Name of the dtype of the weights; buffers keep theirs.
    """
    model = build_model(config, dtype=torch.float32, device="meta")
    buffers = stored_buffers(model).keys()
    specs = [
        TensorSpec(
            name,
            tuple(value.shape),
            str(value.dtype).removeprefix("torch.") if name in buffers else dtype,
        )
        for name, value in stored_tensors(model).items()
    ]
    return specs, buffers


def frozen_digest(tensors: Iterable[tuple[str, Tensor]]) -> Tensor:
    """Returns ``[32]`` uint8: SHA-256 over sorted names, shapes, dtypes and byte hashes (XXH3).

    The result is the same on every device. All bytes are read in host memory: 15 GB take a few seconds.
    """
    described = sorted(
        f"{name} {tuple(value.shape)} {value.dtype} {_bytes_digest(value)}"
        for name, value in tensors
    )
    digest = hashlib.sha256("\n".join(described).encode()).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _bytes_digest(value: Tensor) -> str:
    flat = value.detach().reshape(-1).view(torch.uint8).cpu()
    return xxhash.xxh3_128_hexdigest(flat.numpy().data)
