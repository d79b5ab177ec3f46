"""Tests that packed logprobs and gradients of models with images equal those of transformers' models."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from services.common.fields import PROMPT_VERSION, TOOL_VERSION
from services.common.models.loading import as_stored, load_model
from services.common.models.tokenizer import load_tokenizer
from services.common.models.weight_files import stored_names
from services.extras.export.checkpoint import export_checkpoint
from services.trainer.batch.packing import pack
from services.trainer.batch.samples import SampleInputs, sequences_of
from services.trainer.model.policy import Policy, freeze_tower, trainable
from services.wire.data.jagged import Jagged
from services.wire.data.model_inputs import ModelInputs, decode_bundles, encode_bundles
from tests.helpers.batches import CPU, policy_of, prompt_spans, random_queue, rank_of, spec_of
from tests.helpers.vision import KINDS, model_spec, plain_logprobs, random_prompt, saved_model


@dataclass(frozen=True)
class Conversation:
    """Prompt and response, both with images."""

    prompt: list[int]
    response: list[int]
    inputs: ModelInputs
    """Images of the prompt."""
    turns: dict[int, ModelInputs]
    """Images of observations by the place of their first token."""
    runs: tuple[tuple[int, int], ...] = ()
    """Versions of the response's tokens, and the number of tokens of each."""

    def logprobs(self, whole: Any) -> torch.Tensor:
        everything = ModelInputs.concat([self.inputs, *self.turns.values()])
        return plain_logprobs(whole, self.prompt, self.response, everything)


@pytest.fixture(params=KINDS)
def loaded(request: Any, tmp_path: Path) -> tuple[Any, Any, set[str]]:
    """Returns transformers' model of a checkpoint, Slipstream's model of it, and the tensor names."""
    whole = saved_model(request.param, tmp_path)
    spec = model_spec(tmp_path)
    model = load_model(spec, load_tokenizer(spec), dtype=torch.float32, device="cpu")
    return whole, model, stored_names(tmp_path)


@pytest.mark.parametrize("num_packs", [2, pytest.param(200, marks=pytest.mark.nightly)])
@pytest.mark.timeout(3600)
def test_packed_logprobs_and_gradients_are_those_of_the_whole_model(
    loaded: tuple[Any, Any, set[str]], num_packs: int
) -> None:
    whole, model, _ = loaded
    policy, worst = Policy(model, temperature=1.0), [0.0, 0.0]
    for seed in range(num_packs):
        rows = random_rows(random.Random(seed))
        expected = torch.cat([plain_logprobs(whole, *row) for row in rows])
        packed = pack(
            Jagged.from_list([torch.tensor(prompt) for prompt, _, _ in rows]),
            Jagged.from_list([torch.tensor(response) for _, response, _ in rows]),
            device=CPU,
            shares_prefixes=seed % 2 == 1,
            inputs=prompt_spans(
                [prompt for prompt, _, _ in rows], [images for _, _, images in rows]
            ),
        )
        differences = errors(loaded, policy(packed)[0], expected, seed=seed)
        worst = list(map(max, worst, differences))
        assert max(differences) <= 1e-5, f"seed {seed}"
    print(f"logprobs {worst[0]:.1e}, gradients {worst[1]:.1e} over {num_packs} packs")


def errors(
    loaded: tuple[Any, Any, set[str]], logprobs: torch.Tensor, expected: torch.Tensor, *, seed: int
) -> tuple[float, float]:
    """Returns the max logprob difference, and the relative error of the gradients of a random weighting."""
    whole, model, names = loaded
    factors = torch.randn(len(expected), generator=torch.Generator().manual_seed(seed))
    expected_gradients = gradients(whole, expected @ factors)
    tensors = as_stored(
        gradients(model, logprobs @ factors), model.config.to_dict(), expected_names=names
    )
    actual = {_plain(name): gradient for name, gradient in tensors.items()}
    assert actual.keys() == {_plain(name) for name in expected_gradients}
    norms = [
        (actual[_plain(name)] - gradient).norm() for name, gradient in expected_gradients.items()
    ]
    size = torch.stack([gradient.norm() for gradient in expected_gradients.values()]).norm()
    difference = float((logprobs - expected).detach().abs().max())
    return difference, float(torch.stack(norms).norm() / size)


def random_rows(rng: random.Random) -> list[tuple[list[int], list[int], ModelInputs]]:
    """Returns groups of prompts with 0, 1 or 2 images, in random order."""
    rows = []
    for _ in range(5):
        prompt, images = random_prompt(rng, rng.randrange(3))
        for _ in range(rng.randrange(1, 4)):
            # Responses may contain placeholder ids, which are ordinary tokens there.
            response = [rng.randrange(3, 64) for _ in range(rng.randrange(1, 8))]
            rows.append((prompt, response, images))
    rng.shuffle(rows)
    return rows


def random_conversation(
    rng: random.Random, prompt: tuple[list[int], ModelInputs], *, shared_seed: int | None = None
) -> Conversation:
    """Returns a conversation in which the policy answers observations with and without images.

    Args:
        shared_seed: Conversations with the same seed share a prefix: the policy has few possible answers,
            and an observation is a function of the response before it.
    """
    tokens, images = prompt
    response, turn_images, runs = list[int](), dict[int, ModelInputs](), list[tuple[int, int]]()
    num_images = len(images.tensors.get("image_places", ()))
    for _ in range(rng.randrange(1, 4)):
        if shared_seed is None:
            sampled_ids, world = [rng.randrange(3, 64) for _ in range(rng.randrange(1, 6))], rng
        else:
            sampled_ids = [7, *[rng.randrange(3, 5)] * rng.randrange(1, 3)]
            world = random.Random(f"{shared_seed} {response} {sampled_ids}")
        num_tokens = len(tokens) + len(response) + len(sampled_ids)
        observed_ids, inputs = random_prompt(
            world, world.randrange(3), num_tokens=num_tokens, num_earlier=num_images
        )
        num_images += len(inputs.tensors.get("image_places", ()))
        # The text after the images may differ between conversations.
        observed_ids.append(rng.randrange(3, 59 if shared_seed is None else 5))
        response += [*sampled_ids, *observed_ids]
        runs += [(0, len(sampled_ids)), (TOOL_VERSION, len(observed_ids))]
        turn_images[num_tokens] = inputs
    return Conversation(tokens, [*response, 5, 6], images, turn_images, (*runs, (0, 2)))


@pytest.mark.parametrize("num_packs", [2, pytest.param(200, marks=pytest.mark.nightly)])
@pytest.mark.timeout(3600)
def test_images_of_observations_are_computed_as_by_the_whole_model(
    loaded: tuple[Any, Any, set[str]], num_packs: int
) -> None:
    """The samples include further conversations, which begin within the response."""
    whole, model, _ = loaded
    policy, worst = Policy(model, temperature=1.0), [0.0, 0.0]
    for seed in range(num_packs):
        rng, groups = random.Random(seed), []
        for _ in range(3):
            prompt = random_prompt(rng, rng.randrange(3))
            groups += [random_conversation(rng, prompt) for _ in range(rng.randrange(1, 4))]
        further = [random_conversation(rng, random_prompt(rng, rng.randrange(3))) for _ in groups]
        fields, images = stored(list(zip(groups, further, strict=True)))
        sequences = sequences_of(fields)
        packed = pack(
            sequences.prompts,
            sequences.responses,
            device=CPU,
            shares_prefixes=seed % 2 == 1,
            inputs=sequences.inputs_of(images),
        )
        pairs = zip(groups, further, strict=True)
        expected = torch.cat(
            [conversation.logprobs(whole) for pair in pairs for conversation in pair]
        )
        found_errors = errors(loaded, policy(packed)[0], expected, seed=seed)
        worst = list(map(max, worst, found_errors))
        assert max(found_errors) <= 1e-5, f"seed {seed}"
    print(f"logprobs {worst[0]:.1e}, gradients {worst[1]:.1e} over {num_packs} packs")


@pytest.mark.parametrize("num_packs", [2, pytest.param(200, marks=pytest.mark.nightly)])
@pytest.mark.timeout(3600)
def test_conversations_share_what_they_have_in_common_with_its_images(
    loaded: tuple[Any, Any, set[str]], num_packs: int
) -> None:
    whole, model, _ = loaded
    policy, worst, computed, plain = Policy(model, temperature=1.0), [0.0, 0.0], 0, 0
    for seed in range(num_packs):
        rng, groups = random.Random(seed), []
        for group in range(3):
            prompt = random_prompt(rng, rng.randrange(3))
            shared = 1000 * seed + group
            groups += [random_conversation(rng, prompt, shared_seed=shared) for _ in range(6)]
        rng.shuffle(groups)
        pairs = list(zip(groups, [*groups[1:], groups[0]], strict=True))
        fields, images = stored(pairs)
        sequences = sequences_of(fields)
        inputs = sequences.inputs_of(images)
        packed = pack(
            sequences.prompts, sequences.responses, device=CPU, shares_prefixes=True, inputs=inputs
        )
        plain += sum(len(spans) for spans in inputs)
        computed += len(packed.inputs)
        expected = torch.cat(
            [conversation.logprobs(whole) for pair in pairs for conversation in pair]
        )
        found_errors = errors(loaded, policy(packed)[0], expected, seed=seed)
        worst = list(map(max, worst, found_errors))
        assert max(found_errors) <= 1e-5, f"seed {seed}"
    assert computed < plain / 2
    print(f"logprobs {worst[0]:.1e}, gradients {worst[1]:.1e} over {num_packs} packs")


def test_the_tower_computes_each_distinct_image_once(
    loaded: tuple[Any, Any, set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequences share no tokens, and the images have different positions in each."""
    whole, model, _ = loaded
    policy, grids = Policy(model, temperature=1.0), []
    tower = model.model.visual
    forward = tower.forward
    monkeypatch.setattr(
        tower, "forward", lambda *a, **k: grids.append(k["grid_thw"]) or forward(*a, **k)
    )
    rows = []
    for before in ([], [5], [6, 7]):
        tokens, images = random_prompt(random.Random(4), 2)
        places = images.tensors["image_places"] + torch.tensor([0, len(before)])
        moved = ModelInputs.from_values({**images.tensors, "image_places": places})
        rows.append(([*before, *tokens, 8], [9, 10], moved))
    packed = pack(
        Jagged.from_list([torch.tensor(prompt) for prompt, _, _ in rows]),
        Jagged.from_list([torch.tensor(response) for _, response, _ in rows]),
        device=CPU,
        shares_prefixes=True,
        inputs=prompt_spans([prompt for prompt, _, _ in rows], [item for _, _, item in rows]),
    )
    logprobs = policy(packed)[0]
    assert [len(item) for item in grids] == [2]
    expected = torch.cat([plain_logprobs(whole, *row) for row in rows])
    assert max(errors(loaded, logprobs, expected, seed=0)) <= 1e-5


def stored(
    samples: list[tuple[Conversation, Conversation]],
) -> tuple[dict[str, Jagged], list[SampleInputs]]:
    """Returns fields and model inputs of samples with two conversations, as the trainer fetches them."""
    responses, runs, inputs = [], [], []
    for first, second in samples:
        start = len(first.prompt) + len(first.response)
        responses.append([*first.response, *second.prompt, *second.response])
        runs.append(
            [
                *first.runs,
                (PROMPT_VERSION, len(second.prompt)),
                *second.runs,
            ]
        )
        turns = {**first.turns, start: second.inputs}
        turns |= {start + position: turn for position, turn in second.turns.items()}
        inputs.append(SampleInputs(first.inputs, decode_bundles(encode_bundles(turns))))
    fields = {
        "prompt_ids": Jagged.from_list([torch.tensor(first.prompt) for first, _ in samples]),
        "response_ids": Jagged.from_list([torch.tensor(turn) for turn in responses]),
        "version_runs": Jagged.from_list([torch.tensor(turn) for turn in runs]),
    }
    return fields, inputs


def gradients(model: torch.nn.Module, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the gradients of a value, which are zeros for parameters that it does not depend on."""
    named = dict(model.named_parameters())
    gradients_of_weights = torch.autograd.grad(
        value, list(named.values()), materialize_grads=True, allow_unused=True
    )
    return dict(zip(named, gradients_of_weights, strict=True))


def test_a_trained_tower_has_gradients_of_zero_without_images(
    loaded: tuple[Any, Any, set[str]],
) -> None:
    _, model, _ = loaded
    rows = Jagged.from_list([torch.tensor([5, 6, 7])])
    logprobs, _ = Policy(model, temperature=1.0)(pack(rows, rows, device=CPU))
    logprobs.sum().backward()
    tower = dict(model.model.visual.named_parameters())
    assert all(
        parameter.grad is not None and not parameter.grad.any() for parameter in tower.values()
    )
    assert model.lm_head.weight.grad.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_frozen", [True, False])
def test_an_export_has_the_whole_model_with_its_tower(
    kind: str, is_frozen: bool, tmp_path: Path
) -> None:
    saved_model(kind, tmp_path / "source")
    spec = spec_of(
        model=model_spec(tmp_path / "source").model_dump(),
        trainer={"freeze_vision_tower": is_frozen},
    )
    model = load_model(spec.model, load_tokenizer(spec.model), dtype=torch.float32, device="cpu")
    freeze_tower(model, is_frozen=is_frozen)
    policy = Policy(model, temperature=1.0)
    rank = rank_of(spec, policy, random_queue(policy_of(spec_of())), root=tmp_path / "checkpoints")
    with torch.no_grad():
        for parameter in trainable(policy):
            parameter.mul_(1.25)
    export_checkpoint(rank.checkpointer.write(rank.snapshot(1)), spec, tmp_path / "hf")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "hf"))
    assert before.keys() == after.keys()
    equal = {name for name in before if torch.equal(before[name], after[name])}
    assert equal == ({name for name in before if "visual." in name} if is_frozen else set())
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    prompt, images = random_prompt(random.Random(3), 2)
    packed = pack(
        Jagged.from_list([torch.tensor(prompt)]),
        Jagged.from_list([torch.tensor([5, 6, 7])]),
        device=CPU,
        inputs=prompt_spans([prompt], [images]),
    )
    expected = plain_logprobs(whole, prompt, [5, 6, 7], images)
    torch.testing.assert_close(policy(packed)[0], expected, atol=1e-4, rtol=1e-5)


def _plain(name: str) -> str:
    return name.replace("language_model.", "").removeprefix("model.").replace("model.", "")
