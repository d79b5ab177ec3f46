"""A tiny model that takes feature vectors besides token ids, as multimodal models take images."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM, Qwen2Model

from services.wire.data.model_inputs import ModelInputs
from tests.helpers.engines import VOCAB_SIZE
from tests.helpers.mixtures import tiny_config

PLACEHOLDER = 3
"""Token whose embedding the next feature vector replaces."""
HIDDEN = 32


class FeatureModel(Qwen2Model):
    """Qwen2 that replaces the embeddings of placeholders with feature vectors, in the order of the input.

    The vectors are ``features``, ``[n, H]``, plus the means of the rows of ``pixels`` if given.
    """

    def forward(
        self,
        input_ids: Tensor | None = None,
        features: Tensor | None = None,
        pixels: Tensor | None = None,
        **others: Any,
    ) -> Any:
        if features is None:
            return super().forward(input_ids=input_ids, **others)
        assert input_ids is not None
        is_placeholder = input_ids == PLACEHOLDER
        if int(is_placeholder.sum()) != len(features):
            raise ValueError(
                f"{len(features)} features for {int(is_placeholder.sum())} placeholders"
            )
        if pixels is not None:
            features = features + pixels.flatten(1).mean(1, keepdim=True)
        embedded = self.embed_tokens(input_ids)
        mask = is_placeholder[..., None].expand_as(embedded)
        embedded = embedded.masked_scatter(mask, features.to(embedded.dtype))
        return super().forward(**{**others, "inputs_embeds": embedded})


class FeatureCausalModel(Qwen2ForCausalLM):
    """Causal language model of a :class:`FeatureModel`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = FeatureModel(config)
        self.post_init()


def feature_model(seed: int = 0) -> FeatureCausalModel:
    """Returns a random model; its logits differ strongly between features."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = tiny_config("qwen2", vocab_size=VOCAB_SIZE, hidden_size=HIDDEN, head_dim=8)
        return FeatureCausalModel(config).eval()


def features(seed: int, count: int) -> ModelInputs:
    """Returns a bundle of ``count`` random feature vectors."""
    generator = torch.Generator().manual_seed(seed)
    return ModelInputs.from_values({"features": torch.randn(count, HIDDEN, generator=generator)})


def plain_logprobs(
    model: FeatureCausalModel, context: Sequence[int], tokens: Sequence[int], inputs: ModelInputs
) -> Tensor:
    """Returns the logprobs of tokens after a context, by the model's own unpacked forward pass."""
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([[*context, *tokens]])
    logits = model(ids, **inputs.tensors).logits[0, len(context) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
