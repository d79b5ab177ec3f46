"""Tests that an engine reports the experts of each token once, under the weights that sampled the token."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from services.common.fields import ALL_TOKENS, SAMPLER_TOP_K
from services.common.models.experts import RouterWatch
from services.common.models.families import RoutingShape, routing_shape
from services.common.models.loading import build_model, stored_tensors
from services.extras.external_engine.request_segments import (
    RequestProgress,
    TokenChunk,
    convert_experts,
)
from services.rollout.engines.torch.engine import TorchEngine
from services.rollout.rewards.base import Score
from services.rollout.sampling.progress_cache import (
    MemberProgress,
    decode_progress,
    encode_progress,
)
from services.rollout.sampling.sample import Sample, sample_fields
from services.rollout.workflows.turns import (
    NOTHING_SAMPLED,
    Turn,
    observed,
    routed_experts,
    sampling_mask,
)
from tests.helpers.engines import make_model, request, running, until
from tests.helpers.mixtures import tiny_config

TOP = np.array([[[4, -0.5], [9, -1.5], [-1, -1.8]]], np.float32)
"""Two most likely tokens in place of one token, and all others."""
_CONTEXTS = [(5, 6, 7), (5, 6, 7), (8,), (9, 3, 4, 5, 6)]


def _model(seed: int = 0) -> PreTrainedModel:
    config = tiny_config("glm4_moe", vocab_size=24, num_hidden_layers=3)
    return build_model(config, dtype=torch.float32, device="cpu", seed=seed)


def _engine() -> TorchEngine:
    return TorchEngine(_model(), max_running=4, returns_experts=True)


def _chosen(tokens: tuple[int, ...], *, seed: int = 0) -> np.ndarray:
    """Returns the experts that a plain forward pass chooses for all tokens except the last."""
    model = _model(seed)
    watch = RouterWatch(model)
    with torch.no_grad():
        model(torch.tensor([tokens[:-1]]))
    return np.sort(watch.chosen().numpy(), 2)


async def test_experts_of_context_and_response_are_those_of_a_plain_forward_pass() -> None:
    async with running(engine := _engine()):
        results = await asyncio.gather(
            *[engine.generate(request(str(i), c, seed=i)) for i, c in enumerate(_CONTEXTS)]
        )
    for context, result in zip(_CONTEXTS, results, strict=True):
        experts = result.routed_experts
        assert experts.dtype == np.uint8
        assert experts.shape == (len(context) + len(result.token_ids) - 1, 2, 3)
        assert np.array_equal(np.sort(experts, 2), _chosen(context + result.token_ids))


async def test_a_response_across_an_update_keeps_its_earlier_experts() -> None:
    async with running(engine := _engine()):
        task = asyncio.ensure_future(engine.generate(request("cut", (5, 6, 7), max_tokens=40)))
        await until(lambda: engine.stats().tokens_total >= 6)
        await engine.adopt_weights(1, stored_tensors(_model(1)))
        mixed = await task
        # Another rollout continues from an interrupted turn with the known experts of its tokens.
        before = NOTHING_SAMPLED.continued(mixed)
        context = (5, 6, 7, *mixed.token_ids)
        next_request = request(
            "rest", context, max_tokens=5, experts_from=len(before.routed_experts)
        )
        turn = before.continued(await engine.generate(next_request))
    (_, old), (_, new) = mixed.version_runs
    tokens = (5, 6, 7, *turn.token_ids)
    experts = np.sort(routed_experts([turn]), 2)
    assert len(experts) == len(tokens) - 1
    assert np.array_equal(experts[: 2 + old], _chosen(tokens)[: 2 + old])
    assert np.array_equal(experts[2 + old :], _chosen(tokens, seed=1)[2 + old :])
    assert new > 5


def test_a_dense_model_reports_no_experts() -> None:
    with pytest.raises(ValueError, match="routing_replay"):
        TorchEngine(make_model(0), max_running=1, returns_experts=True)


def test_layers_without_experts_do_not_count_and_many_experts_take_two_bytes() -> None:
    shape = {"num_hidden_layers": 6, "num_experts_per_tok": 8}
    qwen = {"model_type": "qwen3_moe", "num_experts": 128, **shape}
    assert routing_shape(qwen | {"mlp_only_layers": [2], "decoder_sparse_step": 2}) == RoutingShape(
        layers=(1, 3, 5), num_chosen=8, num_experts=128
    )
    deepseek = {"model_type": "deepseek_v3", "n_routed_experts": 256, **shape}
    routing = routing_shape(deepseek | {"first_k_dense_replace": 3})
    assert routing is not None
    assert (routing.layers, routing.dtype, routing.missing) == ((3, 4, 5), "int16", 32767)
    assert routing_shape({"model_type": "llama"}) is None


def _turn(tokens: tuple[int, ...], experts: np.ndarray | None) -> Turn:
    return Turn(
        token_ids=tokens,
        logprobs=(-1.0,) * len(tokens),
        version_runs=((0, len(tokens)),),
        finish_reason="stop",
        routed_experts=experts,
    )


def test_unfinished_samples_keep_their_experts_and_masks() -> None:
    experts = np.arange(5 * 2 * 3, dtype=np.uint8).reshape(5, 2, 3)
    turns = (
        _turn((1, 2), experts[:3]),
        observed((3, 4)),
        replace(_turn((5,), None), sampling_mask=np.array([~5, 7], np.int32)),
        replace(
            _turn((6,), experts[3:]),
            sampling_mask=np.array([~2, 6, 9], np.int32),
            top_logprobs=TOP,
        ),
    )
    back = decode_progress(encode_progress(MemberProgress(num_failed_scores=0, turns=turns)))
    assert back.turns == turns
    for restored, other in zip(back.turns, turns, strict=True):
        assert np.array_equal(restored.routed_experts, other.routed_experts) or (
            restored.routed_experts is other.routed_experts is None
        )
    assert sampling_mask(back.turns).tolist() == [*[ALL_TOKENS] * 4, ~5, 7, ~2, 6, 9]
    assert [turn.top_logprobs is None for turn in back.turns] == [True] * (len(turns) - 1) + [False]
    assert np.array_equal(back.turns[-1].top_logprobs, TOP)


def test_a_sample_has_an_entry_for_each_token_but_the_last() -> None:
    shape = RoutingShape(layers=(0, 2), num_chosen=3, num_experts=8)
    experts = np.ones((4, 2, 3), np.uint8)
    turns = (_turn((1, 2), experts), observed((3, 4)))
    sample = Sample(
        member=0,
        prompt_ids=(7, 8, 9),
        turns=turns,
        score=Score(1.0),
        finish_reason="stop",
        is_greedy=False,
    )
    (experts,) = sample_fields([sample], shape)["routed_experts"]
    assert experts.shape == (6, 2, 3)
    assert (experts[:4] == 1).all()
    assert (experts[4:] == 255).all()


def test_samples_have_the_most_likely_tokens_of_each_sampled_token() -> None:
    turns = (observed((3, 4)), replace(_turn((6,), None), top_logprobs=TOP), _turn((), None))
    sample = Sample(
        member=0,
        prompt_ids=(7,),
        turns=turns,
        score=Score(1.0),
        finish_reason="stop",
        is_greedy=False,
    )
    assert SAMPLER_TOP_K not in sample_fields([sample])
    (table,) = sample_fields([sample], num_top=3)[SAMPLER_TOP_K]
    assert table[:2].tolist() == torch.zeros(2, 4, 2).tolist()
    # The vocabulary has two tokens, so that the third place is empty.
    expected = torch.tensor([[4, -0.5], [9, -1.5], [-1, -1e30], [-1, -1.8]])
    assert torch.equal(table[2], expected)


def test_experts_of_a_request_in_parts_are_taken_once() -> None:
    progress = RequestProgress(request("r", (1, 2, 3), experts_from=1), None)
    rows = np.arange(7 * 2 * 3, dtype=np.int16).reshape(7, 2, 3)
    assert progress.next_segment("0").experts_from == 1
    progress.extend(TokenChunk(token_ids=(4,), logprobs=(-1.0,), routed_experts=rows[1:3]), 0)
    # The experts of the last token before an abort are unknown until the next segment reports them.
    progress.extend(TokenChunk(token_ids=(5,), logprobs=(-1.0,)), 0)
    assert np.array_equal(progress.result("aborted").routed_experts, rows[1:3])
    assert progress.next_segment("1").experts_from == 3
    last = TokenChunk(
        token_ids=(6,), logprobs=(-1.0,), finish_reason="stop", routed_experts=rows[3:7]
    )
    progress.extend(last, 1)
    assert np.array_equal(progress.result("stop").routed_experts, rows[1:5])


def test_layers_without_experts_are_left_out() -> None:
    shape = RoutingShape(layers=(1, 2), num_chosen=3, num_experts=8)
    experts = np.arange(2 * 3 * 3, dtype=np.int32).reshape(2, 3, 3)
    assert np.array_equal(convert_experts(experts, shape), experts[:, 1:])
    assert convert_experts(experts[:, 1:], shape).dtype == np.uint8
