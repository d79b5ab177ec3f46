"""Recovery from GPU memory exhaustion: one process continues, several restart with smaller micro-batches."""

import asyncio
import json
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from services.common.runspec.run import RunSpec
from services.trainer.batch.step_plan import Bounds
from services.trainer.engines.fsdp.oom import OomLimits
from services.trainer.engines.fsdp.parallel import build_topology, distribute
from services.trainer.ranks.command_group import CommandGroup, RankFailedError
from services.trainer.ranks.follower import Follower
from services.trainer.ranks.leader import Leader
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand
from tests.helpers.batches import CPU, Queue, engine_of, policy_of, random_queue, rank_of, spec_for
from tests.helpers.ledger_check import check_run
from tests.helpers.ports import free_port
from tests.helpers.ranks import run_ranks
from tests.helpers.shortage import limited
from tests.helpers.system import System
from tests.integration.test_trainer_ranks import Recorder


def _train(rank: int, folder: str, spec_json: str) -> None:
    spec = RunSpec.model_validate_json(spec_json)
    queue = random_queue(policy_of(spec, seed=1, scale=1.5), num_groups=4)
    outcomes: list[Any] = []
    kinds: dict[str, dict[str, bool]] = {
        "whole": {},
        "forward": {"in_backward": False},
        "backward": {"in_backward": True},
        "scores": {"scores": True},
    }
    for kind, how in kinds.items():
        policy = policy_of(spec, scale=1.5)
        topology = build_topology(spec.trainer, device=CPU, rank=0, world_size=1)
        distribute(policy, spec.trainer, topology)
        trained = rank_of(spec, policy, queue, topology=topology)
        recorder: Any = Recorder(policy)
        runner: Any = trained.runner
        runner.engine.optimizer = recorder
        if kind != "whole":
            limited(policy, 40, **how)
        divided = trained.train(StepCommand(1, queue.meta)).metrics["divided_micro_batches"]
        first = _flat(recorder.gradients)
        # A failed pass must leave nothing for the next step.
        trained.train(StepCommand(2, queue.meta))
        if kind == "scores":
            divided = float(runner.engine.oom_limits.was_lowered)
        outcomes.append((divided, first, _flat(recorder.gradients)))
        distributed.destroy_process_group()
    torch.save(outcomes, f"{folder}/found.pt")


CAUSE = r"a rank failed.*: rank 1: a micro-batch of .* tokens in \d+ sequence.* 2\.00 GiB"


def _short_of_memory(rank: int, ranks: int, folder: str, spec_json: str) -> None:
    """Only rank 1 runs out of memory; the others wait for it in the same pass."""
    spec = RunSpec.model_validate_json(spec_json)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    policy = policy_of(spec)
    queue = random_queue(policy_of(spec))
    topology = build_topology(spec.trainer, device=CPU, rank=rank, world_size=ranks)
    distribute(policy, spec.trainer, topology)
    trained = rank_of(spec, policy, queue, topology=topology)
    command_group = CommandGroup(ranks)
    if rank == 1:
        limited(policy, 1, in_backward=False)
    if rank > 0:
        with pytest.raises(RankFailedError, match=CAUSE):
            Follower(command_group, trained).follow()
    else:
        leader = Leader()
        leader.attach(trained, command_group)
        with pytest.raises(RankFailedError, match=CAUSE):
            asyncio.run(leader.train_step(StepCommand(1, queue.meta)))
        leader.stop()


def _idle_rank(rank: int, folder: str, port: int) -> None:
    """Rank 1 fails while rank 0 is in no collective; then both end as ranks do."""
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    command_group = CommandGroup(2)
    with command_group.listening():
        if rank == 1:
            with (
                pytest.raises(RankFailedError, match="rank 1: no room"),
                command_group.guard(ends=True),
            ):
                raise ValueError("no room")
        else:
            with pytest.raises(RankFailedError, match="rank 1: no room"):
                asyncio.run(command_group.failed())
        with pytest.raises(RankFailedError, match="rank 1: no room"), command_group.guard():
            """The guard discards results that this rank computed in the meantime."""
    assert not distributed.is_initialized()


def _end_well(rank: int, folder: str, port: int) -> None:
    """Both ranks end, and neither reports the other's end as a failure."""
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    command_group = CommandGroup(2)
    with command_group.listening(), command_group.guard():
        command_group.gather(str(rank))
    assert not command_group.has_failed
    assert [thread for thread in threading.enumerate() if thread.name == "rank-failures"] == []
    distributed.destroy_process_group()


def _leave_out(rank: int, folder: str, spec_json: str) -> None:
    """Both ranks start with recorded OOM limits, as after a restart."""
    spec = RunSpec.model_validate_json(spec_json)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    policy = policy_of(spec, scale=1.5)
    queue = random_queue(policy_of(spec, seed=1, scale=1.5), num_groups=4)
    topology = build_topology(spec.trainer, device=CPU, rank=rank, world_size=2)
    distribute(policy, spec.trainer, topology)
    oom_limits = OomLimits(Bounds(max_tokens=40, too_long=_longest(queue)), is_alone=False)
    trained = rank_of(
        spec, engine_of(policy, spec, topology=topology, oom_limits=oom_limits), queue
    )
    recorder: Any = Recorder(policy)
    runner: Any = trained.runner
    runner.engine.optimizer = recorder
    # Fails if a rank computes more tokens at once than the recorded limit.
    limited(policy, 40, in_backward=False)
    result = trained.train(StepCommand(1, queue.meta))
    if rank == 0:
        metrics = {**result.metrics, "left_out": dict(result.left_out)}
        torch.save((metrics, _flat(recorder.gradients)), f"{folder}/found.pt")
    distributed.destroy_process_group()


def _longest(queue: Queue) -> int:
    return int((queue.fields["prompt_ids"].lengths + queue.fields["response_ids"].lengths).max())


def _flat(gradients: dict[str, Any]) -> torch.Tensor:
    whole = (g.full_tensor() if isinstance(g, DTensor) else g for g in gradients.values())
    return torch.cat([gradient.flatten() for gradient in whole])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"cpu_offload": True},
            marks=(
                pytest.mark.nightly,
                pytest.mark.skipif(
                    not hasattr(FSDPModule, "reset_iter_state"),
                    reason="FSDP2 of this torch cannot repeat a pass that broke: the trainer restarts",
                ),
            ),
        ),
    ],
    ids=["gathered", "offloaded"],
)
def test_a_pass_that_broke_leaves_nothing_behind(tmp_path: Path, options: dict[str, Any]) -> None:
    # With several updates, each uses the logprobs of the weights before the first, from a scoring pass.
    algorithm = {"loss": "ppo", "correction": "decoupled"}
    options |= {"updates_per_step": 2, "tokens_per_micro_batch": 90}
    spec = spec_for(algorithm=algorithm, dtype="bfloat16", **options)
    run_ranks(_train, str(tmp_path), spec.model_dump_json(), count=1)
    (whole, *expected), *broken = torch.load(tmp_path / "found.pt", weights_only=True)
    assert whole == 0
    for divided, *actual in broken:
        assert divided >= 1
        for gradient, expected_gradient in zip(actual, expected, strict=True):
            assert (gradient - expected_gradient).norm() <= 0.02 * expected_gradient.norm()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_runs_out_of_memory_fails_all_ranks(tmp_path: Path, ranks: int) -> None:
    spec = spec_for(world_size=ranks)
    run_ranks(_short_of_memory, ranks, str(tmp_path), spec.model_dump_json(), count=ranks)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("work", [_idle_rank, _end_well])
def test_a_rank_learns_how_the_others_end(tmp_path: Path, work: Callable[..., None]) -> None:
    run_ranks(work, str(tmp_path), free_port(), count=2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("context_parallel", [1, 2])
def test_ranks_leave_out_what_is_known_not_to_fit(tmp_path: Path, context_parallel: int) -> None:
    spec = spec_for(world_size=2, context_parallel=context_parallel)
    run_ranks(_leave_out, str(tmp_path), spec.model_dump_json(), count=2)
    metrics, actual = torch.load(tmp_path / "found.pt", weights_only=True)
    alone = spec_for()
    queue = random_queue(policy_of(alone, seed=1, scale=1.5), num_groups=4)
    lengths = queue.fields["prompt_ids"].lengths + queue.fields["response_ids"].lengths
    longest = (lengths == _longest(queue)).nonzero().flatten().tolist()
    assert metrics["left_out"] == {queue.meta.keys[row]: _longest(queue) for row in longest}
    assert metrics["left_out_sequences"] == len(longest)
    rows = queue.fields["response_mask"].unbind()
    for row in longest:
        rows[row][:] = False
    policy = policy_of(alone, scale=1.5)
    trained = rank_of(alone, policy, queue.replaced(response_mask=Jagged.from_list(rows)))
    recorder: Any = Recorder(policy)
    runner: Any = trained.runner
    runner.engine.optimizer = recorder
    expected = trained.train(StepCommand(1, queue.meta)).metrics
    expected_gradient = _flat(recorder.gradients)
    assert (actual - expected_gradient).norm() <= 1e-6 * expected_gradient.norm()
    assert metrics["trained_tokens"] == expected["trained_tokens"]
    assert metrics["reward_mean"] == pytest.approx(expected["reward_mean"])


LOSS = """
import torch

from services.trainer.algorithm.loss import TokenLoss


def short(tokens):
    lengths = tokens.segments.lengths
    if lengths.max() > 10 or lengths.sum() > 30:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return TokenLoss(-tokens.advantages * tokens.logprobs)
"""
"""Simulates GPUs with memory for responses of 10 tokens and micro-batches of 30."""


@pytest.mark.timeout(300)
def test_several_ranks_continue_without_a_sequence_that_exceeds_memory(
    plumbing: Path, tmp_path: Path, system: System
) -> None:
    (tmp_path / "loss.py").write_text(LOSS)
    prompts = "".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(10, 42))
    (tmp_path / "prompts.jsonl").write_text(prompts)
    stops = json.dumps(list("aeioubcdfghjklmnprst"))
    result = system.train(
        plumbing,
        "trainer.world_size=2",
        "trainer.checkpoint.every=1",
        f"algorithm.loss={tmp_path}/loss.py:short",
        "rollout.max_response_tokens=14",
        f"rollout.sampling.stop={stops}",
        "trainer.steps=2",
        # A slow machine may report the end of one worker twice.
        "limits.max_restarts=12",
    )
    assert result.code == 0, result.out + result.err
    run_id = result.folder.name
    checks = check_run(system.state, run_id)
    with sqlite3.connect(system.state / "slipstream.db") as connection:
        query = "SELECT type, message, data_json FROM events WHERE run_id = ?"
        events = connection.execute(query, (run_id,)).fetchall()
    causes = [text for kind, text, _ in events if kind == "WorkerLost"]
    assert any("does not fit into memory" in text for text in causes)
    left_out_events = [json.loads(data) for kind, _, data in events if kind == "SamplesLeftOut"]
    assert left_out_events
    # Prompts have 11 tokens.
    assert all(tokens > 21 for event in left_out_events for tokens in event["samples"].values())
    # A step that is repeated after the loss of a worker reports them again.
    left_out = {name for event in left_out_events for name in event["samples"]}
    assert len(left_out) < checks["trained"] * 4
