"""Logprobs of every family that the table of models lists for an engine equal the trainer's.

Every commit tests a few families; ``make test-families`` tests all.
"""

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deploy.reference.compared import COMPARED, COMPARED_ROUNDED, TELLS_NOT
from services.common.models.families import exact_tokens, is_mixture
from services.common.models.loading import build_model, load_config, stored_tensors
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.rollout import RewardSpec, RolloutSpec
from services.common.runspec.run import ModelSpec
from services.rollout.engines.base import Engine, GenerationRequest, GenerationResult
from services.rollout.engines.build import build_engine, make_engine
from services.rollout.engines.engine_config import EngineConfig
from services.trainer.batch.packing import pack
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged
from tests.helpers.engines import running
from tests.helpers.mixtures import mixture_shape

pytestmark = pytest.mark.timeout(900)
_EVERY_COMMIT = {("vllm", "qwen3_moe"), ("vllm", "phi3"), ("sglang", "qwen3_moe")}
_PROMPT = tuple(3 + (7 * i) % 250 for i in range(60))
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "vllm": {"max_model_len": 256, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 64 << 20}
}
_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 128,  # heads of 32 dimensions, which CPU kernels require
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_LINEAR = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
_AS_RELEASED: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_state": 32},
    **dict.fromkeys(COMPARED_ROUNDED["vllm"], _LINEAR),
    "deepseek_v3": {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "gpt_oss": {"rope_parameters": {**_YARN, "truncate": False}},
    "hunyuan_v1_dense": {"use_qk_norm": True},
    "olmo3": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "full_attention": {**_YARN, "rope_theta": 500000.0},
        }
    },
}
"""Keys that engines need, or that every ``config.json`` of the family has."""
_WINDOW = {"sliding_window": 32}
_BOTH_KINDS = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_WINDOWED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("mistral", "phi3", "starcoder2", "mixtral"), _WINDOW),
    **dict.fromkeys(("ministral", "gemma2", "gemma3_text", "cohere2", "olmo3"), _BOTH_KINDS),
    "gpt_oss": _BOTH_KINDS,
}
"""Windows shorter than the prompt."""
_WEIGHTS = (0, 1, 2, 3, 1)
"""Seeds of the weights that are sent one after the other."""
_MEAN_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


def _cases(compared: Mapping[str, Sequence[str]] = COMPARED) -> list[Any]:
    return [
        pytest.param(engine, family, id=f"{engine}-{family}", marks=_marks(engine, family))
        for engine, families in compared.items()
        for family in families
    ]


def _marks(engine: str, family: str) -> list[Any]:
    is_missing = importlib.util.find_spec(engine) is None
    marks = [pytest.mark.skipif(is_missing, reason=f"{engine} is not installed here")]
    return marks if (engine, family) in _EVERY_COMMIT else [*marks, pytest.mark.nightly]


@pytest.mark.parametrize(("engine_name", "family"), _cases())
async def test_logprobs_and_experts_are_those_of_the_trainer_after_every_adoption(
    engine_name: str, family: str
) -> None:
    config = _config(family, engine_name)
    tells_experts = is_mixture(config.to_dict()) and family not in TELLS_NOT[engine_name]
    async with _serving(
        engine_name, config, dtype=torch.float32, tells_experts=tells_experts
    ) as engine:
        scores = [
            await _check_version(engine, version, _model(config, seed), tells_experts=tells_experts)
            for version, seed in enumerate(_WEIGHTS)
        ]
    # The same weights give the same scores bit for bit, although others were served in between.
    assert scores[-1] == scores[_WEIGHTS.index(_WEIGHTS[-1])]


@pytest.mark.parametrize(("engine_name", "family"), [*_cases(), *_cases(COMPARED_ROUNDED)])
async def test_logprobs_in_bfloat16_are_those_of_the_trainer_in_the_mean(
    engine_name: str, family: str
) -> None:
    config = _config(family, engine_name)
    seeds = _WEIGHTS if family in COMPARED_ROUNDED[engine_name] else (0,)
    async with _serving(engine_name, config, dtype=torch.bfloat16, tells_experts=False) as engine:
        scores = []
        for version, seed in enumerate(seeds):
            model = build_model(deepcopy(config), dtype=torch.bfloat16, device="cpu", seed=seed)
            scores.append(await _check_version(engine, version, model, tells_experts=False))
    assert scores[-1] == scores[seeds.index(seeds[-1])]


def _config(family: str, engine_name: str) -> Any:
    config = AutoConfig.for_model(family, **{**_SHAPE, **_extra(family)})
    if exact_tokens(config.to_dict(), engine_name) is not None:
        # A window longer than the sequence has no effect.
        config.sliding_window = config.max_position_embeddings
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    return config


@asynccontextmanager
async def _serving(
    engine_name: str, config: Any, *, dtype: torch.dtype, tells_experts: bool
) -> AsyncIterator[Engine]:
    engine_config = EngineConfig(
        config=config,
        dtype=dtype,
        device=torch.device("cpu"),
        max_running=4,
        arguments=_ARGUMENTS.get(engine_name, {}),
        returns_experts=tells_experts,
    )
    engine = make_engine(engine_name, engine_config)
    async with asyncio.timeout(600), running(engine):
        await engine.wait_ready()
        yield engine


def test_experts_that_sglang_cannot_report_on_a_cpu_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("sglang")
    model = ModelSpec(path="tiny:qwen3_moe-0.7m", tokenizer="chars:0123456789=")
    spec = RolloutSpec(
        rewards=(RewardSpec(name="exact_match"),), engine="sglang", routing_replay="replay"
    )

    def refuse() -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    # Restores torch's error, because a stand-in replaces the CUDA runtime here.
    monkeypatch.setattr(torch.cuda, "cudart", refuse)
    with pytest.raises(ValueError, match=r"rollout\.routing_replay"):
        tokenizer = load_tokenizer(model)
        config = load_config(model, tokenizer)
        build_engine(
            spec, model, config, tokenizer, dtype=torch.float32, device=torch.device("cpu")
        )


async def _check_version(
    engine: Engine, version: int, model: PreTrainedModel, *, tells_experts: bool
) -> Sequence[float]:
    """Adopts a version and compares logprobs with the trainer's; returns the scores of the prompt."""
    tensors = {name: value.detach().clone() for name, value in stored_tensors(model).items()}
    await engine.adopt_weights(version, tensors)
    request = GenerationRequest(
        request_id=f"r{version}", context_ids=_PROMPT, max_tokens=24, seed=version
    )
    result = await engine.generate(request)
    scores = await engine.score(_PROMPT)
    got = torch.tensor([*scores, *result.logprobs])
    policy = Policy(model, temperature=1.0, routing_replay="compare")
    with torch.no_grad():
        expected, _ = policy(_packed(result, tells_experts=tells_experts))
    assert (got - expected).abs().mean() <= _MEAN_TOLERANCES[model.dtype]
    if tells_experts:
        assert policy.routing is not None
        differences = policy.routing.differences()
        assert differences is not None
        differs, is_known = differences
        assert is_known.all()
        assert not differs.any()
    return scores


def _packed(result: GenerationResult, *, tells_experts: bool) -> Any:
    reported_experts = None
    if tells_experts:
        assert result.routed_experts is not None
        reported_experts = Jagged.from_list([torch.from_numpy(result.routed_experts.copy())])
    rest = torch.tensor(_PROMPT[1:] + result.token_ids)
    return pack(
        Jagged.from_list([torch.tensor(_PROMPT[:1])]),
        Jagged.from_list([rest]),
        device=torch.device("cpu"),
        experts=reported_experts,
    )


def _extra(family: str) -> dict[str, Any]:
    """Returns the additional keys of a family, with sizes that CPU kernels support."""
    shape = mixture_shape(family)
    sizes = {name: 32 for name in shape if "intermediate_size" in name}
    return shape | sizes | _AS_RELEASED.get(family, {}) | _WINDOWED.get(family, {})


def _model(config: Any, seed: int) -> PreTrainedModel:
    """Returns a model with random weights from a seed; no tensor keeps an initial value of 0 or 1."""
    model = build_model(deepcopy(config), dtype=torch.float32, device="cpu", seed=seed)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.mul_(2.0).add_(torch.randn_like(parameter) * 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
    return model
