"""Pipeline stages compute, train, save and send what one process with the reference engine does."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from services.common.runspec.run import RunSpec
from services.extras.reference_engine.engine import ReferenceEngine
from services.extras.stages.passes import BoundedStage
from services.trainer.engines.base import score_text
from services.trainer.engines.fsdp import activations, parallel
from services.trainer.engines.fsdp.engine import FsdpEngine
from services.weightsync.weight_plan import row_shards
from services.wire.step_command import StepCommand
from tests.helpers.batches import engine_of, policy_of, rank_of
from tests.helpers.ranks import run_ranks
from tests.helpers.stage_ranks import (
    LATENT,
    LAYOUTS,
    MIXTURE,
    NIGHTLY,
    engine_of_stage,
    join,
    path_of,
    queue_for,
    reference_engine,
    spec_with_stages,
)

Outcome = dict[str, Any]


def gradients_of(engine: FsdpEngine | ReferenceEngine) -> list[dict[str, Tensor]]:
    """Returns the gradients of each coming optimizer step, after they are clipped, by name."""
    steps: list[dict[str, Tensor]] = []
    optimizer: Any = engine.optimizer
    step = optimizer.step

    def recording_step() -> None:
        gradients = {name: parameter.grad for name, parameter in engine.module.named_parameters()}
        steps.append(
            {
                name: grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
                for name, grad in gradients.items()
                if grad is not None
            }
        )
        step()

    optimizer.step = recording_step
    return steps


def train(engine: FsdpEngine | ReferenceEngine, spec: RunSpec) -> Outcome:
    """Trains two batches, the first with a masked sequence; returns what can be compared."""
    queue = queue_for(spec)
    lengths = queue.fields["response_mask"].lengths
    queue.fields["response_mask"].values[: int(lengths[0])] = False
    gradients = gradients_of(engine)
    before = score_text(engine, [3, 5, 7, 9, 11])
    trained = rank_of(spec, engine, queue)
    metrics = [trained.train(StepCommand(step, queue.meta)).metrics for step in (1, 2)]
    return {
        "metrics": metrics,
        "gradients": gradients,
        "scores": [before, score_text(engine, [3, 5, 7, 9, 11])],
        "weights": {name: value.clone() for name, value in engine.export_weights()},
    }


def counting(counts: list[int]) -> Any:
    """Returns a method that records how many buffers of states a stage has when it sends states."""
    original = BoundedStage.get_fwd_send_ops

    def get_fwd_send_ops(stage: BoundedStage, chunk: int) -> Any:
        infos = [info for group in stage.args_recv_info.values() for info in group]
        states = [
            info
            for info in infos
            if (buffer := getattr(info, "buffer", None)) is not None and not buffer.is_meta
        ]
        counts.append(len(states) if stage.has_backward else 0)
        return original(stage, chunk)

    return get_fwd_send_ops


def _train_stage(rank: int, folder: str, spec_json: str) -> None:
    """Trains and saves one rank's stage, then loads what the reference engine saved."""
    spec = RunSpec.model_validate_json(spec_json)
    join(rank, spec, folder)
    engine = engine_of_stage(spec, rank)
    counts: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundedStage, "get_fwd_send_ops", counting(counts))
        outcome = train(engine, spec)
    stage = engine.module.stage
    assert len(counts) > 2 * stage.count >= 2 * max(counts)
    outcome["rows"] = {name: rows.clone() for name, rows in engine.export_weights(rows=True)}
    outcome["specs"] = engine.weights.specs
    engine.save().write(Path(folder) / "stages")
    engine.load(Path(folder) / "reference", num_updates=2)
    outcome["loaded"] = {name: value.clone() for name, value in engine.export_weights()}
    torch.save(outcome, f"{folder}/outcome-{rank}.pt")
    distributed.destroy_process_group()


def _train_compiled_stage(rank: int, folder: str, spec_json: str) -> None:
    """Trains one rank's stage with layers that are traced and partitioned, but not built as C++."""
    compiled = partial(torch.compile, backend="aot_eager_decomp_partition", dynamic=True)
    with pytest.MonkeyPatch.context() as patch:
        for module in (activations, parallel):
            patch.setattr(module, "compiled", compiled)
        _train_stage(rank, folder, spec_json)


def trained_stages(
    spec: RunSpec, folder: Path, work: Callable[..., None] = _train_stage
) -> list[Outcome]:
    """Returns the outcome of each rank."""
    run_ranks(work, str(folder), spec.model_dump_json(), count=spec.trainer.world_size)
    files = [folder / f"outcome-{rank}.pt" for rank in range(spec.trainer.world_size)]
    return [torch.load(file, weights_only=False) for file in files]


def assert_rows(stages: list[Outcome]) -> None:
    """Checks that every rank has the rows that the plan assigns to it, and none of another stage."""
    specs = stages[0]["specs"]
    for outcome, shards in zip(stages, row_shards(specs, len(stages)), strict=True):
        assert [specs[shard.tensor].name for shard in shards] == list(outcome["rows"])
        for shard in shards:
            name = specs[shard.tensor].name
            rows = stages[0]["weights"][name][shard.start : shard.stop]
            assert torch.equal(outcome["rows"][name], rows), name


def without_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns what must be the same on every rank."""
    return {
        name: value
        for name, value in metrics.items()
        if not name.startswith("seconds_") and not name.endswith(("_s", "per_s"))
    }


def assert_close(stages: list[Outcome], reference: Outcome) -> None:
    """Compares the first step with a relative error of 1e-5 in float32, and what follows from it."""
    for step, largest_error in enumerate((1e-5, 1e-4)):  # AdamW enlarges rounding errors
        gradients = {
            name: value for stage in stages for name, value in stage["gradients"][step].items()
        }
        expected_gradients = reference["gradients"][step]
        assert gradients.keys() == expected_gradients.keys()
        for name, value in expected_gradients.items():
            error = (gradients[name] - value).norm() / value.norm()
            assert error < largest_error, (name, float(error))
    for outcome in stages:
        assert outcome["weights"].keys() == reference["weights"].keys()
        for name, value in reference["weights"].items():
            assert (outcome["weights"][name] - value).norm() <= 1e-3 * value.norm(), name
        for scores, expected in zip(outcome["scores"], reference["scores"], strict=True):
            assert scores == pytest.approx(expected, rel=1e-5)
        for metrics, first in zip(outcome["metrics"], stages[0]["metrics"], strict=True):
            assert without_times(metrics) == without_times(first)
    for metrics, expected in zip(stages[0]["metrics"], reference["metrics"], strict=True):
        for name in (
            "loss",
            "grad_norm",
            "entropy",
            "trained_tokens",
            "rollout_logprob_abs_diff_max",
        ):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ()) for name in LAYOUTS],
)
def test_stages_train_save_and_send_what_the_reference_does(layout: str, tmp_path: Path) -> None:
    model, trainer = LAYOUTS[layout]
    model = path_of(model, tmp_path)
    reference = reference_engine(spec_with_stages(model))
    expected = train(reference, spec_with_stages(model))
    reference.save().write(tmp_path / "reference")
    stages = trained_stages(spec_with_stages(model, **trainer, engine="stages"), tmp_path)
    assert_close(stages, expected)
    assert_rows(stages)
    for outcome in stages:
        for name, value in expected["weights"].items():
            assert torch.equal(outcome["loaded"][name], value), name
    if (
        trainer["world_size"] == trainer["pipeline_parallel"]
    ):  # the reference reads whole tensors only
        reference.load(tmp_path / "stages", num_updates=2)
        for name, value in reference.export_weights():
            assert torch.equal(stages[0]["weights"][name], value), name


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["pp2", "pp2-tp2", "pp2-ep2"])
def test_compiled_stages_train_what_the_reference_does(layout: str, tmp_path: Path) -> None:
    model, trainer = LAYOUTS[layout]
    reference = reference_engine(spec_with_stages(model))
    expected = train(reference, spec_with_stages(model))
    reference.save().write(tmp_path / "reference")
    spec = spec_with_stages(model, **trainer, engine="stages", compile=True)
    stages = trained_stages(spec, tmp_path, _train_compiled_stage)
    assert_close(stages, expected)
    # Stages compile alone, before they are passed the states of others.
    for outcome in stages:
        assert [metrics["compilations"] for metrics in outcome["metrics"]] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("model", "replay"),
    [(MIXTURE, "replay"), pytest.param(LATENT, "compare", marks=pytest.mark.nightly)],
)
def test_stages_replay_the_experts_of_the_engine(model: str, replay: str, tmp_path: Path) -> None:
    model = path_of(model, tmp_path)
    spec = spec_with_stages(model, replay=replay)
    alone = engine_of(policy_of(spec, scale=1.5), spec)
    expected = train(alone, spec)
    alone.save().write(tmp_path / "reference")
    pp2 = {"world_size": 2, "pipeline_parallel": 2, "engine": "stages"}
    stages = trained_stages(spec_with_stages(model, replay=replay, **pp2), tmp_path)
    assert_close(stages, expected)
    for metrics, expected_metrics in zip(stages[0]["metrics"], expected["metrics"], strict=True):
        assert 0 < expected_metrics["routing_differs"] == pytest.approx(metrics["routing_differs"])
        assert expected_metrics["expert_load_max"] == pytest.approx(metrics["expert_load_max"])
