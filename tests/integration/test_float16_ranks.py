"""Float16 over two ranks: an overflow of one skips the update on both, and the scale survives a resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from services.common.runspec.run import RunSpec
from services.trainer.engines.fsdp.parallel import build_topology, distribute
from services.trainer.ranks.rank import Rank
from services.wire.step_command import StepCommand
from tests.helpers.batches import CPU, Queue, policy_of, random_queue, rank_of, spec_of
from tests.helpers.ranks import run_ranks

NUM_STEPS = 5


def spec_with(**trainer: Any) -> RunSpec:
    return spec_of(
        trainer={
            "dtype": "float16",
            "loss_scale": {"initial": 4096, "growth_interval": 2},
            "optimizer": {"learning_rate": 1e-3},
            **trainer,
        }
    )


def _opened(rank: int, folder: Path, spec: RunSpec, *, seed: int = 0) -> tuple[Rank, Queue]:
    world_size = spec.trainer.world_size
    if world_size > 1:
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store-{seed}", rank=rank, world_size=world_size
        )
    policy = policy_of(spec, seed=seed, scale=1.5)
    queue = random_queue(policy_of(spec, scale=1.5))
    topology = build_topology(spec.trainer, device=CPU, rank=rank, world_size=world_size)
    distribute(policy, spec.trainer, topology)
    return rank_of(spec, policy, queue, topology=topology, root=folder / "checkpoints"), queue


def _weights(rank: Rank) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in rank.runner.engine.export_weights()}


def _train(rank: int, folder: str, spec_json: str) -> None:
    """Trains two steps; in the first, a gradient of the last rank overflows."""
    spec = RunSpec.model_validate_json(spec_json)
    trained, queue = _opened(rank, Path(folder), spec)
    engine: Any = trained.runner.engine
    forward, overflows = engine.module.forward, rank == spec.trainer.world_size - 1

    def overflowing(*args: Any, **options: Any) -> Any:
        logprobs, *others = forward(*args, **options)
        if logprobs.requires_grad and overflows:
            logprobs.register_hook(lambda gradient: torch.full_like(gradient, 1e30))
        return logprobs, *others

    engine.module.forward = overflowing
    before, outcomes = _weights(trained), []
    for step in (1, 2):
        result = trained.train(StepCommand(step, queue.meta))
        has_moved = not all(torch.equal(before[name], v) for name, v in _weights(trained).items())
        outcomes.append(
            [result.skipped, result.overflowed, has_moved, result.metrics["loss_scale"]]
        )
        engine.module.forward = forward
    trained.checkpointer.write(trained.snapshot(2))
    outcomes.append(trained.runner.facts())
    (Path(folder) / f"found-{rank}.json").write_text(json.dumps(outcomes))
    distributed.destroy_process_group()


def _resume(rank: int, folder: str, spec_json: str) -> None:
    """Trains the remaining steps from the checkpoint."""
    trained, queue = _opened(rank, Path(folder), RunSpec.model_validate_json(spec_json), seed=1)
    trained.restore()
    facts = [trained.runner.facts()]
    for step in range(3, NUM_STEPS + 1):
        trained.train(StepCommand(step, queue.meta))
        facts.append(trained.runner.facts())
    (Path(folder) / f"resumed-{rank}.json").write_text(json.dumps(facts))
    distributed.destroy_process_group()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "trainer", [{}, {"zero_stage": 1}, {"optimizer": {"kind": "muon"}}], ids=str
)
def test_an_overflow_on_one_rank_skips_the_update_on_all(
    tmp_path: Path, trainer: dict[str, Any]
) -> None:
    spec = spec_with(world_size=2, **trainer)
    run_ranks(_train, str(tmp_path), spec.model_dump_json(), count=2)
    contents = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in (0, 1)]
    assert contents[0] == contents[1]
    *steps, facts = contents[0]
    assert steps == [[True, True, False, 2048], [False, False, True, 2048]]
    assert [facts[name] for name in ("num_updates", "loss_scale", "loss_scale_updates")] == [
        *(1, 2048, 1)
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [1, 2])
def test_any_number_of_ranks_resumes_the_scale_of_two(tmp_path: Path, count: int) -> None:
    run_ranks(_train, str(tmp_path), spec_with(world_size=2).model_dump_json(), count=2)
    facts = json.loads((tmp_path / "found-0.json").read_text())[-1]
    spec = spec_with(world_size=count)
    run_ranks(_resume, str(tmp_path), spec.model_dump_json(), count=count)
    resumed = json.loads((tmp_path / "resumed-0.json").read_text())
    assert resumed[0] == facts
    scales = [
        (scale_facts["loss_scale"], scale_facts["loss_scale_updates"]) for scale_facts in resumed
    ]
    assert scales == [(2048, 1), (4096, 0), (4096, 1), (8192, 0)]
