"""A scoring policy sharded over two processes equals the unsharded one: scores, weights, shutdown."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from services.common.errors import NotFoundError, UnavailableError
from services.common.runspec.run import RunSpec
from services.extras.scoring.leader import ScoringLeader, follow
from services.extras.scoring.worker import LoadedScorer, build_policy, build_reference
from services.trainer.engines.base import UNSCORED
from services.trainer.ranks.command_group import CommandGroup, RankFailedError
from services.trainer.settings import TrainerSettings
from tests.helpers.batches import Queue, policy_of, random_queue, spec_of
from tests.helpers.ranks import run_ranks
from tests.helpers.shortage import limited

pytestmark = pytest.mark.timeout(300)

Outcome = dict[str, Any]


class Transfers:
    """Fake transferqueue: a queue in memory, and a folder for added fields."""

    def __init__(self, queue: Queue, folder: Path) -> None:
        self._queue = queue
        self._folder = folder

    def fetch(self, meta: Any, fields: Any) -> Any:
        if not set(meta.keys) <= set(self._queue.meta.keys):
            raise NotFoundError("samples were released")
        return self._queue.fetch(meta, fields)

    def add(self, meta: Any, fields: Any) -> None:
        for name, rows in fields.items():
            for key, row in zip(meta.keys, rows, strict=True):
                torch.save(row.clone(), self._folder / f"{name}-{key}.pt")


def spec_with(
    ranks: int,
    dtype: str = "float32",
    *,
    scoring: Mapping[str, Any] | None = None,
    model: str = "tiny:qwen2-0.4m",
) -> RunSpec:
    spec = spec_of(
        model={"path": model},
        algorithm={"kl": {"coefficient": 0.1}},
        trainer={"updates_per_step": 2, "dtype": dtype, "tokens_per_micro_batch": 60},
    )
    document = spec.model_dump(mode="json", exclude_unset=True)
    groups = ["train", ["logp", "ref_logp"], "generate"]
    total = ranks + 2
    document["topology"] = {
        "task_groups": groups,
        "ratios": [1 / total, ranks / total, 1 / total],
        "gpus": total,
        "scoring_ranks": ranks,
        "scoring": scoring or {},
    }
    document["weight_sync"] = {"mode": "cpu_async"}
    return RunSpec.model_validate(document)


def queue_for(spec: RunSpec) -> Queue:
    return random_queue(policy_of(spec, seed=1), num_groups=3)


def built(
    spec: RunSpec, folder: Path, *, role: str, rank: int = 0, world_size: int | None = None
) -> LoadedScorer:
    settings = TrainerSettings.model_validate(
        {
            "role": role,
            "RANK": rank,
            "WORLD_SIZE": world_size or spec.topology.scoring_ranks,
            "controller_address": "none:1",
            "run_id": "run",
            "worker_id": "worker-0",
            "device": "cpu",
            "model_cache": folder / "models",
            "state_directory": folder,
        }
    )
    transfers: Any = Transfers(queue_for(spec), folder)
    build = build_reference if role == "ref_logp" else build_policy
    return build(spec, settings, transfers=transfers, progress=lambda activity: None)


def work(leader: ScoringLeader, queue: Queue, spec: RunSpec, folder: Path, role: str) -> None:
    """Writes scores of samples and of a text to the folder; the role ``logp`` first receives weights."""
    if role == "logp":
        weights = dict(policy_of(spec, seed=1).model.named_parameters())
        leader.adopt(7, {name: value.detach() for name, value in weights.items()})
    leader.add(queue.meta.select([0]))
    leader.add(queue.meta)
    torch.save(torch.tensor(leader.score_text([1, 2, 3, 4])), folder / "text.pt")


def _rank(rank: int, ranks: int, folder: str, spec_json: str, role: str) -> None:
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    spec = RunSpec.model_validate_json(spec_json)
    scorer = built(spec, Path(folder), role=role, rank=rank)
    if rank > 0:
        follow(CommandGroup(ranks), scorer.scorer, scorer.fields)
    else:
        leader = ScoringLeader(
            scorer.scorer, scorer.fields, command_group=CommandGroup(ranks), version=0
        )
        work(leader, queue_for(spec), spec, Path(folder), role)
        gone = random_queue(policy_of(spec), num_groups=5).meta.select(list(range(12, 20)))
        with pytest.raises(NotFoundError):
            leader.add(gone)
        leader.add(queue_for(spec).meta.select([0]))
        leader.stop()
    distributed.destroy_process_group()


def _outgrow(rank: int, folder: str, spec_json: str, limit: int) -> None:
    """Only rank 1 runs out of memory, and ends."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    spec = RunSpec.model_validate_json(spec_json)
    scorer = built(spec, Path(folder), role="ref_logp", rank=rank)
    cause = "a rank failed.*: rank 1: a micro-batch of .* does not fit into memory"
    if rank > 0:
        limited(scorer.scorer._engine.module, limit, scores=True)
        with pytest.raises(RankFailedError, match=cause):
            follow(CommandGroup(2), scorer.scorer, scorer.fields)
        return
    leader = ScoringLeader(scorer.scorer, scorer.fields, command_group=CommandGroup(2), version=0)
    with pytest.raises(RankFailedError, match=cause):
        leader.add(queue_for(spec).meta)
    leader.stop()


def _lose(rank: int, ranks: int, folder: str, spec_json: str) -> None:
    """Rank 1 ends before the first batch."""
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    spec = RunSpec.model_validate_json(spec_json)
    scorer = built(spec, Path(folder), role="ref_logp", rank=rank)
    if rank == 0:
        leader = ScoringLeader(
            scorer.scorer, scorer.fields, command_group=CommandGroup(ranks), version=0
        )
        with pytest.raises(UnavailableError, match="a rank failed"):
            leader.add(queue_for(spec).meta)


def scored(folder: Path) -> Outcome:
    return {
        file.stem: torch.load(file, weights_only=True) for file in sorted(folder.glob("*-*.pt"))
    } | {"text": torch.load(folder / "text.pt", weights_only=True)}


@pytest.mark.parametrize(
    ("role", "dtype", "tolerance"),
    [("ref_logp", "float32", 1e-5), ("logp", "float32", 1e-5), ("ref_logp", "bfloat16", 0.02)],
)
def test_two_processes_score_what_one_does(
    tmp_path: Path, role: str, dtype: str, tolerance: float
) -> None:
    alone, apart = tmp_path / "1", tmp_path / "2"
    alone.mkdir()
    apart.mkdir()
    spec = spec_with(1, dtype)
    scorer = built(spec, alone, role=role)
    leader = ScoringLeader(scorer.scorer, scorer.fields, version=0)
    work(leader, queue_for(spec), spec, alone, role)
    run_ranks(_rank, 2, str(apart), spec_with(2, dtype).model_dump_json(), role, count=2)
    expected, actual = scored(alone), scored(apart)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=tolerance, rtol=0)
    if role == "logp":
        assert {int(v) for k, v in actual.items() if k.startswith("proximal_version")} == {7}
        rollout = queue_for(spec).fields["rollout_logprobs"].values
        names = [f"proximal_logprobs-{key}" for key in queue_for(spec).meta.keys]
        torch.testing.assert_close(
            torch.cat([actual[name] for name in names]), rollout, atol=1e-5, rtol=0
        )


@pytest.mark.parametrize(
    ("role", "model", "ranks", "scoring"),
    [
        ("ref_logp", "tiny:qwen3_moe-0.7m", 4, {"tensor_parallel": 2, "expert_parallel": 2}),
        ("logp", "tiny:qwen3_moe-0.7m", 2, {"expert_parallel": 2}),
        ("logp", "tiny:qwen2-0.4m", 2, {"tensor_parallel": 2}),
        ("logp", "tiny:qwen2-0.4m", 4, {"tensor_parallel": 2}),
        ("logp", "tiny:qwen3_moe-0.7m", 4, {"tensor_parallel": 2, "expert_parallel": 2}),
        ("logp", "tiny:qwen2-0.4m", 2, {"cpu_offload": True}),
        ("ref_logp", "tiny:qwen2-0.4m", 2, {"cpu_offload": True}),
        # A dense teacher beside a mixture whose experts are shared.
        ("ref_logp", "tiny:qwen2-0.4m", 2, {"expert_parallel": 2}),
        ("ref_logp", "tiny:qwen2-0.4m", 4, {"tensor_parallel": 2, "expert_parallel": 2}),
    ],
)
def test_workers_with_a_parallelism_of_their_own_score_what_one_process_does(
    tmp_path: Path, role: str, model: str, ranks: int, scoring: dict[str, Any]
) -> None:
    alone, apart = tmp_path / "alone", tmp_path / "apart"
    alone.mkdir()
    apart.mkdir()
    spec = spec_with(1, model=model)
    scorer = built(spec, alone, role=role)
    leader = ScoringLeader(scorer.scorer, scorer.fields, version=0)
    work(leader, queue_for(spec), spec, alone, role)
    divided = spec_with(ranks, model=model, scoring=scoring)
    run_ranks(_rank, ranks, str(apart), divided.model_dump_json(), role, count=ranks)
    expected, scores = scored(alone), scored(apart)
    assert expected.keys() == scores.keys()
    for name, value in expected.items():
        torch.testing.assert_close(scores[name], value, atol=1e-5, rtol=0)


def test_a_rank_that_is_gone_is_an_outage_and_not_a_fault(tmp_path: Path) -> None:
    run_ranks(_lose, 2, str(tmp_path), spec_with(2).model_dump_json(), count=2)


def test_a_wrong_number_of_processes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 processes for this worker, but 1 were started"):
        built(spec_with(2), tmp_path, role="ref_logp", world_size=1)


def test_ranks_that_outgrow_memory_start_again_and_leave_it_unscored(tmp_path: Path) -> None:
    spec = spec_with(2)
    queue = queue_for(spec)
    lengths = (queue.fields["prompt_ids"].lengths + queue.fields["response_ids"].lengths).tolist()
    # The first limit fails a micro-batch, the second a single sequence.
    for limit in (30, 15):
        (tmp_path / "store").unlink(missing_ok=True)
        run_ranks(_outgrow, str(tmp_path), spec.model_dump_json(), limit, count=2)
    (file,) = (tmp_path / "oom").glob("worker-0-1.json")
    content = json.loads(file.read_text())
    assert min(lengths) < content["too_long"] <= max(lengths)
    (tmp_path / "store").unlink()
    run_ranks(_rank, 2, str(tmp_path), spec.model_dump_json(), "ref_logp", count=2)
    for key, length in zip(queue.meta.keys, lengths, strict=True):
        scores = torch.load(tmp_path / f"ref_logprobs-{key}.pt")
        assert (scores == UNSCORED).all() == (length >= content["too_long"])
