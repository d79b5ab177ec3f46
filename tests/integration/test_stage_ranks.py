"""Pipeline stages compute, train, save and send what one process with the reference engine does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from services.common.runspec.run import RunSpec
from services.extras.reference_engine.engine import ReferenceEngine
from services.extras.stages.engine import StagesEngine
from services.extras.stages.layout import build_stage
from services.extras.stages.modules import StagedPolicy
from services.extras.stages.passes import BoundedStage
from services.trainer.batch.packing import pack
from services.trainer.engines.base import score_text
from services.trainer.engines.fsdp.engine import FsdpEngine
from services.trainer.engines.fsdp.parallel import distribute
from services.weightsync.weight_plan import row_shards
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand
from tests.helpers.batches import (
    CPU,
    Queue,
    engine_of,
    policy_of,
    random_queue,
    rank_of,
    spec_of,
)
from tests.helpers.mixtures import tiny_config
from tests.helpers.ranks import run_ranks

Outcome = dict[str, Any]
TINY = "tiny:qwen2-0.4m"
FOUR_LAYERS = "tiny:qwen2-1.2m"
MIXTURE = "tiny:qwen3_moe-0.7m"
LATENT = "latent"
"""A mixture with latent attention, a dense first layer and biases that balance its routing."""
UNTIED = "untied"
"""A model of three layers whose head is not its embedding."""
LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "pp2": (TINY, {"world_size": 2, "pipeline_parallel": 2}),
    "pp2-untied": (UNTIED, {"world_size": 2, "pipeline_parallel": 2}),
    "pp2-fsdp2": (TINY, {"world_size": 4, "pipeline_parallel": 2}),
    "pp2-tp2": (TINY, {"world_size": 4, "pipeline_parallel": 2, "tensor_parallel": 2}),
    "pp2-ep2": (MIXTURE, {"world_size": 4, "pipeline_parallel": 2, "expert_parallel": 2}),
    "pp2-tp2-experts": (MIXTURE, {"world_size": 4, "pipeline_parallel": 2, "tensor_parallel": 2}),
    "pp2-ep2-tp2": (
        LATENT,
        {"world_size": 8, "pipeline_parallel": 2, "tensor_parallel": 2, "expert_parallel": 2},
    ),
    "pp2-fsdp2-ep2": (
        MIXTURE,
        {"world_size": 8, "pipeline_parallel": 2, "expert_parallel": 2},
    ),
    "pp2-latent": (LATENT, {"world_size": 2, "pipeline_parallel": 2}),
    "pp2-cp2": (TINY, {"world_size": 4, "pipeline_parallel": 2, "context_parallel": 2}),
    "pp2-cp2-ep4": (
        MIXTURE,
        {"world_size": 8, "pipeline_parallel": 2, "context_parallel": 2, "expert_parallel": 4},
    ),
    "pp2-fsdp2-cp2": (TINY, {"world_size": 8, "pipeline_parallel": 2, "context_parallel": 2}),
    "pp2-cp2-tp2": (
        TINY,
        {"world_size": 8, "pipeline_parallel": 2, "context_parallel": 2, "tensor_parallel": 2},
    ),
    "pp2-recomputed": (
        FOUR_LAYERS,
        {"world_size": 2, "pipeline_parallel": 2, "activation_checkpointing": True},
    ),
    "pp4": (FOUR_LAYERS, {"world_size": 4, "pipeline_parallel": 4}),
    "pp2-fsdp2-tp2": (
        FOUR_LAYERS,
        {"world_size": 8, "pipeline_parallel": 2, "tensor_parallel": 2},
    ),
    "pp4-fsdp2": (
        FOUR_LAYERS,
        # Half as many samples on each pipeline still make more micro-batches than stages.
        {"world_size": 8, "pipeline_parallel": 4, "tokens_per_micro_batch": 20},
    ),
}
NIGHTLY = (
    "pp2-tp2-experts",
    "pp2-ep2-tp2",
    "pp2-fsdp2-ep2",
    "pp2-latent",
    "pp2-cp2-ep4",
    "pp2-fsdp2-cp2",
    "pp2-cp2-tp2",
    "pp2-recomputed",
    "pp4",
    "pp2-fsdp2-tp2",
    "pp4-fsdp2",
)


def path_of(model: str, folder: Path) -> str:
    """Returns the preset, or the folder of a model that is no preset."""
    if model == LATENT:
        config = tiny_config("deepseek_v3", vocab_size=24, eos_token_id=1)
    elif model == UNTIED:
        config = AutoConfig.for_model(
            "qwen3",
            vocab_size=24,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    else:
        return model
    config.save_pretrained(folder / "model")
    return str(folder / "model")


def spec_with_stages(model: str = TINY, *, replay: str = "off", **trainer: Any) -> RunSpec:
    """Returns a run whose micro-batches are small enough that the pipeline is filled."""
    return spec_of(
        model={"path": model},
        rollout={"routing_replay": replay},
        trainer={
            "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.5},
            "tokens_per_micro_batch": 40,
            **trainer,
        },
    )


def gradients_of(engine: FsdpEngine | ReferenceEngine) -> list[dict[str, Tensor]]:
    """Returns the gradients of each coming optimizer step, after they are clipped, by name."""
    steps: list[dict[str, Tensor]] = []
    optimizer: Any = engine.optimizer
    step = optimizer.step

    def recording_step() -> None:
        held = {name: parameter.grad for name, parameter in engine.module.named_parameters()}
        steps.append(
            {
                name: grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
                for name, grad in held.items()
                if grad is not None
            }
        )
        step()

    optimizer.step = recording_step
    return steps


def queue_for(spec: RunSpec) -> Queue:
    """Returns random samples; with routing replay, with experts that partly differ and partly are unknown."""
    policy = policy_of(spec, seed=1, scale=1.5)
    queue = random_queue(policy)
    if spec.rollout.routing_replay == "off":
        return queue
    prompts, responses = queue.fields["prompt_ids"], queue.fields["response_ids"]
    with torch.no_grad():
        policy(pack(prompts, responses, device=CPU))
    assert policy.routing is not None
    experts_by_layer = policy.routing._chosen
    experts = torch.stack([experts_by_layer[layer] for layer in sorted(experts_by_layer)], 1)
    experts[::2] = (experts[::2] + 1) % 8
    experts[::5] = 255
    lengths = prompts.lengths + responses.lengths - 1
    return queue.replaced(routed_experts=Jagged(experts.to(torch.uint8), lengths))


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


def engine_of_stage(spec: RunSpec, rank: int) -> StagesEngine:
    topology, stage = build_stage(
        spec.trainer, device=CPU, rank=rank, world_size=spec.trainer.world_size
    )
    model = policy_of(spec, scale=1.5).model
    replay = spec.rollout.routing_replay
    module = StagedPolicy(model, stage, temperature=1.0, routing_replay=replay)
    distribute(module, spec.trainer, topology)
    return StagesEngine(module, spec=spec, topology=topology)


def _join(rank: int, spec: RunSpec, folder: str) -> None:
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=spec.trainer.world_size,
    )


def counting(counts: list[int]) -> Any:
    """Returns a method that records how many buffers of states a stage has when it sends states."""
    original = BoundedStage.get_fwd_send_ops

    def get_fwd_send_ops(stage: BoundedStage, chunk: int) -> Any:
        infos = [info for group in stage.args_recv_info.values() for info in group]
        held = [
            info
            for info in infos
            if (buffer := getattr(info, "buffer", None)) is not None and not buffer.is_meta
        ]
        counts.append(len(held) if stage.has_backward else 0)
        return original(stage, chunk)

    return get_fwd_send_ops


def _train_stage(rank: int, folder: str, spec_json: str) -> None:
    """Trains and saves one rank's stage, then loads what the reference engine saved."""
    spec = RunSpec.model_validate_json(spec_json)
    _join(rank, spec, folder)
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


def trained_stages(spec: RunSpec, folder: Path) -> list[Outcome]:
    """Returns the outcome of each rank."""
    run_ranks(_train_stage, str(folder), spec.model_dump_json(), count=spec.trainer.world_size)
    files = [folder / f"outcome-{rank}.pt" for rank in range(spec.trainer.world_size)]
    return [torch.load(file, weights_only=False) for file in files]


def reference_engine(spec: RunSpec) -> ReferenceEngine:
    model = policy_of(spec, scale=1.5).model
    model.set_attn_implementation("sdpa")
    return ReferenceEngine(model, spec, role="policy")


def assert_rows(stages: list[Outcome]) -> None:
    """Checks that every rank has the rows that the plan assigns to it, of its own stage only."""
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
