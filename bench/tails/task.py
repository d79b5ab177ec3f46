"""Prompts that state the length of their responses, and a model that never ends a response by itself."""

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig

from services.common.models.loading import build_model
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec
from services.rollout.workflows.base import Episode

CONTEXT_TOKENS = 131_072
_WIDTH = 16
_STEADY, _NEVER = 4.0, -8.0


def rows(*, long: int, short: int, count: int) -> Iterator[dict[str, str]]:
    """Yields one prompt for a long response, followed by others for short ones."""
    yield {"prompt": f"{long}", "answer": "none"}
    for _ in range(count):
        yield {"prompt": f"{short}", "answer": "none"}


class AsLongAsAsked:
    """Samples as many tokens as the prompt says."""

    async def run(self, episode: Episode) -> None:
        """Samples the response."""
        await episode.generate(max_tokens=int(episode.prompt.text))


def save_endless_model(folder: Path) -> None:
    """Writes a model of one small layer with a long context and almost no chance of a stop token."""
    stop_ids = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="bytes")).stop_ids
    config = AutoConfig.for_model(
        "qwen2",
        architectures=["Qwen2ForCausalLM"],
        vocab_size=258,
        hidden_size=_WIDTH,
        intermediate_size=_WIDTH,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
    )
    model = build_model(config, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        # The first dimension is the same after every token, so a stop token's logit is always low.
        model.get_input_embeddings().weight[:, 0] = _STEADY
        head = model.get_output_embeddings().weight
        head[:, 0] = 0.0
        head[sorted(stop_ids), 0] = _NEVER
    model.save_pretrained(folder)
