"""Model inputs in packs: only equal prompts share them, and the model gets them in order."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from services.common.fields import MODEL_INPUTS
from services.trainer.batch.packing import PackedTokens, pack
from services.trainer.batch.samples import Samples
from services.trainer.batch.step_plan import cut
from services.trainer.model.policy import Policy
from services.trainer.transfers import fetch_model_inputs
from services.wire.batch import KVBatchMeta
from services.wire.data.jagged import Jagged
from services.wire.data.model_inputs import ModelInputs
from tests.helpers.batches import CPU, prompt_spans, queue_of
from tests.helpers.features import PLACEHOLDER, feature_model, features, plain_logprobs

NONE = ModelInputs.from_values(None)


def rows(*texts: Sequence[int]) -> Jagged:
    return Jagged.from_list([torch.tensor(text, dtype=torch.int64) for text in texts])


def packed(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    inputs: Sequence[ModelInputs],
    *,
    shares: bool = True,
    experts: Jagged | None = None,
) -> PackedTokens:
    return pack(
        rows(*prompts),
        rows(*responses),
        device=CPU,
        shares_prefixes=shares,
        inputs=prompt_spans(prompts, inputs),
        experts=experts,
    )


def test_equal_tokens_with_other_inputs_share_nothing() -> None:
    prompts, responses = [[5, PLACEHOLDER, 6, 7]] * 3, [[8, 9, 2], [8, 10, 2], [8, 11, 2]]
    first_image, other = features(1, 1), features(2, 1)
    packed_tokens = packed(prompts, responses, [first_image, other, first_image])
    assert packed_tokens.work.tokens == 7 + 6, (
        "two sequences share a prompt and a token, the third nothing"
    )
    assert [(span.start, span.end) for span in packed_tokens.inputs] == [(0, 7), (7, 13)]
    assert [span.inputs for span in packed_tokens.inputs] == [first_image, other]
    assert packed_tokens.input_ids[0] == packed_tokens.input_ids[7] == 5, (
        "the keys that compare are no token ids"
    )


def test_prompts_with_inputs_are_shared_as_a_whole_or_not_at_all() -> None:
    image = features(1, 1)
    prompts = [[5, 6, 7, 8, PLACEHOLDER, 9], [5, 6, 7, 8, PLACEHOLDER, 10]]
    assert packed(prompts, [[1, 2]] * 2, [NONE, NONE]).work.tokens < 14
    assert packed(prompts, [[1, 2]] * 2, [image, image]).work.tokens == 14


def test_other_experts_in_a_prompt_with_inputs_leave_nothing_shared() -> None:
    image = features(1, 1)
    prompts, responses = [[5, PLACEHOLDER, 6, 7]] * 2, [[8, 9, 10]] * 2
    experts = torch.zeros(2, 6, 1, 2, dtype=torch.uint8)
    experts[1, 3] = 1
    jagged_experts = Jagged(experts.flatten(0, 1), torch.tensor([6, 6]))
    assert packed(prompts, responses, [NONE] * 2, experts=jagged_experts).work.tokens < 12
    packed_tokens = packed(prompts, responses, [image] * 2, experts=jagged_experts)
    assert packed_tokens.work.tokens == 12
    assert len(packed_tokens.inputs) == 2


def test_micro_batches_keep_samples_with_equal_inputs_together() -> None:
    bundles = [features(index % 2, 1) for index in range(8)]
    prompts = [[5, PLACEHOLDER, *range(6, 20)]] * 8
    samples = samples_of(prompts, [[index + 1, 2] for index in range(8)], bundles)
    micros = cut(samples, range(8), max_tokens=16 + 4 * 2, shares=True)
    assert sorted(map(sorted, micros)) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    chosen = samples.select([3, 0])
    assert [span.inputs for ((span),) in chosen.inputs] == [bundles[1], bundles[0]]


@pytest.mark.parametrize("shares", [True, False])
def test_packed_logprobs_and_gradients_are_those_of_the_plain_model(shares: bool) -> None:
    rng = random.Random(5)
    prompts, responses, bundles = [], [], []
    for group in range(6):
        count = rng.randrange(3)
        prompt = [rng.randrange(4, 24) for _ in range(rng.randrange(2, 9))]
        for position in rng.sample(range(len(prompt)), min(count, len(prompt))):
            prompt[position] = PLACEHOLDER
        images = features(group, prompt.count(PLACEHOLDER)) if PLACEHOLDER in prompt else NONE
        for _ in range(3):
            prompts.append(prompt)
            responses.append([rng.randrange(4, 7) for _ in range(rng.randrange(1, 6))])
            bundles.append(images)
    order = rng.sample(range(len(prompts)), len(prompts))
    prompts, responses, bundles = (
        [every[i] for i in order] for every in (prompts, responses, bundles)
    )
    model = feature_model()
    rest = zip(prompts, responses, bundles, strict=True)
    expected = torch.cat([plain_logprobs(model, *row) for row in rest])
    expected.sum().backward()
    gradients = {name: value.grad.clone() for name, value in model.named_parameters()}  # type: ignore[union-attr]
    model.zero_grad()
    logprobs, _ = Policy(model, temperature=1.0)(packed(prompts, responses, bundles, shares=shares))
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    logprobs.sum().backward()
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.grad, gradients[name], atol=1e-4, rtol=1e-4)


def test_inputs_that_samples_share_are_fetched_once_and_are_one_object() -> None:
    first_image, other = features(1, 4), features(2, 4)
    bundles = [first_image, first_image, other, other, NONE, first_image]
    queue = queue_of(
        {
            "prompt_ids": rows(*[[1, 2]] * 6),
            MODEL_INPUTS: Jagged.from_list([bundle.encoded for bundle in bundles]),
        },
        {},
    )
    places = (0, 0, 7, 7, 9, 11)
    columns = [
        column if column.name != MODEL_INPUTS else replace(column, offsets=places)
        for column in queue.meta.fields
    ]
    meta = KVBatchMeta(
        partition_id="run/train",
        keys=queue.meta.keys,
        fields=tuple(columns),
        blobs=queue.meta.blobs,
    )
    reads = []

    def fetch(meta: KVBatchMeta, names: Sequence[str]) -> dict[str, Jagged]:
        reads.append((meta.keys, tuple(names)))
        return queue.fetch(meta, names)

    model_inputs = fetch_model_inputs(fetch, meta)
    (((keys), names),) = reads
    assert (sorted(keys), names) == (["g0", "g2", "g4", "g5"], (MODEL_INPUTS,))
    assert [bundle.prompt.digest for bundle in model_inputs] == [
        bundle.digest for bundle in bundles
    ]
    assert model_inputs[0].prompt is model_inputs[1].prompt is model_inputs[5].prompt, (
        "the last one is stored apart, and equal"
    )
    assert fetch_model_inputs(fetch, queue.without(MODEL_INPUTS).meta) == []


def samples_of(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    inputs: Sequence[ModelInputs],
) -> Samples:
    count = len(prompts)
    return Samples(
        rows=torch.arange(count),
        numbers=torch.zeros(count, dtype=torch.int64),
        prompts=rows(*prompts),
        responses=rows(*responses),
        rewards=torch.zeros(count),
        tokens={},
        inputs=prompt_spans(prompts, inputs),
    )
