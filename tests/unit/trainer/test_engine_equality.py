"""Tests that with batch_invariant the trainer's logprobs equal those of the torch engine bit by bit."""

from typing import Any

import pytest
import torch

from services.common.runspec.run import RunSpec
from tests.helpers.equality import Subject, decoded, groups, logprobs, trained
from tests.helpers.specs import spec_with

_SHAPE: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 60,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 20,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_key_value_heads": 2},
    "llama": {"num_key_value_heads": 1},
    "qwen2": {"num_key_value_heads": 4},
}
_BATCH_INVARIANT = {"rewards": [{"name": "exact_match"}], "reproducible": "batch_invariant"}


def subject_of(family: str) -> Subject:
    return Subject({"model_type": family, **_SHAPE, **FAMILIES[family]})


@pytest.mark.parametrize("shares_prefixes", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_packs_equal_those_of_decoding(family: str, shares_prefixes: bool) -> None:
    subject = subject_of(family)
    requests = groups(24, tokens=40, vocabulary=301, context=90)
    results = decoded(subject.batch(), requests, running=11)
    policy = subject.policy()
    for start in range(0, len(requests), 8):
        pack = requests[start : start + 8]
        actual, _ = policy(subject.packed(pack, results, shares_prefixes=shares_prefixes))
        assert torch.equal(actual, logprobs(pack, results))


def test_logprobs_are_equal_over_several_blocks_of_keys() -> None:
    subject = subject_of("llama")
    requests = groups(4, tokens=40, vocabulary=301, context=1200)
    results = decoded(subject.batch(), requests, running=4)
    actual, _ = subject.policy()(subject.packed(requests, results, shares_prefixes=True))
    assert len(requests[0].context_ids) > 512
    assert torch.equal(actual, logprobs(requests, results))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_ordinary_operators(family: str) -> None:
    subject = subject_of(family)
    requests = groups(8, tokens=20, vocabulary=301, context=30)
    packed = subject.packed(
        requests, decoded(subject.batch(), requests, running=8), shares_prefixes=True
    )
    scores, gradients = zip(
        *(trained(subject, packed, engine) for engine in ("torch", None)), strict=True
    )
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("trainer", "is_equal"),
    [
        ({}, True),
        ({"tensor_parallel": 2, "world_size": 2}, False),
        ({"lora": {}}, False),
        ({"engine": "reference"}, False),
    ],
)
def test_the_trainer_computes_as_the_engine_with_the_same_key(
    trainer: dict[str, Any], is_equal: bool
) -> None:
    spec: RunSpec = spec_with(rollout=_BATCH_INVARIANT, trainer=trainer)
    assert spec.computes_as == ("torch" if is_equal else None)
    assert not spec_with(
        rollout={**_BATCH_INVARIANT, "reproducible": True}, trainer=trainer
    ).computes_as
