"""Tests of records: a replay of the recorded steps produces weights with the same bits in every version."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from services.common.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from services.common.fields import MODEL_INPUTS
from services.common.runspec.run import RunSpec
from services.extras.replay import files
from services.extras.replay.comparing import compare_records
from services.extras.replay.recorder import StepRecorder, start_digests
from services.extras.replay.replay_plan import plan_replay
from services.extras.replay.training import RecordedBatches
from services.trainer.ranks.rank import Rank
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand
from tests.helpers.batches import Queue, policy_of, random_queue, rank_of, spec_of

EARLY = {"trainer": {"accumulate_early": True}, "algorithm": {"max_staleness": 0}}


def recorded_rank(
    folder: Path, spec: RunSpec, queue: Queue, *, step: int = 0, **options: Any
) -> Rank:
    recorder = StepRecorder(folder / files.FOLDER, 0)
    rank = rank_of(spec, policy_of(spec), queue, root=folder, step_recorder=recorder, **options)
    recorder.begin(step, spec, rank.runner.engine)
    return rank


def record_run(
    folder: Path, spec: RunSpec, *, steps: int = 3, queue: Queue | None = None, early: bool = False
) -> Path:
    """Trains and records steps, and returns the folder of the record."""
    queue = queue or random_queue(policy_of(spec))
    rank = recorded_rank(folder, spec, queue)
    for step in range(1, steps + 1):
        if early:
            rank.accumulate(queue.meta.select(range(4, 8)), weight_version=step - 1)
            rank.accumulate(queue.meta.select(range(4, 12)), weight_version=step - 1)
        rank.train(StepCommand(step, queue.meta, num_steps=10))
    rank.snapshot(steps)
    return folder / files.FOLDER


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the record of three steps, which all tests share and must not change."""
    return record_run(tmp_path_factory.mktemp("recorded"), spec_of())


@pytest.fixture
def record(recorded: Path, tmp_path: Path) -> Path:
    """Returns a copy of the shared record."""
    return Path(shutil.copytree(recorded, tmp_path / files.FOLDER))


def replayed_weights(record: Path, spec: RunSpec) -> list[bool]:
    """Replays a record, and returns for each version whether its digests equal the recorded ones."""
    source = RecordedBatches(is_experiment=False)
    rank = rank_of(spec, policy_of(spec), source)  # type: ignore[arg-type]
    equal = []
    for step in files.recorded_steps(record)[1:]:
        source.step = recorded_step = files.read_step(record, step, num_ranks=1)
        meta, *parts = recorded_step.ranks[0].metas
        for group in parts:
            rank.accumulate(group, weight_version=recorded_step.numbers.weight_version)
        rank.train(StepCommand(step, meta, num_steps=recorded_step.numbers.num_steps))
        rows = rank.runner.engine.export_weights(rows=True)
        equal.append(start_digests(rows)() == recorded_step.numbers.weights)
    return equal


def rewritten(record: Path, step: int, **changes: Any) -> None:
    """Changes values in columns of a recorded step."""
    (rank,) = files.read_step(record, step, num_ranks=1).ranks
    columns = dict(rank.columns)
    for name, change in changes.items():
        old = columns[name]
        values = old.values.values.clone()
        change(values)
        columns[name] = files.Columns(
            old.rows, Jagged(values, old.values.lengths, is_scalar=old.values.is_scalar)
        )
    files.write_step(record, 0, rank.numbers, metas=rank.metas, columns=columns)


def add_one(index: int) -> Any:
    def change(values: torch.Tensor) -> None:
        values[index] += 1

    return change


@pytest.mark.parametrize("is_early", [False, True])
def test_replayed_versions_equal_the_recorded_ones(tmp_path: Path, *, is_early: bool) -> None:
    spec = spec_of(**EARLY) if is_early else spec_of(trainer={"updates_per_step": 2})
    record = record_run(tmp_path, spec, early=is_early)
    parts = [files.read_step(record, step, num_ranks=1).numbers.num_parts for step in (1, 2, 3)]
    assert parts == [2 * is_early] * 3
    assert replayed_weights(record, spec) == [True] * 3


def test_another_loss_gives_other_versions_from_the_first_step(recorded: Path) -> None:
    assert replayed_weights(recorded, spec_of(algorithm={"loss": "gspo"})) == [False] * 3


def test_gradients_that_were_dropped_are_no_part_of_the_record(tmp_path: Path) -> None:
    spec = spec_of(**EARLY)
    queue = random_queue(policy_of(spec))
    rank = recorded_rank(tmp_path, spec, queue)
    rank.accumulate(queue.meta.select(range(4)), weight_version=0)
    rank.train(StepCommand(1, queue.meta.select(range(4, 16))))
    rank.snapshot(1)
    step = files.read_step(tmp_path / files.FOLDER, 1, num_ranks=1)
    assert (step.numbers.num_parts, step.meta.num_keys) == (0, 12)
    assert len(step.ranks[0].columns["rewards"].rows) == 12


def test_samples_that_share_model_inputs_find_them_by_place() -> None:
    spec = spec_of()
    queue = random_queue(policy_of(spec)).meta
    column = queue.column("prompt_ids")
    inputs = column.__class__(
        name=MODEL_INPUTS,
        dtype="uint8",
        row_rank=1,
        tail_shape=(),
        lengths=(3,) * 16,
        blob_indexes=(0,) * 16,
        offsets=(0,) * 8 + (3,) * 8,
    )
    meta = queue.__class__(
        partition_id="run/train",
        keys=queue.keys,
        fields=(inputs,),
        blobs=queue.blobs,
        tags=queue.tags,
    )
    values = Jagged.from_list([torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])])
    columns = {MODEL_INPUTS: files.Columns(torch.tensor([0, 8]), values)}
    numbers = files.StepNumbers(step=1, weight_version=0, num_steps=1)
    step = files.RecordedStep([files.RankStep(numbers, (meta,), columns)])
    model_inputs = step.fetch(meta.select([3, 12]), (MODEL_INPUTS,))[MODEL_INPUTS]
    assert model_inputs.values.tolist() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(NotFoundError):
        step.fetch(meta, ("rewards",))


def test_a_resumed_run_replaces_the_steps_that_it_trains_again(tmp_path: Path) -> None:
    spec = spec_of()
    record = record_run(tmp_path, spec, steps=4)
    assert files.recorded_steps(record) == [0, 1, 2, 3, 4]
    resumed = recorded_rank(tmp_path, spec, random_queue(policy_of(spec), seed=7), step=2)
    resumed.snapshot(2)
    assert files.recorded_steps(record) == [0, 1, 2]
    assert [start["step"] for start in files.read_starts(record)] == [0, 2]
    second_step = files.read_step(record, 2, num_ranks=1)
    assert second_step.meta.num_keys == 16, "the step before the resumption stays"


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [cut_off, flip_a_bit, Path.unlink])
def test_a_damaged_record_is_refused_before_anything_is_computed(record: Path, damage) -> None:
    plan_replay(record)
    damage(files.rank_file(record, 2, 0))
    with pytest.raises(DataLossError, match=r"step-00000002.rank-0"):
        plan_replay(record)
    plan_replay(record, last=1)


@pytest.mark.parametrize("name", ["values/rollout_logprobs", "lengths/response_ids", "meta/0"])
def test_a_tampered_record_names_the_tensor(record: Path, name: str) -> None:
    file = files.rank_file(record, 2, 0)
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata()
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    tensors[name][0] += 1
    save_file(tensors, file, metadata=header)
    with pytest.raises(DataLossError, match=rf"step-00000002.rank-0.*{name}"):
        plan_replay(record)


def test_a_tampered_number_of_a_record_is_named(record: Path) -> None:
    file = files.rank_file(record, 2, 0)
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata()
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    (key,) = header
    numbers = json.loads(header[key])
    numbers["metrics"]["loss"] = 7.0
    save_file(tensors, file, metadata={key: json.dumps(numbers)})
    with pytest.raises(DataLossError, match=r"step-00000002.rank-0.*header"):
        plan_replay(record)


def test_a_start_that_was_cut_off_is_refused(record: Path) -> None:
    cut_off(record / "run.json")
    with pytest.raises(DataLossError, match=r"run\.json"):
        plan_replay(record)


def started_with(record: Path, section: str, **values: Any) -> None:
    file = record / "run.json"
    starts = json.loads(file.read_text())
    starts[0][section] |= values
    file.write_text(json.dumps(starts))


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("packages", "torch", "2.4.0"),
        ("hardware", "device", "NVIDIA H100"),
        ("hardware", "kernels", "ARM"),
    ],
)
def test_another_machine_or_torch_is_refused_unless_curves_are_compared(
    record: Path, section: str, name: str, value: str
) -> None:
    started_with(record, section, **{name: value})
    with pytest.raises(FailedPreconditionError, match=name):
        plan_replay(record)
    assert any(name in note for note in plan_replay(record, changes=["algorithm.loss=gspo"]).notes)


def test_a_replay_starts_from_the_newest_checkpoint_before_its_first_step(tmp_path: Path) -> None:
    spec = spec_of()
    queue = random_queue(policy_of(spec))
    rank = recorded_rank(tmp_path, spec, queue)
    for step in (1, 2, 3):
        rank.train(StepCommand(step, queue.meta))
        if step == 2:
            rank.checkpointer.write(rank.snapshot(step))
    rank.snapshot(3)
    record = tmp_path / files.FOLDER
    assert plan_replay(record).start_step == 0
    assert plan_replay(record, first=2).start_step == 0
    plan = plan_replay(record, first=3)
    assert plan.start_step == 2
    assert plan.spec.trainer.checkpoint.start_from == str(tmp_path / "step-00000002")
    cut_off(next((tmp_path / "step-00000002").glob("*.safetensors")))
    with pytest.raises(DataLossError):
        plan_replay(record, first=3)
    with pytest.raises(InvalidArgumentError, match="1 to 3"):
        plan_replay(record, last=4)


def test_a_missing_start_checkpoint_and_other_ranks_are_refused(tmp_path: Path) -> None:
    gone = spec_of(trainer={"checkpoint": {"start_from": str(tmp_path / "gone")}})
    record = record_run(tmp_path, gone)
    with pytest.raises(FailedPreconditionError, match="gone"):
        plan_replay(record)
    with pytest.raises(InvalidArgumentError, match=r"trainer\.world_size"):
        plan_replay(record, changes=["trainer.world_size=2"])
    with pytest.raises(NotFoundError, match="record: full"):
        plan_replay(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"rewards": add_one(3)}, "reward"),
        ({"response_ids": add_one(3), "rewards": add_one(3)}, "tokens"),
        ({"version_runs": add_one(0), "response_ids": add_one(3)}, "version"),
        ({"rollout_logprobs": add_one(5)}, "logprobs"),
    ],
)
def test_runs_part_at_the_first_step_with_another_cause(
    recorded: Path, record: Path, changes: Mapping[str, Any], cause: str
) -> None:
    rewritten(record, 2, **changes)
    difference, keys = compare_records(recorded, record)
    assert (difference.cause, difference.step) == (cause, 2)
    assert not keys


def test_a_run_that_is_repeated_does_not_part(recorded: Path, tmp_path: Path) -> None:
    difference, keys = compare_records(recorded, record_run(tmp_path, spec_of()))
    assert (difference.cause, difference.step) == ("none", 3)
    assert not keys


def test_runs_part_in_batch_seed_loss_and_length(recorded: Path, tmp_path: Path) -> None:
    spec, queue = spec_of(), random_queue(policy_of(spec_of()))

    def cause(name: str, other: Queue = queue, spec: RunSpec = spec, **options: Any) -> str:
        record = record_run(tmp_path / name, spec, queue=other, **options)
        difference, keys = compare_records(recorded, record)
        assert bool(keys) == (spec is not last_spec)
        return difference.cause

    last_spec = spec
    fewer = Queue(queue.meta.select(range(12)), queue.fields)
    assert (
        cause("batch", Queue(fewer.meta, {k: v.select(range(12)) for k, v in queue.fields.items()}))
        == "batch"
    )
    assert cause("loss", spec=spec_of(algorithm={"loss": "gspo"})) == "weights"
    assert cause("length", steps=2) == "length"
    queues = [
        Queue(
            queue.meta.__class__(**{**fields(queue), "tags": {**queue.meta.tags, "seed": seeds}}),
            queue.fields,
        )
        for seeds in ((1,) * 16, (1,) * 15 + (2,))
    ]
    records = [
        record_run(tmp_path / f"seed{i}", spec, queue=seeded_queue)
        for i, seeded_queue in enumerate(queues)
    ]
    assert compare_records(*records)[0].cause == "seed"


def fields(queue: Queue) -> dict[str, Any]:
    names: Sequence[str] = ("partition_id", "keys", "fields", "blobs")
    return {name: getattr(queue.meta, name) for name in names}
