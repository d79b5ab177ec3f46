"""Checkpoints of every layout of pipeline stages load into any other layout, and export, bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from services.common.models.loading import stored_tensors
from services.common.runspec.run import RunSpec
from services.extras.export.checkpoint import export_checkpoint
from services.extras.reference_engine.engine import ReferenceEngine
from services.trainer.checkpoint import manifest
from services.trainer.engines.fsdp.engine import FsdpEngine
from services.trainer.engines.fsdp.parallel import build_topology, distribute
from services.trainer.ranks.rank import Rank
from services.wire.step_command import StepCommand
from tests.helpers.batches import CPU, engine_of, policy_of, rank_of
from tests.helpers.ranks import run_ranks
from tests.helpers.stage_ranks import (
    LAYOUTS,
    engine_of_stage,
    join,
    path_of,
    queue_for,
    reference_engine,
    spec_with_stages,
)

State = dict[str, Tensor]
"""Weights, moments and steps of whole tensors, by name."""
FIRST_STEPS = 2
"""Steps of the reference engine, whose checkpoint the first layout loads."""
_EXPERTS_2 = {"world_size": 2, "expert_parallel": 2}
_TENSOR_2 = {"world_size": 2, "tensor_parallel": 2}
OTHERS: dict[str, dict[str, int]] = {
    "pp2": {"world_size": 1},
    "pp2-fsdp2": {"world_size": 2},
    "pp2-tp2": {"world_size": 2},
    "pp2-ep2": _EXPERTS_2,
    "pp2-untied": _TENSOR_2,
    "pp2-tp2-experts": _EXPERTS_2,
    "pp2-ep2-tp2": {"world_size": 3},
    "pp2-fsdp2-ep2": {"world_size": 4, "tensor_parallel": 2},
    "pp2-latent": _EXPERTS_2,
    "pp2-cp2": _TENSOR_2,
    "pp2-cp2-ep4": {"world_size": 4, "expert_parallel": 4},
    "pp2-fsdp2-cp2": {"world_size": 3},
    "pp2-cp2-tp2": {"world_size": 4, "tensor_parallel": 2},
    "pp2-recomputed": {"world_size": 2},
    "pp4": _TENSOR_2,
    "pp2-fsdp2-tp2": {"world_size": 1},
    "pp4-fsdp2": {"world_size": 2},
}
"""Layout of the engine fsdp that continues the checkpoint of a layout of stages, and hands one back."""
EACH_PUSH = ("pp2-fsdp2", "pp2-tp2", "pp2-ep2")


def named_states(engine: FsdpEngine | ReferenceEngine) -> Iterator[tuple[str, Tensor]]:
    """Yields weights, and the moments and steps of their updates."""
    optimizer: Any = engine.optimizer
    for name, tensor in stored_tensors(engine.module).items():
        yield f"weight {name}", tensor.detach()
        for key, value in optimizer.state.get(tensor, {}).items():
            yield f"{key} {name}", value


def state_of(engine: FsdpEngine | ReferenceEngine) -> State:
    """Returns the whole tensors that a rank has a part of. All ranks of a stage must call it."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in named_states(engine)
    }


def engine_of_rank(spec: RunSpec, rank: int) -> FsdpEngine:
    """Returns the engine of one rank of a layout, with random weights. All ranks must call it."""
    if spec.trainer.engine == "stages":
        return engine_of_stage(spec, rank)
    topology = build_topology(
        spec.trainer, device=CPU, rank=rank, world_size=spec.trainer.world_size
    )
    policy = policy_of(spec, scale=1.5)
    distribute(policy, spec.trainer, topology)
    return engine_of(policy, spec, topology=topology)


def checkpointed(rank: Rank, step: int) -> Path:
    """Writes a checkpoint as a run does; returns its folder."""
    return rank.checkpointer.write(rank.snapshot(step))


def _continue(rank: int, folder: str, source: str, spec_json: str) -> None:
    """Loads a checkpoint, saves it again, trains the next step and saves that."""
    spec = RunSpec.model_validate_json(spec_json)
    if spec.trainer.world_size > 1:
        join(rank, spec, folder)
    engine, queue = engine_of_rank(spec, rank), queue_for(spec)
    trained = rank_of(spec, engine, queue, root=Path(folder) / "checkpoints")
    step = trained.restore(Path(source))
    states = [state_of(engine)]
    checkpointed(trained, step)
    trained.train(StepCommand(step + 1, queue.meta))
    states.append(state_of(engine))
    checkpointed(trained, step + 1)
    torch.save((step, states), f"{folder}/states-{rank}.pt")
    if spec.trainer.world_size > 1:
        distributed.destroy_process_group()


def continued(spec: RunSpec, source: Path, folder: Path) -> list[State]:
    """Continues a checkpoint in a layout for one step; returns the states before and after it."""
    folder.mkdir()
    ranks = spec.trainer.world_size
    run_ranks(_continue, str(folder), str(source), spec.model_dump_json(), count=ranks)
    whole: list[State] = [{}, {}]
    for rank in range(ranks):
        step, states = torch.load(folder / f"states-{rank}.pt", weights_only=False)
        assert step == manifest.facts_of(source)["step"]
        for state, rank_state in zip(whole, states, strict=True):
            for name, value in rank_state.items():
                assert torch.equal(state.setdefault(name, value), value), name
    return whole


def assert_equal(state: State, expected: State) -> None:
    """Compares all weights, moments and steps bit for bit."""
    assert state.keys() == expected.keys()
    assert {name.partition(" ")[0] for name in state} == {"weight", "exp_avg", "exp_avg_sq", "step"}
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def weights_in(folder: Path) -> State:
    """Returns the tensors of a Hugging Face folder, by their names in it."""
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name in EACH_PUSH else pytest.mark.nightly) for name in OTHERS],
)
def test_checkpoints_of_stages_continue_in_other_layouts_and_back(
    layout: str, tmp_path: Path
) -> None:
    model, trainer = LAYOUTS[layout]
    path = path_of(model, tmp_path)
    alone = spec_with_stages(path)
    reference = reference_engine(alone)
    reference.module.model.save_pretrained(tmp_path / "model")
    queue = queue_for(alone)
    rank = rank_of(alone, reference, queue, root=tmp_path / "checkpoints")
    for step in range(1, FIRST_STEPS + 1):
        rank.train(StepCommand(step, queue.meta))
    source = checkpointed(rank, FIRST_STEPS)
    expected = state_of(reference)
    reference.module.model.save_pretrained(tmp_path / "hf")

    stages = spec_with_stages(path, engine="stages", **trainer)
    loaded, trained = continued(stages, source, tmp_path / "stages")
    assert_equal(loaded, expected)
    rank.train(StepCommand(FIRST_STEPS + 1, queue.meta))
    for name, value in state_of(reference).items():
        assert (trained[name] - value).norm() <= 1e-3 * value.norm(), name

    folders = manifest.published_in(tmp_path / "stages" / "checkpoints")
    saved, newest = sorted(folders)
    export_checkpoint(saved, stages, tmp_path / "exported")
    exported, reference_weights = weights_in(tmp_path / "exported"), weights_in(tmp_path / "hf")
    assert exported.keys() == reference_weights.keys()
    for name, value in reference_weights.items():
        assert value.dtype == torch.float32
        assert torch.equal(exported[name], value), name

    other = spec_with_stages(path, **OTHERS[layout])
    loaded, other_trained = continued(other, newest, tmp_path / "fsdp")
    assert_equal(loaded, trained)
    (_, newest) = sorted(manifest.published_in(tmp_path / "fsdp" / "checkpoints"))
    loaded, _ = continued(stages, newest, tmp_path / "back")
    assert_equal(loaded, other_trained)


def test_every_layout_has_another_that_continues_its_checkpoint() -> None:
    assert OTHERS.keys() == LAYOUTS.keys()
