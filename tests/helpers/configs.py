"""Configurations of known models, whose weights no test needs."""

from transformers import PretrainedConfig, Qwen2Config


def qwen_7b() -> PretrainedConfig:
    """Returns Qwen2.5-7B's shape."""
    return Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
