"""Tests that logits are never rounded to the dtype of the weights."""

import torch
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM

from services.common.models.head import float32_products, use_float32_head


def test_products_of_bfloat16_are_float32_sums() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 3, 64).bfloat16()
    weight = torch.randn(17, 64).bfloat16()
    expected = functional.linear(hidden.double(), weight.double())
    assert float32_products(hidden, weight).dtype == torch.float32
    torch.testing.assert_close(
        float32_products(hidden, weight).double(), expected, rtol=1e-5, atol=1e-5
    )


def test_a_model_keeps_its_tensors_and_their_names() -> None:
    for is_tied in (False, True):
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=32,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=2,
                tie_word_embeddings=is_tied,
            )
        ).bfloat16()
        before = {name: id(tensor) for name, tensor in model.named_parameters()}
        ids = torch.arange(8)[None]
        rounded = model(input_ids=ids).logits
        use_float32_head(model)
        assert {name: id(tensor) for name, tensor in model.named_parameters()} == before
        exact = model(input_ids=ids).logits
        assert (rounded.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(exact, rounded.float(), rtol=2e-2, atol=1e-2)
        assert not torch.equal(exact, rounded.float())
