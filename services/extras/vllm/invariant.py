"""Replaces operators of vLLM's batch-invariant mode whose results depend, or may depend, on the batch.

Importing this module replaces them, if the mode is on:

- The kernel that adds the residual and normalizes has fewer threads from 256 tokens on, and then adds in
  another order. A separate sum and vLLM's norm without a residual replace it.
- FlashAttention 3 takes 192 instead of 128 keys at a time for heads of 64 elements if it expects few queries,
  as in a pass that only decodes. The replacement passes a larger number of expected queries.
- vLLM leaves the product of a float32 output head to cuBLAS, which chooses its kernel by the number of rows.
  No difference was found on an H100, but nothing rules it out; the kernel of the other products replaces it.
"""

from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.model_executor.layers import layernorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from services.common.models.vllm_operators import MIN_QUERIES, are_here, float32_products

_SMALL_HEAD = 64


def _replace_norm() -> None:
    original = layernorm.rms_norm_batch_invariant

    def norm(
        states: Tensor, weight: Tensor | None, eps: float = 1e-6, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            result: Tensor = original(states, weight, eps)
            return result
        total = states + residual
        return original(total, weight, eps), total

    layernorm.rms_norm_batch_invariant = norm


def _replace_attention() -> None:
    from vllm.v1.attention.backends import flash_attn

    original = flash_attn.flash_attn_varlen_func

    def attention(*arguments: Any, **options: Any) -> Any:
        if not arguments and options["q"].shape[-1] <= _SMALL_HEAD:
            options["max_seqlen_q"] = max(MIN_QUERIES, options["max_seqlen_q"])
        return original(*arguments, **options)

    flash_attn.flash_attn_varlen_func = attention


def _replace_head() -> None:
    original = LogitsProcessor._apply_head  # noqa: SLF001 -- vLLM has no other place for it

    def apply_head(self: Any, lm_head: Any, hidden_states: Tensor, bias: Tensor | None) -> Tensor:
        if (
            self.head_dtype != torch.float32
            or hidden_states.dtype != torch.bfloat16
            or not hidden_states.is_cuda
            or not isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod)
        ):
            result: Tensor = original(self, lm_head, hidden_states, bias)
            return result
        logits = float32_products(hidden_states, lm_head.weight)
        return logits if bias is None else logits + bias.float()

    LogitsProcessor._apply_head = apply_head  # noqa: SLF001


if envs.VLLM_BATCH_INVARIANT and are_here():
    _replace_norm()
    _replace_attention()
    _replace_head()
