"""Tests that the trainer computes the same function with vLLM's operators; torch emulates their kernels."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig

from services.common.models import vllm_operators
from services.common.models.vllm_operators import missing_operators
from services.common.runspec.run import RunSpec
from services.trainer.model.policy import Policy, computes_as
from tests.helpers.equality import Subject, decoded, groups, trained
from tests.helpers.specs import spec_with

_SHAPE: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": False},
}
_BATCH_INVARIANT: dict[str, Any] = {
    "rewards": [{"name": "exact_match"}],
    "engine": "vllm",
    "reproducible": "batch_invariant",
}


def _gated(output: Tensor, both: Tensor) -> None:
    gate, up = both.chunk(2, -1)
    output.copy_(functional.silu(gate) * up)


def _rotate(
    positions: Tensor, query: Tensor, key: Tensor, size: int, table: Tensor, is_neox: bool
) -> None:
    assert is_neox
    cosines, sines = (half[:, None] for half in table[positions].chunk(2, -1))
    for states in (query, key):
        assert states.is_contiguous()
        first, second = states.view(len(states), -1, size).chunk(2, -1)
        turned = [first * cosines - second * sines, second * cosines + first * sines]
        states.copy_(torch.cat(turned, -1).flatten(1))


def _attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    assert options["causal"]
    assert options["num_splits"] == 1
    assert options["max_seqlen_q"] > 1
    output = torch.empty_like(query)
    queries, keys = options["cu_seqlens_q"].tolist(), options["cu_seqlens_k"].tolist()
    for row in range(len(queries) - 1):
        q, k, v = (
            states[start:end].transpose(0, 1)
            for states, start, end in (
                (query, queries[row], queries[row + 1]),
                (key, keys[row], keys[row + 1]),
                (value, keys[row], keys[row + 1]),
            )
        )
        causal = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        output[queries[row] : queries[row + 1]] = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=causal, scale=options["softmax_scale"], enable_gqa=True
        ).transpose(0, 1)
    return output


def _token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(1, tokens)


_STANDS_IN = vllm_operators._Vllm(
    matmul=torch.mm,
    norm=lambda states, weight, epsilon: functional.rms_norm(states, weight.shape, weight, epsilon),
    gated=_gated,
    rotate=_rotate,
    attention=_attention,
    attention_version=3,
    apply_temperature=lambda logits, rows, temperature: logits.div_(
        temperature[rows.long()][:, None]
    ),
    token_logprobs=_token_logprobs,
)


def _table(config: Any, device: torch.device) -> Tensor:
    base, size = config.rope_parameters["rope_theta"], config.head_dim
    frequencies = base ** -(torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(config.max_position_embeddings), frequencies)
    return torch.cat([angles.cos(), angles.sin()], -1)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_operators, "version", lambda _: "0.26.0")


@pytest.fixture
def stands_in(monkeypatch: pytest.MonkeyPatch, installed: None) -> None:
    monkeypatch.setattr(vllm_operators, "_vllm", lambda: _STANDS_IN)
    monkeypatch.setattr(vllm_operators, "_rotary_table", _table)


@pytest.mark.usefixtures("stands_in")
@pytest.mark.parametrize("shares_prefixes", [True, False])
@pytest.mark.parametrize("family", _FAMILIES)
def test_scores_and_gradients_are_those_of_the_ordinary_operators(
    family: str, shares_prefixes: bool
) -> None:
    subject = Subject({"model_type": family, **_SHAPE, **_FAMILIES[family]})
    requests = groups(8, tokens=20, vocabulary=301, context=30)
    packed = subject.packed(
        requests, decoded(subject.batch(), requests, running=8), shares_prefixes=shares_prefixes
    )
    scores, gradients = zip(
        *(trained(subject, packed, engine) for engine in ("vllm", None)), strict=True
    )
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("stands_in")
def test_every_operator_of_a_layer_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, int] = {}

    def counted(name: str) -> Any:
        compute = getattr(_STANDS_IN, name)

        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return compute(*arguments, **options)

        return call

    names = ("matmul", "norm", "gated", "rotate", "attention", "apply_temperature")
    counting = replace(_STANDS_IN, **{name: counted(name) for name in names})
    monkeypatch.setattr(vllm_operators, "_vllm", lambda: counting)
    subject = Subject({"model_type": "qwen3", **_SHAPE})
    requests = groups(4, tokens=5, vocabulary=301, context=5)
    packed = subject.packed(
        requests, decoded(subject.batch(), requests, running=4), shares_prefixes=True
    )
    with torch.no_grad():
        subject.policy("vllm")(packed)
    # Two layers have seven products and four norms each, and the model has a last norm and a head.
    assert counts == {
        "matmul": 15,
        "norm": 9,
        "gated": 2,
        "rotate": 2,
        "attention": 2,
        "apply_temperature": 1,
    }


@pytest.mark.parametrize("installed_version", ["0.32.0", None])
def test_an_environment_with_another_vllm_or_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, installed_version: str | None
) -> None:
    def version(_: str) -> str:
        if installed_version is None:
            raise PackageNotFoundError
        return installed_version

    monkeypatch.setattr(vllm_operators, "version", version)
    model = Subject({"model_type": "llama", **_SHAPE}).model()
    with pytest.raises(ValueError, match=r"rollout\.reproducible"):
        Policy(model, temperature=1.0, engine="vllm")
    assert computes_as(spec_with(rollout=_BATCH_INVARIANT), model.config) is None


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "gemma2"},
        {"model_type": "llama", "hidden_act": "gelu"},
        {"model_type": "llama", "head_dim": 96},
        {
            "model_type": "llama",
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        },
        {
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 1,
        },
    ],
)
def test_models_with_other_operators_are_found(values: dict[str, Any]) -> None:
    shape = {**_SHAPE, **values}
    config = AutoConfig.for_model(shape.pop("model_type"), **shape).to_dict()
    assert missing_operators(config, torch.bfloat16)


@pytest.mark.usefixtures("installed")
def test_other_dtypes_are_found() -> None:
    config = AutoConfig.for_model("qwen3", **_SHAPE).to_dict()
    assert not missing_operators(config, torch.bfloat16)
    assert missing_operators(config, torch.float32)


@pytest.mark.parametrize(
    ("changes", "engine"),
    [
        ({}, "vllm"),
        ({"rollout": {"reproducible": True}}, None),
        ({"rollout": {"engine": "sglang"}}, None),
        ({"rollout": {"engine_arguments": {"tensor_parallel_size": 2}}}, None),
        ({"trainer": {"tensor_parallel": 2, "world_size": 2}}, None),
        ({"trainer": {"lora": {}}}, None),
        ({"trainer": {"engine": "reference"}}, None),
    ],
)
def test_the_trainer_computes_as_vllm_alone_on_its_gpu(
    changes: dict[str, dict[str, Any]], engine: str | None
) -> None:
    spec: RunSpec = spec_with(
        rollout={**_BATCH_INVARIANT, **changes.get("rollout", {})},
        trainer=changes.get("trainer", {}),
    )
    assert spec.computes_as == engine


@pytest.mark.usefixtures("installed")
def test_a_model_with_other_operators_computes_with_the_ordinary_ones() -> None:
    spec = spec_with(rollout=_BATCH_INVARIANT, trainer={"dtype": "bfloat16"})
    assert computes_as(spec, AutoConfig.for_model("qwen3", **_SHAPE)) == "vllm"
    assert computes_as(spec, AutoConfig.for_model("gemma2", **_SHAPE)) is None
