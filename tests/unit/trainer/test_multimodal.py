"""Language models of multimodal checkpoints: loading, packing, and export of the whole checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from services.checks.start.hub import model_config
from services.common.models.configs import read_config
from services.common.models.families import MULTIMODAL, check_trainer
from services.common.models.loading import (
    build_model,
    load_config,
    load_model,
    read_weights,
    stored_tensors,
)
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec, RunSpec
from services.extras.export.checkpoint import export_checkpoint
from services.trainer.batch.packing import pack
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged
from tests.helpers.batches import CPU, policy_of, random_queue, rank_of, spec_of
from tests.helpers.mixtures import mixture_shape

_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PATCHES = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24}
_QWEN3 = {"vision_config": {**_PATCHES, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}}
_LLAVA = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
}
_MROPE = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [2, 1, 1]}
_TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": {**_LLAVA, "mm_tokens_per_image": 4},
    "mistral3": {"vision_config": {**_LLAVA["vision_config"], "model_type": "pixtral"}},
    "qwen2_vl": {"vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32}},
    "qwen2_5_vl": {"vision_config": {**_PATCHES, "out_hidden_size": 32}},
    "qwen3_vl": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
}
_SYMBOLS = "chars:" + "".join(chr(code) for code in range(48, 108))
_HEADS = "mtp.layers.0.norm.weight"


def _saved(kind: str, folder: Path) -> Any:
    """Saves a random checkpoint with a multi-token prediction head and tensor names as on the hub."""
    text: dict[str, Any] = {**_TEXT, **mixture_shape(MULTIMODAL[kind]), "sliding_window": 5}
    if kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        text["rope_parameters"] = _MROPE
    if kind == "mistral3":
        text["model_type"] = "mistral"
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(kind, text_config=text, **_TOWERS[kind]), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file({**load_file(path), _HEADS: torch.randn(3)}, path, metadata={"format": "pt"})
    return model


def _spec(folder: Path) -> RunSpec:
    return spec_of(model={"path": str(folder), "tokenizer": _SYMBOLS}, trainer={"dtype": "float32"})


def _logprobs(model: Any, prompt: Tensor, response: Tensor) -> Tensor:
    ids = torch.cat([prompt, response])[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, response[:, None]).squeeze(1)


# These two cover both forms of tensor names and fused experts; the nightly run tests the others.
_ON_EACH_COMMIT = ("gemma3", "qwen3_5_moe")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in _ON_EACH_COMMIT else pytest.mark.nightly)
        for kind in MULTIMODAL
    ],
)
def test_text_trains_and_the_whole_checkpoint_is_exported(kind: str, tmp_path: Path) -> None:
    whole = _saved(kind, tmp_path / "source")
    spec = _spec(tmp_path / "source")
    tokenizer = load_tokenizer(spec.model)
    assert check_trainer(read_config(spec.model, None)) == []
    assert model_config(spec).model_type == MULTIMODAL[kind]

    prompts = [torch.randint(3, 60, (size,)) for size in (3, 7)]
    responses = [torch.randint(3, 60, (size,)) for size in (20, 9)]
    expected = torch.cat([_logprobs(whole, *row) for row in zip(prompts, responses, strict=True)])
    loaded = load_model(spec.model, tokenizer, dtype=torch.float32, device="cpu")
    packed = pack(Jagged.from_list(prompts), Jagged.from_list(responses), device=CPU)
    actual, _ = Policy(loaded, temperature=1.0)(packed)
    torch.testing.assert_close(actual.detach(), expected, rtol=0, atol=1e-5)

    # Sharded trainers and the frozen weights of rollouts are loaded with read_weights.
    empty = build_model(
        load_config(spec.model, tokenizer), dtype=torch.float32, device="cpu", seed=5
    )
    read_weights(stored_tensors(empty), tmp_path / "source", empty.config.to_dict())
    for name, value in stored_tensors(empty).items():
        assert torch.equal(value, stored_tensors(loaded)[name]), name

    policy = Policy(loaded, temperature=1.0)
    rank = rank_of(spec, policy, random_queue(policy_of(spec_of())), root=tmp_path / "checkpoints")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.25)
    export_checkpoint(rank.checkpointer.write(rank.snapshot(1)), spec, tmp_path / "hf")

    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "hf"))
    assert before.keys() == after.keys()
    names = {name for name in before if torch.equal(before[name], after[name])}
    assert names == {
        name
        for name in before
        if "visi" in name or "visual" in name or ("proj" in name and "multi" in name)
    } | {_HEADS}
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    actual = torch.cat([_logprobs(again, *row) for row in zip(prompts, responses, strict=True)])
    changed, _ = policy(packed)
    torch.testing.assert_close(actual, changed.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("decoder", "head"),
    [("language_model.model.", "language_model.lm_head."), ("language_model.model.", "lm_head.")],
)
def test_other_prefixes_of_language_models_are_found(
    decoder: str, head: str, tmp_path: Path
) -> None:
    _saved("qwen2_5_vl", tmp_path)
    spec = ModelSpec(path=str(tmp_path), tokenizer=_SYMBOLS)
    tokenizer = load_tokenizer(spec)
    plain = load_model(spec, tokenizer, dtype=torch.float32, device="cpu")
    towers = {n: v for n, v in load_file(tmp_path / "model.safetensors").items() if "vis" in n}
    renamed = {
        name.replace("model.", decoder, 1).replace("lm_head.", head): value.detach().contiguous()
        for name, value in stored_tensors(plain).items()
    }
    save_file({**towers, **renamed}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(spec, tokenizer, dtype=torch.float32, device="cpu")
    for name, value in stored_tensors(model).items():
        assert torch.equal(value, stored_tensors(plain)[name]), name


def test_a_file_without_a_part_of_the_language_model_is_refused(tmp_path: Path) -> None:
    _saved("qwen3_vl", tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file({n: v for n, v in weights.items() if ".layers.2." not in n}, path)
    spec = ModelSpec(path=str(tmp_path), tokenizer=_SYMBOLS)
    with pytest.raises(ValueError, match=r"model\.path"):
        load_model(spec, load_tokenizer(spec), dtype=torch.float32, device="cpu")
