"""Tests that dynamic sampling replaces exactly the groups whose tokens have no advantages."""

import json
from typing import Any

import pytest
import torch

from services.common.callables import bind_callable
from services.common.runspec.algorithm import AlgorithmSpec
from services.common.runspec.formulas import ADVANTAGES
from services.common.runspec.loader import SpecError
from services.controller.run.dispatch.sample_index import GroupSamples, unfit_reason
from services.trainer.algorithm.advantages import overlong_penalty
from services.trainer.algorithm.estimators import ScoredBatch
from services.trainer.batch.segments import Segments
from services.wire.batch import KVBatchMeta
from tests.helpers.specs import spec_with

LIMIT = 8
REWARDS = [
    (1.0, 1.0, 1.0, 1.0),
    (0.35, 0.35, 0.35, 0.35),
    (1.0, 1.0, 0.0, 0.0),
    (0.0, 0.0, 1.0, 0.0),
    (-1.0, 1.0, -1.0, 1.0),
    (0.1 + 0.2, 0.3, 0.3, 0.3),
    (1000.0, 1000.0001, 1000.0, 1000.0),
    (0.5,),
    (0.0,),
]
TERMS = [({"right": 1.0, "style": 0.0}, {"right": 0.0, "style": 1.0})[i % 2] for i in range(4)]
DECIDED = [name for name, kind in ADVANTAGES.items() if kind.idle_groups]


def spec_of(advantage: str, **more: Any) -> AlgorithmSpec:
    if advantage == "gdpo":
        more["advantage_arguments"] = {"weights": {"right": 1.0, "style": 0.3}}
    return AlgorithmSpec(dynamic_sampling=True, advantage=advantage, **more)


def samples_of(rewards: tuple[float, ...], lengths: list[int], **tags: Any) -> GroupSamples:
    count = len(rewards)
    tags = {
        "reward": rewards,
        "terms": tuple(json.dumps(TERMS[i]) for i in range(count)),
        "finish_reason": ("stop",) * count,
        "greedy": (0,) * count,
        "response_tokens": tuple(lengths),
        **tags,
    }
    keys = tuple(f"g.{i}" for i in range(count))
    return GroupSamples(KVBatchMeta(partition_id="p", keys=keys, tags=tags), range(count))


def has_advantages(
    spec: AlgorithmSpec, rewards: tuple[float, ...], lengths: list[int], trains: list[bool]
) -> bool:
    """Returns True if the estimator gives a token that trains an advantage."""
    segments = Segments.from_lengths(torch.tensor(lengths))
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    scores = torch.tensor(rewards, dtype=torch.float32).double()
    if spec.overlong.buffer_tokens:
        scores = scores + overlong_penalty(
            torch.tensor(lengths),
            max_tokens=LIMIT,
            buffer_tokens=spec.overlong.buffer_tokens,
            factor=spec.overlong.penalty,
        )
    batch = ScoredBatch(
        scores=scores,
        groups=torch.zeros(len(rewards), dtype=torch.int64),
        lengths=torch.tensor(lengths).double(),
        greedy_scores=torch.zeros(1, dtype=torch.float64),
        prompts=torch.zeros(len(rewards), dtype=torch.int64),
        terms={
            name: torch.tensor([term[name] for term in TERMS[: len(rewards)]], dtype=torch.float64)
            for name in ("right", "style")
        },
        places=torch.arange(len(rewards)),
        segments=segments,
        rewards=torch.zeros(len(mask), dtype=torch.float64),
        mask=mask,
        trained=mask,
        values=None,
        sum_over_ranks=lambda value: value,
    )
    function = bind_callable(
        spec.advantage_kind.function, spec.arguments_of_advantage, key="algorithm.advantage"
    )
    advantages = function(batch)
    assert isinstance(advantages, torch.Tensor)
    return bool((advantages[segments.expand(torch.tensor(trains))] != 0).any())


@pytest.mark.parametrize("rewards", REWARDS)
@pytest.mark.parametrize("advantage", DECIDED)
def test_a_group_is_replaced_if_and_only_if_its_estimator_gives_no_advantage(
    advantage: str, rewards: tuple[float, ...]
) -> None:
    spec, lengths = spec_of(advantage, min_group_size=1), [3, 5, 2, 4][: len(rewards)]
    reason = unfit_reason(samples_of(rewards, lengths), spec, may_refill=True)
    assert (reason is None) == has_advantages(spec, rewards, lengths, [True] * len(rewards))


@pytest.mark.parametrize("lengths", [[3, 5, 2, 4], [8, 8, 8, 8], [8, 2, 8, 7]])
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("advantage", [name for name in DECIDED if name != "gdpo"])
def test_penalties_and_masks_of_long_responses_count(
    advantage: str, lengths: list[int], masks: bool
) -> None:
    spec = spec_of(advantage, overlong={"buffer_tokens": 3, "mask_truncated": masks})
    rewards = (1.0, 1.0, 1.0, 1.0)
    ends = tuple("length" if length == LIMIT else "stop" for length in lengths)
    samples = samples_of(rewards, lengths, finish_reason=ends)
    reason = unfit_reason(samples, spec, may_refill=True, max_response_tokens=LIMIT)
    trains = [not masks or end == "stop" for end in ends]
    assert (reason is None) == has_advantages(spec, rewards, lengths, trains)


def test_a_penalty_that_equals_a_difference_of_rewards_counts_as_in_the_trainer() -> None:
    spec = spec_of("pass_at_k", overlong={"buffer_tokens": 3, "penalty": 1.0})
    rewards, lengths = (2 / 3, 1 / 3), [6, 3]
    samples = samples_of(rewards, lengths)
    reason = unfit_reason(samples, spec, may_refill=True, max_response_tokens=LIMIT)
    assert (reason is None) == has_advantages(spec, rewards, lengths, [True, True])


def test_terms_decide_if_the_advantage_is_of_single_terms() -> None:
    spec = spec_of("gdpo")
    rewards, lengths = (1.0, 1.0, 1.0, 1.0), [1] * 4
    assert unfit_reason(samples_of(rewards, lengths), spec, may_refill=True) is None
    same = samples_of(rewards, lengths, terms=('{"right": 1.0, "style": 0.5}',) * 4)
    assert unfit_reason(same, spec, may_refill=True) == "equal_rewards"


@pytest.mark.parametrize(
    ("weights", "terms", "cancels"),
    [
        ((1.0, 1.0), [(1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (0.0, 1.0)], True),
        ((0.5, 0.5), [(0.0, 1.0), (0.5, 0.5), (1.0, 0.0)], True),
        ((1.0, -1.0), [(0.0, 0.0), (1.0, 1.0)], True),
        ((1.0, 0.9), [(1.0, 0.0), (0.0, 1.0)], False),
        ((1.0, 1.0), [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)], False),
        ((1.0, 0.0), [(1.0, 0.0), (1.0, 1.0)], True),
    ],
)
def test_terms_whose_advantages_cancel_train_nothing(
    monkeypatch: pytest.MonkeyPatch,
    weights: tuple[float, float],
    terms: list[tuple[float, float]],
    cancels: bool,
) -> None:
    named = [{"right": right, "style": style} for right, style in terms]
    monkeypatch.setitem(globals(), "TERMS", named)
    rewards, lengths = (1.0,) * len(terms), [1] * len(terms)
    arguments = {"weights": {"right": weights[0], "style": weights[1]}}
    spec = AlgorithmSpec(dynamic_sampling=True, advantage="gdpo", advantage_arguments=arguments)
    reason = unfit_reason(samples_of(rewards, lengths), spec, may_refill=True)
    assert (reason is None) == (not cancels)
    assert has_advantages(spec, rewards, lengths, [True] * len(terms)) == (not cancels)


@pytest.mark.parametrize("advantage", [name for name in ADVANTAGES if name not in DECIDED])
def test_dynamic_sampling_is_refused_if_groups_do_not_decide(advantage: str) -> None:
    algorithm = {"dynamic_sampling": True, "advantage": advantage}
    with pytest.raises(SpecError, match=r"algorithm\.dynamic_sampling .*algorithm\.advantage"):
        spec_with(algorithm=algorithm)
    equal = samples_of((1.0, 1.0), [1, 1])
    spec = AlgorithmSpec.model_validate(algorithm)
    assert unfit_reason(equal, spec, may_refill=True) is None


def test_dynamic_sampling_is_refused_with_a_divergence_in_the_rewards() -> None:
    kl = {"coefficient": 0.1, "placement": "reward"}
    with pytest.raises(SpecError, match=r"algorithm\.dynamic_sampling .*placement"):
        spec_with(algorithm={"dynamic_sampling": True, "kl": kl})
