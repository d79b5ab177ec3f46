"""Tokens leave vLLM's engine process in batches, each with its logprob and the weights that sampled it."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here")

import numpy as np
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from services.extras.vllm.adapter import captured_sizes
from services.extras.vllm.scheduler import SpeculationMeter, TokenBatcher


def sampled(name: str, token: int, *, reason: FinishReason | None = None) -> EngineCoreOutput:
    """Returns vLLM's output for one token with its logprob."""
    logprobs = LogprobsLists(
        np.array([[token]]), np.array([[-token / 8]], dtype=np.float32), np.zeros(1)
    )
    return EngineCoreOutput(name, [token], new_logprobs=logprobs, finish_reason=reason)


def test_tokens_travel_together_and_nothing_is_lost_at_the_end() -> None:
    gatherer = TokenBatcher(3)
    sent = []
    for token in range(1, 9):
        step = [sampled("a", token)]
        if token < 5:
            reason = FinishReason.STOP if token == 4 else None
            step.append(sampled("b", 10 * token, reason=reason))
        sent += gatherer.passed(step)
    sent += gatherer.passed([sampled("a", 9, reason=FinishReason.LENGTH)])
    sent_tokens = [
        (output.request_id, output.new_token_ids, output.finish_reason) for output in sent
    ]
    assert sent_tokens == [
        ("a", [1, 2, 3], None),
        ("b", [10, 20, 30], None),
        ("b", [40], FinishReason.STOP),
        ("a", [4, 5, 6], None),
        ("a", [7, 8, 9], FinishReason.LENGTH),
    ]
    for output in sent:
        assert output.new_logprobs.logprobs.tolist() == [
            -token / 8 for token in output.new_token_ids
        ]


def test_every_token_has_the_era_that_sampled_it() -> None:
    gatherer = TokenBatcher(4)
    assert not gatherer.passed([sampled("a", 1), sampled("b", 1)])
    assert not gatherer.passed([sampled("a", 2)])
    gatherer.discard_tokens(["b"])
    gatherer.era += 1
    assert not gatherer.passed([sampled("a", 3), sampled("b", 7)])
    (output,) = gatherer.passed([sampled("a", 4)])
    assert output.new_token_ids == [1, 2, 3, 4]
    assert output.new_logprobs.logprob_token_ids.tolist() == [[0, 0], [1, 2]]
    (other,) = gatherer.passed([sampled("b", 8, reason=FinishReason.STOP)])
    assert other.new_token_ids == [7, 8]
    assert other.new_logprobs.logprob_token_ids.tolist() == [[1, 0]]


def test_what_holds_no_sampled_token_passes_at_once() -> None:
    scored = EngineCoreOutput("s", [5], finish_reason=FinishReason.LENGTH)
    assert TokenBatcher(8).passed([scored]) == [scored]


def test_only_proposals_that_occurred_before_are_counted() -> None:
    meter = SpeculationMeter(4)
    step: Any = SimpleNamespace(
        scheduled_spec_decode_tokens={"a": [-1] * 4, "b": [-1] * 4},
        num_scheduled_tokens={"a": 5, "b": 5},
        total_num_scheduled_tokens=10,
    )
    output: Any = SimpleNamespace(
        sampled_token_ids=[[1, 2, 3], [4]], req_id_to_index={"a": 0, "b": 1}
    )
    meter.record(step, output)
    totals = meter.totals
    assert (totals.num_drafts, totals.num_draft_tokens, totals.num_accepted_tokens) == (2, 8, 2)
    output.draft_totals = [1, 4, 2]
    meter.record(step, output)
    assert (totals.num_drafts, totals.num_draft_tokens, totals.num_accepted_tokens) == (1, 4, 2)


@pytest.mark.parametrize("max_running", [1, 3, 8, 64, 100, 256])
@pytest.mark.parametrize("per_request", [2, 5, 6])
def test_graphs_are_captured_for_all_steps_with_and_without_proposals(
    max_running: int, per_request: int
) -> None:
    sizes = captured_sizes(max_running, per_request)
    for count in range(1, max_running + 1):
        assert next(size for size in sizes if size >= count) <= max(max_running, per_request)
        if count * per_request <= sizes[-1]:
            assert next(s for s in sizes if s >= count * per_request) % per_request == 0
    assert sizes[-1] >= min(max_running * per_request, 1024)


def test_all_numbers_of_slots_capture_the_same_graphs() -> None:
    # vLLM compiles the model again if the list differs.
    sizes = {tuple(captured_sizes(slots)) for slots in (1, 64, 128, 640, 1024, 4096)}
    assert len(sizes) == 1
    assert max(sizes.pop()) == 2048
