"""Presets have the promised size and are the same for the same seed."""

import pytest
import torch

from services.common.models import presets
from services.common.models.loading import load_config, load_model
from services.common.models.tokenizer import load_tokenizer
from services.common.spec.model import ModelSpec

SYMBOLS = "chars:0123456789+-=abcde"


def _load(path: str, seed: int = 0) -> torch.nn.Module:
    model = ModelSpec(path=path, tokenizer=SYMBOLS)
    return load_model(model, load_tokenizer(model), dtype=torch.float32, device="cpu", seed=seed)


@pytest.mark.parametrize("path", presets.preset_names())
def test_a_preset_is_about_as_large_as_its_name_says(path: str) -> None:
    promised = float(path.rsplit("-", 1)[1].removesuffix("m")) * 1e6
    count = sum(parameter.numel() for parameter in _load(path).parameters())
    assert count == pytest.approx(promised, rel=0.08)


def test_weights_follow_the_seed_and_leave_the_global_random_state() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, same, other = (_load("tiny:qwen2-0.4m", seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    for name, value in first.state_dict().items():
        assert torch.equal(value, same.state_dict()[name])
    assert any(
        not torch.equal(value, other.state_dict()[name])
        for name, value in first.state_dict().items()
    )


def test_the_vocabulary_comes_from_the_tokenizer() -> None:
    model = ModelSpec(path="tiny:llama-0.4m", tokenizer=SYMBOLS)
    tokenizer = load_tokenizer(model)
    assert load_config(model, tokenizer).vocab_size == tokenizer.vocab_size == 20


def test_a_missing_model_and_an_unknown_preset_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"model\.path 'no/such/model' does not load"):
        load_model(
            ModelSpec(path="no/such/model"),
            load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m")),
            dtype=torch.float32,
            device="cpu",
        )
    with pytest.raises(ValueError, match="no preset; choose one of"):
        presets.preset_config("tiny:gpt", vocab_size=1, eos_id=0, pad_id=0)
