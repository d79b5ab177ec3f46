"""Loss, gradients and weights do not depend on ranks, parallelism, micro-batches or shared prefixes."""

import asyncio
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from services.common.errors import FailedPreconditionError, UnavailableError
from services.common.runspec.run import RunSpec, WeightSyncSpec
from services.trainer.batch.samples import IncompleteBatchError
from services.trainer.engines.fsdp.parallel import build_topology, distribute
from services.trainer.engines.fsdp.weights import WeightExport
from services.trainer.ranks.command_group import CommandGroup
from services.trainer.ranks.follower import Follower
from services.trainer.ranks.leader import Leader
from services.trainer.ranks.rank import Rank, canary_of
from services.wire.step_command import StepCommand
from tests.helpers.batches import CPU, Queue, engine_of, policy_of, random_queue, rank_of, spec_for
from tests.helpers.pages import example
from tests.helpers.ranks import run_ranks

Outcome = dict[str, Any]


class Recorder:
    """Fake optimizer that records the gradients."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.param_groups: list[dict[str, Any]] = [{}]
        self.gradients: dict[str, torch.Tensor] = {}

    def step(self) -> None:
        for name, parameter in self._module.named_parameters():
            assert parameter.grad is not None, name
            grad = parameter.grad
            self.gradients[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()

    def zero_grad(self, *, set_to_none: bool) -> None:
        self._module.zero_grad(set_to_none=set_to_none)


def train_once(spec: RunSpec, *, rank: int = 0, world_size: int = 1) -> Outcome:
    """Trains one batch with a masked sequence; returns loss, gradients and weights."""
    policy = policy_of(spec, scale=1.5)
    queue = random_queue(policy_of(spec, seed=1, scale=1.5), num_groups=4)
    lengths = queue.fields["response_mask"].lengths
    queue.fields["response_mask"].values[: int(lengths[0])] = False
    topology = build_topology(spec.trainer, device=CPU, rank=rank, world_size=world_size)
    distribute(policy, spec.trainer, topology)
    trained = rank_of(spec, policy, queue, topology=topology)
    recorder: Any = Recorder(policy)
    trained.runner.engine.optimizer = recorder
    if spec.trainer.accumulate_early:
        for rows in ([8, 9, 10, 11], [0, 1, 2, 3, 12, 13, 14, 15]):
            trained.accumulate(queue.meta.select(rows), weight_version=0)
    result = trained.train(StepCommand(1, queue.meta))
    weights = dict(WeightExport(policy, dtype=torch.float32).weight_tensors())
    return {"metrics": result.metrics, "gradients": recorder.gradients, "weights": weights}


def _child(rank: int, world_size: int, folder: str, spec_json: str) -> None:
    if world_size > 1:
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )
    outcome = train_once(RunSpec.model_validate_json(spec_json), rank=rank, world_size=world_size)
    if rank == 0:
        torch.save(outcome, f"{folder}/outcome.pt")
    distributed.destroy_process_group()


def _rank_of_several(rank: int, world_size: int, folder: str, spec_json: str) -> tuple[Rank, Queue]:
    """Returns a rank that trains a random batch and saves to the folder."""
    spec = RunSpec.model_validate_json(spec_json)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    policy = policy_of(spec)
    queue = random_queue(policy_of(spec))
    topology = build_topology(spec.trainer, device=CPU, rank=rank, world_size=world_size)
    distribute(policy, spec.trainer, topology)
    root = Path(folder) / "checkpoints"
    return rank_of(spec, policy, queue, topology=topology, root=root), queue


def _score_twice(rank: int, folder: str, spec_json: str) -> None:
    """Scores the canary on one sharded rank before and after its layers' weights are set to 0."""
    spec = RunSpec.model_validate_json(spec_json)
    policy = policy_of(spec, scale=1.5)
    topology = build_topology(spec.trainer, device=CPU, rank=rank, world_size=1)
    distribute(policy, spec.trainer, topology)
    engine = engine_of(policy, spec, topology=topology)
    scores = [canary_of(engine).logprobs]
    with torch.no_grad():
        for name, rows in engine.export_weights(rows=True):
            if ".layers." in name:
                rows.zero_()
    scores.append(canary_of(engine).logprobs)
    (Path(folder) / "scores.json").write_text(json.dumps(scores))
    distributed.destroy_process_group()


def _save(rank: int, world_size: int, folder: str, spec_json: str) -> None:
    """Trains one step on several ranks and saves it."""
    trained, queue = _rank_of_several(rank, world_size, folder, spec_json)
    trained.train(StepCommand(1, queue.meta))
    trained.checkpointer.write(trained.snapshot(1))
    distributed.destroy_process_group()


def _save_again(rank: int, world_size: int, folder: str, spec_json: str) -> None:
    """Saves on several ranks, first while rank 0 cannot create a folder, then while it can."""
    trained, queue = _rank_of_several(rank, world_size, folder, spec_json)
    root = Path(folder) / "checkpoints"
    for step in (1, 2):
        trained.train(StepCommand(step, queue.meta))
        if rank == 0 and step == 1:
            root.touch()
        elif rank == 0:
            root.unlink()
        distributed.barrier()
        with suppress(FailedPreconditionError):
            trained.checkpointer.write(trained.snapshot(step))
    distributed.destroy_process_group()


def _serve(rank: int, world_size: int, folder: str, spec_json: str) -> None:
    """Rank 0 trains, gathers weights, saves and stops; rank 1 executes its commands."""
    trained, queue = _rank_of_several(rank, world_size, folder, spec_json)
    command_group = CommandGroup(world_size)
    if rank > 0:
        follower = Follower(command_group, trained)
        follower.follow()
        torch.save(dict(follower.weight_tensors()), Path(folder) / "rows-1.pt")
    else:
        leader = Leader()
        leader.attach(trained, command_group)
        asyncio.run(_lead(leader, queue, Path(folder)))
    distributed.destroy_process_group()


def _lose(rank: int, world_size: int, folder: str, spec_json: str, is_midway: bool) -> None:
    """Rank 1 ends before the first step or between two layers of its forward pass."""
    trained, queue = _rank_of_several(rank, world_size, folder, spec_json)
    if rank > 0:
        if is_midway:
            engine: Any = trained.runner.engine
            engine.module.forward = lambda *_, **__: os._exit(0)
            Follower(CommandGroup(world_size), trained).follow()
        return
    leader = Leader()
    leader.attach(trained, CommandGroup(world_size))
    with pytest.raises(UnavailableError, match="a rank failed"):
        asyncio.run(leader.train_step(StepCommand(1, queue.meta)))


async def _lead(leader: Leader, queue: Queue, folder: Path) -> None:
    with pytest.raises(IncompleteBatchError):
        await leader.train_step(StepCommand(1, queue.without("rollout_logprobs").meta))
    await leader.train_step(StepCommand(1, queue.meta))
    await leader.train_step(StepCommand(2, queue.meta))
    await leader.save(2)
    torch.save(dict(leader.weight_tensors()), folder / "rows-0.pt")
    (folder / "canary.json").write_text(json.dumps(leader.score_canary().logprobs))
    leader.stop()


def on_ranks(spec: RunSpec, folder: Path) -> Outcome:
    world_size = spec.trainer.world_size
    run_ranks(_child, world_size, str(folder), spec.model_dump_json(), count=world_size)
    return dict(torch.load(folder / "outcome.pt", weights_only=True))


def assert_same(
    actual: Outcome, expected: Outcome, *, tolerance: float = 1e-6, metrics: float = 2e-6
) -> None:
    for name in ("loss", "grad_norm", "reward_mean", "entropy", "clip_fraction", "kl_rollout"):
        assert actual["metrics"][name] == pytest.approx(
            expected["metrics"][name], rel=metrics, abs=metrics / 20
        )
    gradients = expected["gradients"]
    expected_gradients = torch.cat([gradient.flatten() for gradient in gradients.values()])
    gradients_found = torch.cat([actual["gradients"][name].flatten() for name in gradients])
    assert (gradients_found - expected_gradients).norm() <= tolerance * expected_gradients.norm()
    for name, weight in expected["weights"].items():
        assert torch.equal(actual["weights"][name], weight), name


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"aggregation": "seq-mean-token-mean"},
        {"advantage": "reinforce_pp"},
        {"loss": "gspo"},
        {"rejection": [{"level": "seq_mean", "statistic": "k3", "upper": 0.5}]},
    ],
    ids=str,
)
def test_any_split_into_micro_batches_gives_the_same_gradient(algorithm: Any) -> None:
    whole = train_once(spec_for(algorithm=algorithm, share_prefixes=False))
    for tokens in (1, 30, 100):
        assert_same(train_once(spec_for(algorithm=algorithm, tokens_per_micro_batch=tokens)), whole)


EARLY = {"max_staleness": 0}


@pytest.mark.parametrize(
    "algorithm",
    [
        *({"aggregation": mode} for mode in ("token-mean", "token-sum", "seq-mean-token-sum")),
        {"aggregation": "seq-mean-token-sum-norm", "advantage": "dr_grpo"},
        {"loss": "gspo"},
        {"advantage": "pass_at_k", "entropy_coefficient": 0.01, "correction": "decoupled"},
    ],
    ids=str,
)
def test_groups_that_are_trained_early_give_the_gradient_of_the_whole_batch(algorithm: Any) -> None:
    algorithm |= EARLY
    whole = train_once(spec_for(algorithm=algorithm))
    early = train_once(spec_for(algorithm=algorithm, accumulate_early=True))
    assert_same(early, whole)
    for name in ("samples", "tokens", "trained_tokens", "response_length_mean", "is_weight_mean"):
        assert early["metrics"][name] == pytest.approx(whole["metrics"][name])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_train_early_groups_as_one_trains_the_whole_batch(
    stage: int, tmp_path: Path
) -> None:
    early = spec_for(algorithm=EARLY, world_size=2, zero_stage=stage, accumulate_early=True)
    assert_same(on_ranks(early, tmp_path), train_once(spec_for(algorithm=EARLY)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("tiny:qwen2-0.4m", {"world_size": 2, "tokens_per_micro_batch": 60}),
        ("tiny:qwen2-0.4m", {"world_size": 2, "tokens_per_micro_batch": 60, "zero_stage": 1}),
        ("tiny:llama-0.4m", {"world_size": 4, "activation_checkpointing": True}),
        ("tiny:qwen3-0.4m", {"world_size": 4, "tensor_parallel": 2}),
    ],
    ids=str,
)
def test_any_number_of_ranks_gives_the_same_gradient(
    model: str, options: dict[str, Any], tmp_path: Path
) -> None:
    expected = train_once(spec_for(model=model, share_prefixes=False))
    # Tensor parallelism splits the sums inside a layer, so their rounding differs a little more.
    tolerance = 3e-6 if "tensor_parallel" in options else 1e-6
    actual = on_ranks(spec_for(model=model, **options), tmp_path)
    assert_same(actual, expected, tolerance=tolerance)
    metrics = actual["metrics"]
    fewest, most = metrics["rank_tokens_min"], metrics["rank_tokens_max"]
    assert 0 < fewest <= most < expected["metrics"]["rank_tokens_max"]
    assert metrics["rank_tokens_ratio"] >= 1.0
    assert 0 < metrics["pack_fill"] <= 1.0


@pytest.mark.timeout(300)
def test_a_loss_of_the_users_own_trains_two_ranks_like_the_one_it_copies(tmp_path: Path) -> None:
    file = example("adding.md", "clipped.py", tmp_path)
    own_loss = {"loss": f"{file}:clipped", "loss_arguments": {"low": 0.2, "high": 0.28}}
    outcomes = []
    for name, algorithm in (("own", own_loss), ("ppo", {"loss": "ppo", "dual_clip": None})):
        folder = tmp_path / name
        folder.mkdir()
        outcomes.append(on_ranks(spec_for(algorithm=algorithm, world_size=2), folder))
    outcome, ppo_outcome = outcomes
    assert outcome["metrics"]["loss"] == ppo_outcome["metrics"]["loss"]
    for gradient, expected in zip(
        outcome["gradients"].values(), ppo_outcome["gradients"].values(), strict=True
    ):
        assert torch.equal(gradient, expected)


@pytest.mark.timeout(300)
def test_one_rank_in_half_precision_adds_up_all_micro_batches(tmp_path: Path) -> None:
    expected = train_once(spec_for())
    actual = on_ranks(spec_for(dtype="bfloat16", tokens_per_micro_batch=60), tmp_path)
    assert_same(actual, expected, tolerance=0.02, metrics=0.02)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("offload", [False, "optimizer"])
def test_one_rank_resumes_a_checkpoint_of_two(tmp_path: Path, offload: Any) -> None:
    spec = spec_for(world_size=2, cpu_offload=offload)
    run_ranks(_save, 2, str(tmp_path), spec.model_dump_json(), count=2)

    alone = policy_of(spec)
    queue = random_queue(policy_of(spec))
    rank = rank_of(spec, alone, queue)
    rank.train(StepCommand(1, queue.meta))
    rank.train(StepCommand(2, queue.meta))

    resumed = policy_of(spec, seed=1)
    resumed_rank = rank_of(spec, resumed, queue, root=tmp_path / "checkpoints")
    assert resumed_rank.restore() == 1
    resumed_rank.train(StepCommand(2, queue.meta))
    for name, value in alone.named_parameters():
        parameter = dict(resumed.named_parameters())[name]
        torch.testing.assert_close(parameter, value, rtol=0, atol=1e-5)


@pytest.mark.timeout(300)
def test_ranks_save_together_again_after_one_could_not(tmp_path: Path) -> None:
    spec = spec_for(world_size=2)
    run_ranks(_save_again, 2, str(tmp_path), spec.model_dump_json(), count=2)
    resumed = rank_of(
        spec, policy_of(spec), random_queue(policy_of(spec)), root=tmp_path / "checkpoints"
    )
    assert resumed.restore() == 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("senders", ["ranks", "leader"])
def test_the_other_ranks_follow_rank_0(tmp_path: Path, senders: str) -> None:
    spec = spec_for(world_size=2)
    spec = spec.model_copy(update={"weight_sync": WeightSyncSpec(senders=senders)})
    run_ranks(_serve, 2, str(tmp_path), spec.model_dump_json(), count=2)
    policy = policy_of(spec)
    queue = random_queue(policy_of(spec))
    rank = rank_of(spec, policy, queue)
    for step in (1, 2):
        rank.train(StepCommand(step, queue.meta))
    rows = [torch.load(tmp_path / f"rows-{rank}.pt", weights_only=True) for rank in (0, 1)]
    export = WeightExport(policy, dtype=torch.float32)
    for name, value in export.weight_tensors():
        parameter = (
            rows[0][name]
            if senders == "leader"
            else torch.cat([r[name] for r in rows if name in r])
        )
        torch.testing.assert_close(parameter, value, rtol=0, atol=1e-5)
    canary = json.loads((tmp_path / "canary.json").read_text())
    assert canary == pytest.approx(canary_of(rank.runner.engine).logprobs, abs=1e-4)
    assert (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").is_file()


@pytest.mark.timeout(300)
def test_nothing_gathered_outlives_a_score(tmp_path: Path) -> None:
    spec = spec_for(dtype="bfloat16")
    run_ranks(_score_twice, str(tmp_path), spec.model_dump_json(), count=1)
    before, after = json.loads((tmp_path / "scores.json").read_text())
    assert before != after, "it was scored under weights that were there before"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_midway", [False, True])
def test_a_rank_that_is_gone_is_an_outage_and_not_a_fault(tmp_path: Path, is_midway: bool) -> None:
    spec = spec_for(world_size=2)
    run_ranks(_lose, 2, str(tmp_path), spec.model_dump_json(), is_midway, count=2)
