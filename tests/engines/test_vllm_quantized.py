"""Replacement of weights that vLLM quantizes: each is verified, and a wrong parameter is named."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from services.common.runspec.engines import ENGINES
from services.rollout.engines.imports import prepare_environment

pytest.importorskip("vllm", reason="vllm is not installed here")
pytestmark = pytest.mark.timeout(900)


def scaled_fp8_quant(
    values: torch.Tensor,
    scale: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces vLLM's kernel of this name, which its CPU build lacks."""
    if scale is None:
        largest = values.float().abs()
        largest = (
            largest.amax(-1, keepdim=True) if use_per_token_if_dynamic else largest.amax().view(1)
        )
        scale = (largest / 448).clamp(min=1e-12)
    return (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """Yields vLLM's model, quantized from random weights, and its configuration."""
    prepare_environment(ENGINES["vllm"], is_cpu=True)
    from vllm import _custom_ops
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.utils.network_utils import get_open_port

    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", scaled_fp8_quant)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            1, 0, f"tcp://127.0.0.1:{get_open_port()}", local_rank=0, backend="gloo"
        )
        initialize_model_parallel(1, 1)
    config().save_pretrained(tmp_path)
    arguments = EngineArgs(
        model=str(tmp_path),
        load_format="dummy",
        dtype="bfloat16",
        quantization="fp8_per_tensor",
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=32,
    )
    engine_config = arguments.create_engine_config()
    loader = get_model_loader(engine_config.load_config)
    yield (
        loader.load_model(vllm_config=engine_config, model_config=engine_config.model_config),
        engine_config,
    )
    cleanup_dist_env_and_memory()


def config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        architectures=["Qwen2ForCausalLM"],
    )


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    shape = AutoModelForCausalLM.from_config(config())
    return {name: torch.randn_like(value).bfloat16() for name, value in shape.named_parameters()}


def begun(model: Any, engine_config: Any, weights: dict[str, torch.Tensor]) -> Any:
    from services.extras.vllm.quantized import QuantizedUpdate

    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    return QuantizedUpdate(model, engine_config, shapes, rank=0, ranks=1)


def replaced(model: Any, engine_config: Any, weights: dict[str, torch.Tensor]) -> list[str]:
    update = begun(model, engine_config, weights)
    tensors = [*reversed(weights.items())]  # in any order
    update.add(tensors[:3])
    update.add(tensors[3:])
    assert update.is_complete
    return update.finish()


def test_every_replacement_is_verified_and_serves_the_new_weights(model: tuple[Any, Any]) -> None:
    from services.extras.vllm.quantized import quantizes

    llm, engine_config = model
    assert quantizes(llm)
    places = {name: value.data_ptr() for name, value in llm.named_parameters()}
    for version in range(5):
        weights = weights_of(version)
        assert replaced(llm, engine_config, weights) == []
        served = dict(llm.named_parameters())
        # Captured graphs hold the addresses of parameters.
        assert {name: value.data_ptr() for name, value in served.items()} == places
        down = "model.layers.1.mlp.down_proj.weight"
        values, scale = scaled_fp8_quant(weights[down])
        assert torch.equal(served[down].view(torch.uint8), values.t().view(torch.uint8))
        assert torch.equal(served[f"{down}_scale"], scale)
        q, k, v = (weights[f"model.layers.0.self_attn.{name}_proj.bias"] for name in "qkv")
        assert torch.equal(served["model.layers.0.self_attn.qkv_proj.bias"], torch.cat([q, k, v]))


@pytest.mark.parametrize(
    ("name", "is_scale"),
    [
        ("model.layers.1.mlp.gate_up_proj.weight", False),
        ("model.layers.0.self_attn.qkv_proj.weight", True),
        ("model.layers.0.self_attn.qkv_proj.bias", False),
        ("model.norm.weight", False),
    ],
)
def test_a_parameter_that_was_not_replaced_is_named(
    model: tuple[Any, Any], name: str, is_scale: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.extras.vllm import quantized

    llm, engine_config = model
    assert replaced(llm, engine_config, weights_of(0)) == []
    target = f"{name}_scale" if is_scale else name
    parameter = dict(llm.named_parameters())[target]
    old = parameter.detach().clone()
    finish = quantized.QuantizedUpdate.finish

    def undone(self: Any) -> list[str]:
        parameter.data.copy_(old)
        return finish(self)

    monkeypatch.setattr(quantized.QuantizedUpdate, "finish", undone)
    assert replaced(llm, engine_config, weights_of(1)) == [target]


def test_a_large_parameter_that_was_not_replaced_is_named(
    model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.extras.vllm import quantized

    llm, engine_config = model
    assert replaced(llm, engine_config, weights_of(0)) == []
    name = "model.layers.1.mlp.gate_up_proj.weight"
    parameter = dict(llm.named_parameters())[name]
    old, differ = parameter.detach().clone(), quantized._differ

    def undone(tensor: torch.Tensor, other_tensor: torch.Tensor) -> torch.Tensor:
        parameter.data.copy_(old)
        return differ(tensor, other_tensor)

    monkeypatch.setattr(quantized, "_SMALL", 0)
    monkeypatch.setattr(quantized, "_differ", undone)
    assert replaced(llm, engine_config, weights_of(1)) == [name]


def test_an_interrupted_replacement_is_followed_by_a_whole_one(model: tuple[Any, Any]) -> None:
    llm, engine_config = model
    weights = weights_of(0)
    update = begun(llm, engine_config, weights)
    update.add([*weights.items()][:5])
    assert not update.is_complete
    assert replaced(llm, engine_config, weights_of(1)) == []
