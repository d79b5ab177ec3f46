"""Contract tests of every training engine, and comparisons with the reference engine."""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from services.common.fields import ALL_TOKENS, SAMPLER_TOP_K
from services.common.models.loading import build_model
from services.common.runspec.engines import TRAIN_ENGINES
from services.common.runspec.run import RunSpec
from services.extras.reference_engine.engine import ReferenceEngine
from services.rollout.engines.torch.decoding import most_likely
from services.trainer.algorithm.centering import score_centering
from services.trainer.batch.samples import BatchFacts, Samples, build_samples
from services.trainer.batch.step_plan import StepPlan
from services.trainer.collectives import MetricTotals
from services.trainer.engines.base import ModelRole, TrainEngine, score_text
from services.trainer.model.policy import Critic, Policy, freeze
from services.trainer.steps.critic import CriticRunner
from services.trainer.steps.objective import Objective, PolicyLoss, num_counted
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand
from tests.helpers.batches import CPU, engine_of, policy_of, random_queue, rank_of, spec_of

SPEC = spec_of(trainer={"optimizer": {"learning_rate": 1e-2, "weight_decay": 0.1}})
_FAMILY = {
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
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"attention_bias": True},
    "gemma3_text": {"sliding_window": 5, "sliding_window_pattern": 2},
}
ALL = ((tuple(range(6)), tuple(range(6, 16))),)


def _fsdp(model: Any, role: ModelRole, spec: RunSpec) -> TrainEngine:
    if role == "critic":
        return engine_of(Critic(model), spec)
    policy = Policy(
        model,
        temperature=spec.rollout.sampling.temperature,
        centering=score_centering(spec),
    )
    return engine_of(policy if role == "policy" else freeze(policy), spec)


def _reference(model: Any, role: ModelRole, spec: RunSpec) -> TrainEngine:
    return ReferenceEngine(model, spec, role=role)


# Constructor of each engine in the table. ``stages`` needs several processes; with one it is ``fsdp``. See
# tests/integration/test_stage_ranks.py.
BUILD: dict[str, Callable[[Any, ModelRole, RunSpec], TrainEngine]] = {
    "fsdp": _fsdp,
    "reference": _reference,
}
each_engine = pytest.mark.parametrize("name", BUILD)


def _engine(name: str, *, role: ModelRole = "policy", seed: int = 0) -> Any:
    """Returns an engine for a tiny model that has transformers' attention until the engine replaces it."""
    model = policy_of(SPEC, seed=seed, scale=1.5).model
    model.set_attn_implementation("sdpa")
    return BUILD[name](model, role, SPEC)


def _batch(seed: int = 0, spec: RunSpec = SPEC) -> Samples:
    """Returns 16 random sequences with random advantages, in groups with common prompts."""
    queue = random_queue(policy_of(SPEC, seed=5, scale=1.5), seed=seed)
    facts = BatchFacts.from_meta(queue.meta)
    samples = build_samples(queue.fields, range(16), facts, spec=spec.algorithm, weight_version=0)
    generator = torch.Generator().manual_seed(seed)
    count = len(samples.responses.values)
    return samples.with_tokens(advantages=torch.randn(count, generator=generator))


def _accumulate(
    engine: TrainEngine,
    samples: Samples,
    micros: Any = ALL[0],
    *,
    unit: Tensor | None = None,
    loss_scale: float = 1.0,
    spec: RunSpec = SPEC,
) -> PolicyLoss:
    objective = Objective(spec.algorithm, correction="bypass", horizon=16)

    def make_loss(work: Any) -> PolicyLoss:
        counts = num_counted(samples.counted, samples, work, engine.ranks)
        return PolicyLoss(
            objective,
            counts=counts,
            unit=counts if unit is None else unit,
            num_tokens=counts[0],
            total_weight=1.0,
            kl_coefficient=0.0,
            keeps_logprobs=True,
        )

    passes = engine.forward_backward(
        samples, micros, make_loss, may_repeat=unit is None, loss_scale=loss_scale
    )
    assert passes.micros == micros
    assert passes.loss.isfinite()
    assert passes.work.sequence_tokens > 0
    return passes.loss_of


def _weights(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.export_weights()}


def _equal(tensors: dict[str, Tensor], other_tensors: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other_tensors[name]) for name, value in tensors.items())


def test_every_engine_that_a_run_can_name_keeps_the_contract() -> None:
    assert {*BUILD, "stages"} == set(TRAIN_ENGINES)


@each_engine
def test_scores_do_not_depend_on_micro_batches(name: str) -> None:
    engine, samples = _engine(name), _batch()
    whole = engine.forward_logprobs(samples, StepPlan(ALL))
    assert (whole.dtype, whole.device, whole.requires_grad) == (torch.float32, CPU, False)
    alone = engine.forward_logprobs(samples, StepPlan((tuple((i,) for i in range(16)),)))
    torch.testing.assert_close(alone, whole, atol=1e-5, rtol=0)
    sharper = engine.forward_logprobs(samples, StepPlan(ALL), temperature=0.1)
    assert sharper.var() > whole.var()
    assert len(score_text(engine, [1, 2, 3])) == 2


@each_engine
def test_gradients_add_up_until_a_step_drops_them(name: str) -> None:
    engine, samples = _engine(name), _batch()
    before = _weights(engine)
    loss = _accumulate(engine, samples)
    assert [len(batch.rows) for batch, _ in loss.trained] == [6, 10]
    whole = engine.optimizer_step(0.0)
    for micro in ALL[0]:
        _accumulate(engine, samples, (micro,), unit=loss.unit)
    assert engine.optimizer_step(0.0).grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    _accumulate(engine, samples)
    half = engine.optimizer_step(0.0, scale=torch.tensor(0.5))
    assert half.grad_norm == pytest.approx(whole.grad_norm / 2, rel=1e-5)
    _accumulate(engine, samples, loss_scale=1024.0)
    assert engine.optimizer_step(0.0).grad_norm == pytest.approx(whole.grad_norm * 1024, rel=1e-5)
    _accumulate(engine, samples)
    assert math.isnan(engine.optimizer_step(None).grad_norm)
    assert engine.optimizer_step(0.0).grad_norm == 0
    assert not whole.moved
    assert _equal(_weights(engine), before)


@each_engine
def test_an_update_moves_the_weights_unless_its_gradient_is_no_number(name: str) -> None:
    engine, samples = _engine(name), _batch()
    before = _weights(engine)
    _accumulate(engine, samples)
    assert not engine.optimizer_step(1e-2, scale=torch.tensor(torch.inf)).moved
    assert _equal(_weights(engine), before)
    _accumulate(engine, samples)
    assert engine.optimizer_step(1e-2).moved
    assert not any(torch.equal(value, before[key]) for key, value in _weights(engine).items())


@each_engine
def test_exported_weights_are_those_that_the_layout_describes(name: str) -> None:
    engine = _engine(name)
    exported = [
        (key, tuple(value.shape), str(value.dtype)) for key, value in engine.export_weights()
    ]
    specs = engine.weights.specs
    assert exported == [(spec.name, spec.shape, f"torch.{spec.dtype}") for spec in specs]
    if engine.weights.sends_rows:
        assert _equal(dict(engine.export_weights(rows=True)), _weights(engine))


@each_engine
def test_training_resumes_from_a_save_which_later_updates_do_not_touch(
    name: str, tmp_path: Path
) -> None:
    engine, samples = _engine(name), _batch()
    _accumulate(engine, samples)
    engine.optimizer_step(1e-2)
    saved = engine.save()
    after = []
    for trained_engine in (engine, _engine(name, seed=1)):
        if trained_engine is not engine:
            saved.write(tmp_path / "part")
            size = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
            assert size >= saved.num_bytes
            trained_engine.load(tmp_path / "part", num_updates=1)
        _accumulate(trained_engine, samples)
        trained_engine.optimizer_step(1e-2)
        after.append(_weights(trained_engine))
    assert _equal(*after)


@pytest.mark.parametrize(("kind", "other_kind"), [("fsdp", "reference"), ("reference", "fsdp")])
def test_an_engine_resumes_what_another_one_saved(
    kind: str, other_kind: str, tmp_path: Path
) -> None:
    first, second, samples = _engine(kind), _engine(other_kind, seed=1), _batch()
    _accumulate(first, samples)
    first.optimizer_step(1e-3)
    first.save().write(tmp_path)
    second.load(tmp_path, num_updates=1)
    for engine in (first, second):
        _accumulate(engine, samples)
        engine.optimizer_step(1e-3)
    expected = _weights(first)
    for key, value in _weights(second).items():
        torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=0)


@each_engine
def test_an_engine_that_slept_trains_as_if_it_had_not(name: str) -> None:
    after = []
    for sleeps in (False, True):
        engine, samples = _engine(name), _batch()
        for _ in range(2):
            _accumulate(engine, samples)
            engine.optimizer_step(1e-2)
            if sleeps:
                engine.sleep()
                engine.sleep()
                engine.save()
                engine.wake()
                engine.wake()
        after.append(_weights(engine))
    assert _equal(*after)


@each_engine
def test_a_critic_starts_at_0_and_learns_returns(name: str) -> None:
    engine, samples = _engine(name, role="critic"), _batch()
    values = engine.forward_logprobs(samples, StepPlan(ALL))
    assert not values.any()
    samples = samples.with_tokens(values=values, returns=torch.ones_like(values))
    runner = CriticRunner(engine, spec=spec_of(trainer={"optimizer": {"learning_rate": 1e-4}}))
    for _ in range(3):
        assert runner.update(samples, ALL[0], tally=MetricTotals(), num_steps=10)
    assert runner.updates.count == 3
    error = engine.forward_logprobs(samples, StepPlan(ALL)) - 1.0
    assert error.square().mean() < 1


@each_engine
def test_a_frozen_engine_scores(name: str) -> None:
    samples = _batch()
    scores = _engine(name, role="reference").forward_logprobs(samples, StepPlan(ALL))
    assert torch.equal(scores, _engine(name).forward_logprobs(samples, StepPlan(ALL)))


@pytest.mark.parametrize(
    "algorithm", [{}, {"advantage": "gae"}, {"kl": {"coefficient": 0.1}}], ids=str
)
def test_steps_of_both_engines_report_the_same(algorithm: dict[str, Any]) -> None:
    spec = spec_of(algorithm=algorithm, trainer={"updates_per_step": 2})
    queue = random_queue(policy_of(SPEC, seed=1, scale=1.5))
    queue = queue.replaced(ref_logprobs=queue.fields["rollout_logprobs"])
    metrics = {}
    for name in BUILD:
        rank = rank_of(spec, _engine(name), queue)
        metrics[name] = [rank.train(StepCommand(step, queue.meta)).metrics for step in (1, 2)][1]
    for key in ("loss", "grad_norm", "entropy", "ratio_mean", "ppo_kl", "reward_mean"):
        assert metrics["reference"][key] == pytest.approx(metrics["fsdp"][key], rel=1e-3, abs=1e-5)


def test_logprobs_and_gradients_relative_to_masks_are_those_of_the_reference() -> None:
    samples = _batch()
    generator, entries = torch.Generator().manual_seed(0), []
    for response in samples.responses.unbind():
        row: list[int] = []
        for index, token in enumerate(response.tolist()):
            others = torch.randint(0, 16, (index % 4,), generator=generator).tolist()
            first, *rest = sorted({token, *others})
            row += [ALL_TOKENS] if index % 5 == 4 else [~first, *rest]
        entries.append(torch.tensor(row, dtype=torch.int32))
    masked = replace(samples, masks=Jagged.from_list(entries))
    logprobs, gradients = {}, {}
    for name in BUILD:
        engine = _engine(name)
        logprobs[name] = engine.forward_logprobs(masked, StepPlan(ALL))
        assert not torch.equal(logprobs[name], engine.forward_logprobs(samples, StepPlan(ALL)))
        _accumulate(engine, masked)
        gradients[name] = {
            key: parameter.grad for key, parameter in engine.module.named_parameters()
        }
    torch.testing.assert_close(logprobs["fsdp"], logprobs["reference"], atol=1e-5, rtol=0)
    for key, expected in gradients["reference"].items():
        difference = (gradients["fsdp"][key] - expected).norm()
        assert difference <= 1e-5 * expected.norm(), key


def test_gradients_with_score_centering_are_those_of_the_reference() -> None:
    spec = spec_of(algorithm={"loss": "reinforce", "score_centering": 3, "correction_cap": 1.2})
    plain = _batch(spec=spec)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(plain.responses.values), 16, generator=generator)
    samples = plain.with_tokens(**{SAMPLER_TOP_K: most_likely(logits.log_softmax(-1), 3)})
    gradients = {}
    for name, build in BUILD.items():
        model = policy_of(spec, scale=1.5).model
        model.set_attn_implementation("sdpa")
        engine: Any = build(model, "policy", spec)
        assert len(engine.forward_logprobs(samples, StepPlan(ALL))) == len(logits)
        _accumulate(engine, samples, spec=spec)
        gradients[name] = {
            key: parameter.grad for key, parameter in engine.module.named_parameters()
        }
    alone: Any = BUILD["fsdp"](policy_of(SPEC, scale=1.5).model, "policy", SPEC)
    _accumulate(alone, plain, spec=spec.model_copy(update={"algorithm": _uncentered(spec)}))
    for key, expected in gradients["reference"].items():
        difference = (gradients["fsdp"][key] - expected).norm()
        assert difference <= 2e-5 * expected.norm(), key
    drift = alone.module.get_parameter("model.model.embed_tokens.weight").grad
    centered = gradients["fsdp"]["model.model.embed_tokens.weight"]
    assert (drift - centered).norm() > 0.01 * drift.norm()


def test_a_reference_scores_samples_that_have_the_samplers_distributions() -> None:
    spec = spec_of(algorithm={"loss": "reinforce", "score_centering": 3, "correction_cap": 1.2})
    plain = _batch(spec=spec)
    samples = plain.with_tokens(**{SAMPLER_TOP_K: torch.zeros(len(plain.responses.values), 4, 2)})
    model = policy_of(spec).model
    # As ``engines/fsdp/build.py`` makes it: without centering.
    reference = engine_of(freeze(Policy(model, temperature=1.0)), spec)
    scored = reference.forward_logprobs(samples, StepPlan(ALL))
    torch.testing.assert_close(
        scored, reference.forward_logprobs(plain, StepPlan(ALL)), atol=1e-5, rtol=0
    )


def _uncentered(spec: RunSpec) -> Any:
    return spec.algorithm.model_copy(update={"score_centering": None})


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2))])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_those_of_the_reference(family: str, seed: int) -> None:
    """The tolerance is 1e-5 for each logprob, and 1e-5 of its norm for each parameter's gradient."""
    config = AutoConfig.for_model(family, **{**_FAMILY, **FAMILIES[family]})
    model = build_model(config, dtype=torch.float32, device=CPU, seed=seed)
    engines: dict[str, Any] = {
        name: build(deepcopy(model), "policy", SPEC) for name, build in BUILD.items()
    }
    samples = _batch(seed)
    logprobs, gradients = {}, {}
    for name, engine in engines.items():
        logprobs[name] = engine.forward_logprobs(samples, StepPlan(ALL))
        _accumulate(engine, samples)
        gradients[name] = {
            key: parameter.grad for key, parameter in engine.module.named_parameters()
        }
    torch.testing.assert_close(logprobs["fsdp"], logprobs["reference"], atol=1e-5, rtol=0)
    assert gradients["fsdp"].keys() == gradients["reference"].keys()
    for key, expected in gradients["reference"].items():
        difference = (gradients["fsdp"][key] - expected).norm()
        assert difference <= 1e-5 * expected.norm(), key
