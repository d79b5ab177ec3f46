"""Runs inside vLLM's worker processes: loads a version that the rollout process left in a file."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

Entry = tuple[str, str, Sequence[int], int]
"""Name, dtype, shape and byte offset of a tensor in the file."""


class WeightLoader:
    """Mixed into vLLM's worker (``worker_extension_cls``); its method is called on every worker at once.

    vLLM runs such a call between two steps, and the whole update is one call, so no step ever sees
    parameters that are half loaded.
    """

    model_runner: Any
    vllm_config: Any
    device: torch.device

    def load_slipstream_weights(self, path: str, size_bytes: int, entries: Sequence[Entry]) -> None:
        """Replace all weights.

        Args:
            path: File that holds the tensors.
            size_bytes: Its size.
            entries: Where each tensor lies.
        """
        # Private and copy-on-write: the file may go as soon as this returns.
        buffer = torch.from_file(path, shared=False, size=size_bytes, dtype=torch.uint8)
        model = self.model_runner.model
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            initialize_layerwise_reload(model)
            model.load_weights(_tensors(buffer, entries, self.device))
            finalize_layerwise_reload(model, self.vllm_config.model_config)
        if self.device.type == "cpu":
            _repack_head(model)


def _tensors(
    buffer: Tensor, entries: Sequence[Entry], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    for name, dtype_name, shape, offset in entries:
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        yield name, buffer[offset : offset + size].view(dtype).view(*shape).to(device)


def _repack_head(model: Any) -> None:
    """Pack tied embeddings again.

    On the CPU the language-model head keeps a packed copy of the embedding, which the layerwise reload
    leaves at the old values because the two share one parameter.
    """
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(head)
