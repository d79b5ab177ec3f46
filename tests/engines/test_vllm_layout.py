"""Weights copied directly into vLLM's parameters equal, bit for bit, those that vLLM's own loader writes."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from services.common.models.experts import checkpoint_names
from services.common.runspec.engines import ENGINES
from services.extras.external_engine.layout import copy_weights
from services.rollout.engines.imports import prepare_environment

pytest.importorskip("vllm", reason="vllm is not installed here")
pytestmark = pytest.mark.timeout(900)
KINDS = [
    (Qwen2Config, "Qwen2ForCausalLM"),
    (Qwen3Config, "Qwen3ForCausalLM"),
    (LlamaConfig, "LlamaForCausalLM"),
    (Qwen3MoeConfig, "Qwen3MoeForCausalLM"),
]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Initializes vLLM's process groups for one process."""
    prepare_environment(ENGINES["vllm"], is_cpu=True)
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.utils.network_utils import get_open_port

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            1, 0, f"tcp://127.0.0.1:{get_open_port()}", local_rank=0, backend="gloo"
        )
        initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


def build(config: PretrainedConfig, folder: Path) -> torch.nn.Module:
    """Returns vLLM's model with all parameters set to 7, before vLLM repacks weights for its kernels."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    config.save_pretrained(folder)
    arguments = EngineArgs(
        model=str(folder),
        load_format="dummy",
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=32,
    )
    engine_config = arguments.create_engine_config()
    with set_current_vllm_config(engine_config):
        model = initialize_model(vllm_config=engine_config)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    return model


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("kind", "architecture"), KINDS, ids=["qwen2", "qwen3", "llama", "qwen3_moe"]
)
def test_copied_parameters_equal_loaded_ones(
    kind: type[PretrainedConfig], architecture: str, tied: bool, tmp_path: Path
) -> None:
    config = kind(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=tied,
        max_position_embeddings=256,
        architectures=[architecture],
        **(EXPERTS if kind is Qwen3MoeConfig else {}),
    )
    torch.manual_seed(0)
    source = {
        name: torch.randn_like(value)
        for name, value in AutoModelForCausalLM.from_config(config).named_parameters()
    }
    loaded, copied = build(config, tmp_path), build(config, tmp_path)
    loaded.load_weights(
        tensor
        for name, value in source.items()
        for tensor in checkpoint_names(name, value, config.to_dict())
    )
    targets = dict(copied.named_parameters())
    with torch.no_grad():
        copy_weights(source, targets, has_plain_experts=True)
    expected = dict(loaded.named_parameters())
    assert targets.keys() == expected.keys()
    for name, value in targets.items():
        assert torch.equal(value, expected[name]), name
    del loaded, copied
    gc.collect()
