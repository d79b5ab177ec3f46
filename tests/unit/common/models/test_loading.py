"""Tests of loading models: sizes and seeds of presets, and refusals."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.models import configs
from services.common.models.loading import build_model, load_config, load_folder, load_model
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec
from tests.helpers.mixtures import tiny_config

SYMBOLS = "chars:0123456789+-=abcde"


def _load(path: str, seed: int = 0) -> torch.nn.Module:
    model = ModelSpec(path=path, tokenizer=SYMBOLS, images="_vl-" in path)
    return load_model(model, load_tokenizer(model), dtype=torch.float32, device="cpu", seed=seed)


@pytest.mark.parametrize("path", configs.preset_names())
def test_a_preset_has_about_the_size_in_its_name(path: str) -> None:
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
    with pytest.raises(ValueError, match=r"model\.path 'no/such/model'"):
        load_model(
            ModelSpec(path="no/such/model"),
            load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m")),
            dtype=torch.float32,
            device="cpu",
        )
    with pytest.raises(ValueError, match="'tiny:gpt'"):
        configs.preset_config("tiny:gpt", vocab_size=1, eos_id=0, pad_id=0)


@pytest.mark.parametrize(
    "changes", [{"model.norm.weight": None}, {"model.norm.weight": torch.ones(33)}]
)
def test_missing_weights_and_wrong_shapes_are_rejected(
    tmp_path: Path, changes: dict[str, torch.Tensor | None]
) -> None:
    model = build_model(tiny_config("qwen3"), dtype=torch.float32, device="cpu")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {**load_file(file), **changes}
    save_file({name: value for name, value in weights.items() if value is not None}, file)
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        load_folder(tmp_path, dtype=torch.float32, device="cpu")


def test_a_configuration_that_contradicts_itself_is_refused_with_the_rule(tmp_path: Path) -> None:
    config = tiny_config("qwen3").to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": 7}))
    with pytest.raises(ValueError, match=r"model\.path.*even rotary dimension.*=7"):
        load_config(
            ModelSpec(path=str(tmp_path)), load_tokenizer(ModelSpec(path="tiny:llama-0.4m"))
        )


@pytest.mark.parametrize("path", ["/no/such/folder", "./gone", "~nobody/model"])
@pytest.mark.parametrize(
    ("load", "key"),
    [
        (lambda path: configs.read_config(ModelSpec(path=path), None), "model.path"),
        (lambda path: load_tokenizer(ModelSpec(path=path, tokenizer="bytes")), "model.path"),
        (lambda path: load_tokenizer(ModelSpec(path=path)), "model.path"),
        (
            lambda path: load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer=path)),
            "model.tokenizer",
        ),
    ],
)
def test_a_folder_that_does_not_exist_is_named_with_its_key_wherever_it_is_read(path, load, key):
    with pytest.raises((OSError, ValueError)) as caught:
        load(path)
    assert str(caught.value).startswith(
        f"{key}: folder {path!r} does not exist, or cannot be read; "
    )
