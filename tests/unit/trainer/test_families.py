"""Comparison of packed with single sequences in the forward and backward pass of every supported family."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from services.common.memory.sizes import shapes_of
from services.common.models.adapters import adapted_weights, adapter_weights, target_modules
from services.common.models.families import FAMILIES, check_trainer, is_mixture
from services.common.models.loading import build_model, load_config, stored_tensors
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.trainer import LoraSpec
from services.trainer.batch.packing import pack
from services.trainer.engines.fsdp.lora import add_adapters, is_adapter, merged_parameters
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged
from tests.helpers.mixtures import mixture_shape
from tests.helpers.vision import KINDS, model_spec, saved_model

_BASE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_parameters": _LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 24, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    ("mistral", {"sliding_window": 5}),
    ("ministral", {"sliding_window": 5}),
    ("olmo3", {"sliding_window": 5}),
    ("starcoder2", {"sliding_window": 5}),
    ("phi3", {"sliding_window": 5}),
    ("exaone4", {"sliding_window": 5}),
    (
        "gemma2",
        {"sliding_window": 5, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    ("gemma3_text", {"sliding_window": 5, "sliding_window_pattern": 2}),
    ("cohere", {"logit_scale": 0.3}),
    ("cohere2", {"sliding_window": 5, "logit_scale": 0.5}),
    (
        "granite",
        {"logits_scaling": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    ),
    ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [1], "tie_word_embeddings": True}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True}),
    ("mixtral", {"sliding_window": 5, "num_experts_per_tok": 1}),
    ("glm4_moe", {"first_k_dense_replace": 2, "n_group": 4, "topk_group": 2, "use_qk_norm": True}),
    (
        "deepseek_v3",
        {"q_lora_rank": None, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0},
    ),
    ("gpt_oss", {"sliding_window": 5, "rope_parameters": {"rope_type": "default"}}),
    (
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    ),
    ("qwen3_5_text", {"linear_num_value_heads": 2, "full_attention_interval": 4}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    ("qwen3_next", {"mlp_only_layers": [1], "tie_word_embeddings": True}),
    ("llama", {"logit_scale": 0.5, "logits_scaling": 3.0, "final_logit_softcapping": 2.0}),
]
# The default configurations of families with a variant are tested in the nightly run.
_VARIED = {name for name, _ in _VARIANTS}
_CASES = [
    *(
        pytest.param(name, {}, marks=pytest.mark.nightly if name in _VARIED else (), id=name)
        for name in FAMILIES
    ),
    *(pytest.param(*case, id=f"{case[0]}-{index}") for index, case in enumerate(_VARIANTS)),
]
# One family for each set of modules with adapters; the nightly run tests the others.
_ADAPTED = ("llama", "phi3", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "falcon_h1", "qwen3_next")
_TEMPERATURE = 0.7


@pytest.mark.parametrize(("family", "extra"), _CASES)
def test_packed_logprobs_and_gradients_are_those_of_the_model_itself(
    family: str, extra: dict[str, Any]
) -> None:
    config = AutoConfig.for_model(family, **{**_BASE, **mixture_shape(family), **extra})
    assert check_trainer(config.to_dict()) == []
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    if is_mixture(config.to_dict()):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0).add_(torch.randn_like(parameter) * 0.02)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
    lengths = [(3, 9), (1, 14), (7, 1), (2, 30)]
    prompts = [torch.randint(3, 97, (prompt,)) for prompt, _ in lengths]
    responses = [torch.randint(3, 97, (response,)) for _, response in lengths]
    factors = torch.randn(sum(response for _, response in lengths))

    expected = torch.cat(
        [_own(model, prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
    )
    own_gradients = torch.autograd.grad((expected * factors).sum(), _weights(model))

    packed = pack(
        Jagged.from_list(prompts), Jagged.from_list(responses), device=torch.device("cpu")
    )
    actual, _ = Policy(model, temperature=_TEMPERATURE)(packed)
    gradients = torch.autograd.grad((actual * factors).sum(), _weights(model))

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    norm = torch.stack([gradient.norm() for gradient in own_gradients]).norm()
    error = torch.stack(
        [(a - b).norm() for a, b in zip(gradients, own_gradients, strict=True)]
    ).norm()
    assert error / norm <= 1e-5


def _own(model: Any, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    logits = model(torch.cat([prompt, response])[None], use_cache=False).logits[0].float()
    chosen = torch.log_softmax(logits[len(prompt) - 1 : -1] / _TEMPERATURE, -1)
    return chosen.gather(1, response[:, None]).squeeze(1)


def _weights(model: Any) -> list[torch.Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        *(
            pytest.param(name, {}, marks=() if name in _ADAPTED else pytest.mark.nightly, id=name)
            for name in FAMILIES
        ),
        pytest.param("deepseek_v3", {"q_lora_rank": None}, id="deepseek_v3-whole"),
    ],
)
def test_merged_adapters_are_the_adapted_model(family: str, extra: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, **{**_BASE, **mixture_shape(family), **extra})
    model = build_model(config, dtype=torch.float32, device="cpu")
    add_adapters(model, LoraSpec(rank=3))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2 if is_adapter(name) else 0.1)
    merged = build_model(config, dtype=torch.float32, device="cpu", seed=1)
    with torch.no_grad():
        parameters = dict(merged_parameters(model))
        assert parameters.keys() == stored_tensors(merged).keys()
        for name, value in stored_tensors(merged).items():
            value.copy_(parameters[name])
    packed = pack(
        Jagged.from_list([torch.arange(3, 9), torch.arange(5, 7)]),
        Jagged.from_list([torch.arange(9, 30), torch.arange(40, 50)]),
        device=torch.device("cpu"),
    )
    adapted, expected = (
        Policy(adapted_model, temperature=1.0)(packed)[0] for adapted_model in (model, merged)
    )
    torch.testing.assert_close(adapted, expected, rtol=0, atol=1e-4)
    (gradient, *rest) = torch.autograd.grad(adapted.sum(), _weights(model))
    assert gradient.isfinite().all()
    assert rest


# Linear modules that get no adapter, or only one if the specification names them.
_WITHOUT_ADAPTERS = {
    "falcon_h1": {"out_proj"},
    "qwen2_moe": {"shared_expert_gate"},
    "qwen3_next": {"shared_expert_gate"},
    "qwen3_5_moe_text": {"shared_expert_gate"},
}


@pytest.mark.parametrize("model", [*FAMILIES, *KINDS])
def test_adapters_are_those_that_memory_is_planned_for(model: str, tmp_path: Path) -> None:
    if model in KINDS:
        saved_model(model, tmp_path)
        spec = model_spec(tmp_path)
        config: Any = load_config(spec, load_tokenizer(spec))
    else:
        config = AutoConfig.for_model(model, **{**_BASE, **mixture_shape(model)})
    shapes = shapes_of(config)
    every = LoraSpec(rank=3)
    named = target_modules(shapes, every)
    experts = ("experts.gate_up_proj", "experts.down_proj") if is_mixture(config.to_dict()) else ()
    for lora in (every, LoraSpec(rank=3, target_modules=(*named, *experts))):
        adapted = build_model(config, dtype=torch.float32, device="meta")
        add_adapters(adapted, lora)
        trained = [
            parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad
        ]
        assert sum(trained) == adapter_weights(shapes, lora)
    linear = {
        f"{name}.weight"
        for name, module in build_model(config, dtype=torch.float32, device="meta").named_modules()
        if isinstance(module, nn.Linear) and name.startswith("model.layers.")
    }
    planned_adapters = adapted_weights(shapes, every).keys()
    assert planned_adapters <= linear
    without = {name.split(".")[-2] for name in linear - planned_adapters}
    assert without == _WITHOUT_ADAPTERS.get(model, set())


def test_adapters_of_modules_that_a_model_lacks_are_refused_with_those_that_it_has() -> None:
    model = build_model(AutoConfig.for_model("phi3", **_BASE), dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=r"has q_proj, k_proj, v_proj, but .* o_proj, qkv_proj"):
        add_adapters(model, LoraSpec(target_modules=("q_proj", "k_proj", "v_proj", "o_proj")))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bloom"}, "'bloom'"),
        (
            {"model_type": "llama", "layer_types": ["full_attention", "linear_attention"]},
            "linear_attention",
        ),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention", "mamba"]},
            "full_attention or linear_attention",
        ),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "dynamic"}}, "'dynamic'"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "'longrope'"),
        (
            {
                "model_type": "llama",
                "rope_scaling": {"type": "dynamic"},
                "rope_parameters": {"rope_type": "default"},
            },
            "'dynamic'",
        ),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "alpha": 50.0}}, "'dynamic'"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "falcon_h1", "mamba_rms_norm": True}, "mamba_norm_before_gate"),
        ({"model_type": "falcon_h1", "time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        (
            {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 3},
            "num_key_value_heads",
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok",
        ),
        ({"model_type": "glm4_moe", "n_routed_experts": 8, "n_group": 8}, "n_group 8"),
        (
            {
                "model_type": "deepseek_v3",
                "n_routed_experts": 8,
                "n_group": 4,
                "topk_group": 1,
                "num_experts_per_tok": 3,
            },
            "num_experts_per_tok",
        ),
    ],
)
def test_what_would_not_be_exact_is_refused_by_its_configuration(
    config: dict[str, Any], message: str
) -> None:
    (problem,) = check_trainer(config)
    assert message in problem


def test_fused_projections_are_not_divided() -> None:
    (problem,) = check_trainer({"model_type": "phi3"}, tensor_parallel=2)
    assert "trainer.tensor_parallel" in problem


@pytest.mark.parametrize(
    ("model_type", "tensor_parallel", "divisor"),
    [("llama", 1, 12), ("llama", 2, 6), ("mixtral", 1, 12)],
)
def test_context_parallel_must_divide_the_attention_heads_of_a_rank(
    model_type: str, tensor_parallel: int, divisor: int
) -> None:
    config = {"model_type": model_type, "num_attention_heads": 12}
    (problem,) = check_trainer(config, tensor_parallel=tensor_parallel, context_parallel=8)
    assert problem.startswith("trainer.context_parallel is 8")
    assert f"divisor of {divisor}" in problem
