"""The policy: a causal language model that scores packed responses."""

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.trainer.algorithm.logprobs import token_logprobs
from services.trainer.batch.packing import PackedTokens
from services.trainer.model.attention import PACKED

_Module = TypeVar("_Module", bound=nn.Module)
SUPPORTED = ("llama", "qwen2", "qwen3")
"""Architectures whose packed forward pass is tested against their own."""


class Policy(nn.Module):
    """Scores response tokens without padding and without a matrix of all logits.

    Args:
        model: A Hugging Face causal language model; its attention is switched to the packed one.
        temperature: Divides the logits, as in sampling.

    Raises:
        ValueError: If the architecture is not supported, or a layer has a sliding window.
    """

    def __init__(self, model: PreTrainedModel, *, temperature: float) -> None:
        super().__init__()
        config: Any = model.config
        if config.model_type not in SUPPORTED:
            raise ValueError(
                f"model.path is of type {config.model_type!r}, which the trainer does not pack yet; "
                f"use one of {', '.join(SUPPORTED)}"
            )
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise ValueError(
                "model.path has layers with a sliding window, which the packed attention does not "
                "have; set use_sliding_window to false in its config.json"
            )
        model.set_attn_implementation(PACKED)
        self.model = model
        self._temperature = temperature

    def forward(
        self, packed: PackedTokens, *, temperature: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Score the response tokens of a micro-batch.

        Args:
            packed: The micro-batch.
            temperature: Divides the logits; None is that of sampling.

        Returns:
            ``[R]`` float32 logprobs and ``[R]`` float32 entropies, both with gradients.
        """
        hidden = decoder_states(self.model, packed)[packed.predictors]
        weight = _untyped(self.model).get_output_embeddings().weight
        return token_logprobs(
            hidden, weight, packed.targets, temperature=temperature or self._temperature
        )


class Critic(nn.Module):
    """Predicts the return from each response token on (GAE).

    Args:
        model: A Hugging Face causal language model; its output embedding is not used.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        model.set_attn_implementation(PACKED)
        config: Any = model.config
        self.model = model
        self.head = nn.Linear(config.hidden_size, 1, bias=False, device=model.device)
        # From 0 on, so that an untrained critic does not disturb the first advantages.
        nn.init.zeros_(self.head.weight)

    def forward(self, packed: PackedTokens) -> Tensor:
        """``[R]`` float32 value of the state in which each response token is chosen."""
        hidden = decoder_states(self.model, packed)[packed.predictors]
        return self.head(hidden).squeeze(-1).float()  # type: ignore[no-any-return]


def decoder_states(model: PreTrainedModel, packed: PackedTokens) -> Tensor:
    """``[T, H]`` final hidden states of a pack."""
    output = _untyped(model).get_decoder()(
        input_ids=packed.input_ids[None],
        position_ids=packed.position_ids[None],
        use_cache=False,
        layout=packed.layout,
    )
    states: Tensor = output.last_hidden_state[0]
    return states


def _untyped(model: PreTrainedModel) -> Any:
    """The model without its partly missing annotations."""
    return model


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that the optimizer changes."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def freeze(module: _Module) -> _Module:
    """Make a module a constant, for example the reference policy."""
    return module.requires_grad_(False).eval()


@torch.no_grad()
def score(policy: Policy, packs: Iterable[PackedTokens]) -> list[Tensor]:
    """``[R]`` logprobs of each pack, without gradients."""
    return [policy(packed)[0] for packed in packs]
