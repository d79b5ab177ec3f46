"""Replaces the product of vLLM's float32 output head in its batch-invariant mode.

Importing this module replaces it. vLLM leaves that product to cuBLAS, which chooses a kernel, and with it the
order of additions, by the number of rows.
"""

from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from services.common.models.vllm_operators import are_here, float32_products


def _replace_head() -> None:
    original = LogitsProcessor._apply_head  # noqa: SLF001 -- vLLM has no other place for it

    def apply_head(self: Any, lm_head: Any, hidden_states: Tensor, bias: Tensor | None) -> Tensor:
        if (
            self.head_dtype != torch.float32
            or hidden_states.dtype != torch.bfloat16
            or not hidden_states.is_cuda
            or not isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod)
        ):
            found: Tensor = original(self, lm_head, hidden_states, bias)
            return found
        logits = float32_products(hidden_states, lm_head.weight)
        return logits if bias is None else logits + bias.float()

    LogitsProcessor._apply_head = apply_head  # noqa: SLF001


if envs.VLLM_BATCH_INVARIANT and are_here():
    _replace_head()
