"""Qwen3.5's language models for versions of vLLM that serve them only with a vision tower, such as 0.26.

The methods are those of later versions. :mod:`services.extras.vllm.versions` registers the
classes by name, so that only engines of such a model import this module.
"""

from typing import Any

import torch
from vllm.model_executor.models import qwen3_5
from vllm.model_executor.models.interfaces import IsHybrid, SupportsMRoPE

_Wrapper = qwen3_5.Qwen3_5ForConditionalGeneration


class _Hybrid(IsHybrid, SupportsMRoPE):  # type: ignore[misc]  # vLLM has no types
    """States of recurrent layers, and positions of texts.

    This class comes last among the bases: ``Protocol`` replaces ``__init__``, whose signature vLLM reads.
    """

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> Any:
        """Returns the dtypes of a layer's convolution state and recurrent state."""
        return _Wrapper.get_mamba_state_dtype_from_config(vllm_config)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> Any:
        """Returns the shapes of a layer's convolution state and recurrent state."""
        return _Wrapper.get_mamba_state_shape_from_config(vllm_config)

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        """Returns the functions that copy these states."""
        return _Wrapper.get_mamba_state_copy_func()

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[torch.Tensor, int]:
        """Returns the ``[3, tokens]`` rotary positions of a text, and their offset from token indices, 0."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0


class Qwen35ForCausalLM(qwen3_5.Qwen3_5ForCausalLM, _Hybrid):  # type: ignore[misc]  # vLLM has no types
    """Language model of ``qwen3_5_text``."""


class Qwen35MoeForCausalLM(qwen3_5.Qwen3_5MoeForCausalLM, _Hybrid):  # type: ignore[misc]  # vLLM has no types
    """Language model of ``qwen3_5_moe_text``."""
