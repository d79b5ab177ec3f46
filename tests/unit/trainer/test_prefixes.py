"""Tests that shared prefixes are computed once and do not change training."""

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from services.trainer.batch.packing import PackedTokens, pack
from services.trainer.batch.prefixes import find_prefixes, sharing_keys
from services.trainer.batch.samples import BatchFacts
from services.trainer.batch.step_plan import micro_batches, shard_of
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged
from tests.helpers.batches import CPU
from tests.helpers.mixtures import mixture_shape
from tests.helpers.tries import random_trie

_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 3.0, "head_dim": 12},
    "qwen3_5_text": {**mixture_shape("qwen3_5_text"), "head_dim": 12, "partial_rotary_factor": 0.5},
}


def _policy(family: str, seed: int) -> Policy:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **_SHAPE, **_MODELS[family])
    return Policy(AutoModelForCausalLM.from_config(config, dtype=torch.float32), temperature=0.7)


def _results(policy: Policy, packed: PackedTokens, factors: Tensor) -> list[Tensor]:
    """Returns logprobs, entropies, and the gradient of their weighted sum."""
    logprobs, entropy = policy(packed)
    total = (logprobs * factors[0] + entropy * factors[1]).sum()
    gradients = torch.autograd.grad(total, list(policy.parameters()))
    return [logprobs, entropy, torch.cat([gradient.flatten() for gradient in gradients])]


@pytest.mark.parametrize(
    ("family", "num_tries"),
    [
        *((family, 25 if family == "qwen2" else 6) for family in _MODELS),
        pytest.param("qwen2", 200, marks=pytest.mark.nightly),
    ],
)
def test_shared_prefixes_change_neither_logprobs_nor_gradients(family: str, num_tries: int) -> None:
    policy, saved = _policy(family, seed=0), 0
    for seed in range(num_tries):
        prompts, responses = random_trie(random.Random(seed), vocabulary=97)
        plain = pack(prompts, responses, device=CPU)
        shared = pack(prompts, responses, device=CPU, shares_prefixes=True)
        saved += plain.work.tokens - shared.work.tokens
        assert shared.work.sequence_tokens == plain.work.tokens
        if not len(plain.targets):
            continue
        factors = torch.randn(2, len(responses.values))
        for actual, expected in zip(
            _results(policy, shared, factors), _results(policy, plain, factors), strict=True
        ):
            assert (actual - expected).norm() <= 1e-6 * expected.norm()
    assert saved > 100


def test_each_token_of_a_trie_is_computed_once() -> None:
    for seed in range(25):
        prompts, responses = random_trie(random.Random(seed), vocabulary=97)
        packed = pack(prompts, responses, device=CPU, shares_prefixes=True)
        sequences = [
            tuple(row.tolist()[:-1])
            for row, answer in zip(
                sharing_keys(prompts.unbind(), responses.unbind()), responses.unbind(), strict=True
            )
            if len(answer)
        ]
        distinct = {row[:end] for row in sequences for end in range(1, len(row) + 1)}
        total = sum(map(len, sequences))
        if total - len(distinct) > total / 50:
            assert packed.work.tokens == len(packed.input_ids) == len(distinct)


def test_members_of_a_group_stay_in_one_micro_batch() -> None:
    def rows(prompt: int, count: int) -> list[Any]:
        answers = [torch.tensor([index + 1] * 30) for index in range(count)]
        return sharing_keys([torch.full((100,), prompt)] * count, answers)

    both = micro_batches([*rows(7, 4), *rows(8, 4)], 300, shares=True)
    assert sorted(both) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # A group over the budget is split into parts of similar size, each of which repeats the prompt.
    sizes = [len(micro) for micro in micro_batches(rows(7, 12), 400, shares=True)]
    assert sizes == [6, 6]
    assert len(micro_batches(rows(7, 12), 400, shares=False)) == 4


@pytest.mark.parametrize("shares", [True, False])
def test_groups_that_are_compared_are_never_divided(shares: bool) -> None:
    # Two pairs answer the same prompt, and a third pair is larger than the budget of a micro-batch.
    rows = sharing_keys(
        [torch.full((50,), 7)] * 6, [torch.full((30,), n) for n in (1, 2, 3, 4, 5, 6)]
    )
    rows[4:] = sharing_keys([torch.full((300,), 8)] * 2, [torch.full((30,), n) for n in (1, 2)])
    batches = micro_batches(rows, 170, shares=shares, groups=[4, 9, 9, 4, 1, 1])
    assert sorted(batches) == [[0, 3], [1, 2], [4, 5]]
    facts = _facts([(20, [100] * 2)])
    shared = [
        shard_of(
            facts, num_updates=1, rank=rank, num_ranks=2, shares_prefixes=shares, keeps_groups=True
        ).rows
        for rank in range(2)
    ]
    assert sorted(shared) == [(), (0, 1)]


def test_micro_batches_hold_no_more_than_their_budget() -> None:
    for seed in range(25):
        rng = random.Random(seed)
        sequences = sharing_keys(*(columns.unbind() for columns in random_trie(rng, vocabulary=97)))
        budget = rng.randint(8, 60)
        batches = micro_batches(sequences, budget, shares=True)
        assert sorted(index for micro in batches for index in micro) == [*range(len(sequences))]
        for micro in batches:
            rows = [sequences[index] for index in micro]
            tokens = sum(map(len, rows)) - sum(find_prefixes(rows).shared)
            assert tokens <= budget or len(micro) == 1


def _facts(groups: list[tuple[int, list[int]]]) -> BatchFacts:
    """Returns the facts of groups with the given lengths of prompt and responses."""
    owners = [number for number, (_, answers) in enumerate(groups) for _ in answers]
    no = torch.zeros(len(owners), dtype=torch.bool)
    prompts = [prompt for prompt, answers in groups for _ in answers]
    answers = [length for _, lengths in groups for length in lengths]
    return BatchFacts(
        groups=torch.tensor(owners),
        lengths=tuple(map(sum, zip(prompts, answers, strict=True))),
        prompt_lengths=tuple(prompts),
        is_truncated=no,
        is_member=~no,
        is_greedy=no,
        is_failed=no,
    )


def _shares(facts: BatchFacts, num_ranks: int) -> list[tuple[int, ...]]:
    return [
        shard_of(facts, num_updates=1, rank=rank, num_ranks=num_ranks, shares_prefixes=True).rows
        for rank in range(num_ranks)
    ]


def test_ranks_get_whole_groups_of_like_work() -> None:
    # Without shared prefixes, the first and the last group would have by far the most tokens.
    groups = [(500, [10] * 4), (10, [260] * 4), (500, [5] * 4)]
    assert _shares(_facts(groups), 2) == [(4, 5, 6, 7), (0, 1, 2, 3, 8, 9, 10, 11)]


def test_a_group_is_divided_where_ranks_would_have_nothing_to_do() -> None:
    shares = _shares(_facts([(20, [100] * 8)]), 4)
    assert [len(share) for share in shares] == [2, 2, 2, 2]
    assert sorted(index for share in shares for index in share) == [*range(8)]


def test_prefixes_are_those_of_neighbours() -> None:
    rows = [[5, 1], [2], [2, 300, 7], [2, 300], [2, 299, 7], [2, 300]]
    prefixes = find_prefixes(
        sharing_keys([torch.tensor(row) for row in rows], [torch.zeros(0)] * 6)
    )
    in_order = [rows[index] for index in prefixes.order]
    assert in_order == sorted(rows)
    assert prefixes.shared == (0, 1, 1, 2, 2, 0)
    assert all(before <= after for before, after in pairwise(in_order))


def test_nothing_shared_is_packed_as_it_comes() -> None:
    prompts = Jagged.from_list([torch.tensor([9, 8]), torch.tensor([3, 4, 5])])
    responses = Jagged.from_list([torch.tensor([1]), torch.tensor([2, 6])])
    packed = pack(prompts, responses, device=CPU, shares_prefixes=True)
    assert packed.input_ids.tolist() == [9, 8, 3, 4, 5, 2]
    assert packed.layout.paths is None
    assert packed.predictions is None
