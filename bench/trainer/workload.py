"""The model, the sequences and the specification of the measurement."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from services.common.models.configs import preset_config
from services.common.models.loading import build_model
from services.common.runspec.run import RunSpec
from services.trainer.batch.samples import BatchFacts, Samples
from services.trainer.model.flops import active_weights, training_flops
from services.wire.data.jagged import Jagged


@dataclass(frozen=True)
class Scale:
    """Size of the measured step."""

    config: PretrainedConfig
    num_sequences: int
    shortest: int
    longest: int
    tokens_per_micro_batch: int
    padded_batch: int
    rounds: int


def full_scale() -> Scale:
    """Returns Qwen2.5-1.5B's shape with random weights; 64 sequences of 256 to 8192 tokens."""
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        rope_theta=1e6,
        tie_word_embeddings=True,
    )
    return Scale(config, 64, 256, 8192, 40_960, 2, 3)


def smoke_scale() -> Scale:
    """Returns a size that takes a minute on one CPU core."""
    values = preset_config("tiny:qwen2-1.2m", vocab_size=512, eos_id=1, pad_id=0)
    return Scale(AutoConfig.for_model(**values), 16, 16, 256, 1024, 4, 2)


def long_tailed_lengths(scale: Scale) -> list[int]:
    """Returns log-normal lengths: most are short, a few reach the limit."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(scale.num_sequences, generator=generator)
    middle = scale.shortest * 4.5
    lengths = (middle * torch.exp(0.9 * spread)).clamp(scale.shortest, scale.longest)
    lengths[0], lengths[-1] = scale.shortest, scale.longest
    return [int(length) for length in lengths]


def spec_of(scale: Scale, *, algorithm: Mapping[str, Any] | None = None, **trainer: Any) -> RunSpec:
    """Returns a specification with the measured step."""
    return RunSpec.model_validate(
        {
            "name": "bench",
            "model": {"path": "tiny:qwen2-0.4m"},
            "data": {"train": {"source": "jsonl", "path": "none"}},
            "rollout": {"max_response_tokens": scale.longest, "rewards": [{"name": "exact_match"}]},
            "algorithm": {"max_staleness": 1, **(algorithm or {})},
            "trainer": {
                "steps": 100,
                "prompts_per_step": scale.num_sequences // 8,
                "tokens_per_micro_batch": scale.tokens_per_micro_batch,
                **trainer,
            },
        }
    )


def make_samples(scale: Scale) -> tuple[Samples, BatchFacts]:
    """Returns the whole batch; an eighth of each sequence is its prompt."""
    generator = torch.Generator().manual_seed(1)
    lengths = long_tailed_lengths(scale)
    prompts = [length // 8 for length in lengths]
    responses = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]

    def tokens(counts: list[int]) -> Jagged:
        values = torch.randint(2, scale.config.vocab_size, (sum(counts),), generator=generator)
        return Jagged(values, torch.tensor(counts))

    count = sum(responses)
    everything = torch.ones(count, dtype=torch.bool)
    samples = Samples(
        rows=torch.arange(len(lengths)),
        numbers=torch.zeros(len(lengths), dtype=torch.int64),
        prompts=tokens(prompts),
        responses=tokens(responses),
        rewards=torch.rand(len(lengths), generator=generator),
        tokens={
            "response_mask": everything,
            "loss_mask": everything,
            "rollout_logprobs": torch.full((count,), -11.9),
            "token_versions": torch.zeros(count, dtype=torch.int64),
        },
    )
    none = torch.zeros(len(lengths), dtype=torch.bool)
    facts = BatchFacts(
        groups=torch.arange(len(lengths)) // 8,
        lengths=tuple(lengths),
        prompt_lengths=tuple(prompts),
        is_truncated=none,
        is_member=~none,
        is_failed=none,
        is_greedy=none,
    )
    return samples, facts


def useful_flops(scale: Scale) -> float:
    """Returns the useful operations of one step."""
    lengths = long_tailed_lengths(scale)
    model = build_model(scale.config, dtype=torch.float32, device="meta")
    return training_flops(
        scale.config,
        active_weights(model, scale.config),
        tokens=sum(lengths),
        squares=sum(length**2 for length in lengths),
        predictions=sum(length - length // 8 for length in lengths),
    )
