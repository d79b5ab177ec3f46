"""Tests that checkpoints restore the exact state, are refused if damaged, and export to other libraries."""

import errno
import os
import shutil
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.common.errors import FailedPreconditionError, NotFoundError
from services.extras.export.checkpoint import export_checkpoint
from services.trainer.checkpoint import manifest
from services.trainer.checkpoint.compatibility import OtherCheckpointError
from services.trainer.collectives import Ranks
from services.trainer.engines.fsdp import checkpoint
from services.trainer.engines.fsdp.parallel import RankTopology
from services.trainer.model.policy import Policy
from services.trainer.ranks import start
from services.trainer.ranks.build import _resume
from services.trainer.ranks.rank import Rank
from services.trainer.settings import TrainerSettings
from services.trainer.steps.updates import NotFiniteError
from services.wire.step_command import StepCommand
from tests.helpers.batches import Queue, policy_of, random_queue, rank_of, spec_of
from tests.helpers.packages import install_from
from tests.helpers.pages import example

SPEC = spec_of()


def _trained(root: Path, *, seed: int = 0) -> tuple[Policy, Rank, Queue]:
    policy = policy_of(SPEC, seed=seed)
    queue = random_queue(policy_of(SPEC))
    return policy, rank_of(SPEC, policy, queue, root=root), queue


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.name[-8:]) for path in root.iterdir())


@pytest.mark.parametrize("file_bytes", [checkpoint.FILE_BYTES, 100_000])
def test_training_resumes_exactly_from_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_bytes: int
) -> None:
    monkeypatch.setattr(checkpoint, "FILE_BYTES", file_bytes)
    policy, rank, queue = _trained(tmp_path)
    for step in (1, 2):
        rank.train(StepCommand(step, queue.meta))
    folder = rank.checkpointer.write(rank.snapshot(2))
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (file_bytes == 100_000)
    rank.train(StepCommand(3, queue.meta))
    other, resumed, _ = _trained(tmp_path, seed=1)
    assert resumed.restore() == 2
    resumed.train(StepCommand(3, queue.meta))
    for name, value in policy.named_parameters():
        torch.testing.assert_close(dict(other.named_parameters())[name], value, rtol=0, atol=1e-7)


def test_an_optimizer_that_makes_its_states_late_is_refused_with_the_first_checkpoint() -> None:
    """A resumed run would go on without these states."""
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    topology = RankTopology(device=torch.device("cpu"), data=Ranks())
    saved = checkpoint.ModelCheckpoint(layer, optimizer, topology=topology)
    saved.save()
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    with pytest.raises(TypeError, match=r"momentum_buffer\.(weight|bias)"):
        saved.save()


@pytest.mark.parametrize(
    ("kind", "state", "dtype"),
    [("adamw_8bit", "exp_avg", torch.uint8), ("momentum", "momentum_buffer", torch.float32)],
)
def test_states_of_other_optimizers_resume_bit_by_bit(
    kind: str, state: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("descent.py", "descent_kind.py"):
        example("adding.md", name, tmp_path)
    install_from(example("adding.md", "descent.toml", tmp_path), monkeypatch)
    spec = spec_of(trainer={"optimizer": {"kind": kind, "learning_rate": 1e-3}})
    queue = random_queue(policy_of(spec))
    policy = policy_of(spec)
    rank = rank_of(spec, policy, queue, root=tmp_path)
    for step in (1, 2):
        rank.train(StepCommand(step, queue.meta))
    snapshot = rank.snapshot(2)
    saved = {
        (name.split(".")[1], value.dtype) for name, value in snapshot.parts[""].tensors.items()
    }
    assert (state, dtype) in saved
    rank.checkpointer.write(snapshot)
    rank.train(StepCommand(3, queue.meta))
    other = policy_of(spec, seed=1)
    resumed = rank_of(spec, other, queue, root=tmp_path)
    assert resumed.restore() == 2
    resumed.train(StepCommand(3, queue.meta))
    for name, value in policy.named_parameters():
        assert torch.equal(dict(other.named_parameters())[name], value), name


def test_a_running_checkpoint_reports_written_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rank, queue = _trained(tmp_path)
    rank.train(StepCommand(1, queue.meta))
    snapshot, reports, write_file = rank.snapshot(1), [], checkpoint._write
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 100_000)
    monkeypatch.setattr(checkpoint, "THREADS", 1)

    def write(*arguments) -> None:
        reports.append(rank.checkpointer.progress())
        write_file(*arguments)
        reports.append(rank.checkpointer.progress())

    monkeypatch.setattr(checkpoint, "_write", write)
    assert rank.checkpointer.progress() == (0, 0)
    rank.checkpointer.write(snapshot)
    written = [progress[0] for progress in reports]
    assert written == sorted(written)
    assert len(set(written)) > 2
    assert written[0] == 0
    assert written[-1] == snapshot.num_bytes
    assert {progress[1] for progress in reports} == {snapshot.num_bytes}
    assert rank.checkpointer.progress() == (0, 0)


def test_the_snapshot_is_not_touched_by_later_steps(tmp_path: Path) -> None:
    _, rank, queue = _trained(tmp_path)
    rank.train(StepCommand(1, queue.meta))
    snapshot = rank.snapshot(1)
    before = {name: value.clone() for name, value in snapshot.parts[""].tensors.items()}
    rank.train(StepCommand(2, queue.meta))
    assert all(
        torch.equal(value, before[name]) for name, value in snapshot.parts[""].tensors.items()
    )


def test_named_checkpoints_are_kept_with_the_newest(tmp_path: Path) -> None:
    _, rank, _ = _trained(tmp_path)
    for step, named_steps in ((1, []), (2, []), (3, [1]), (4, [1]), (5, [3, 9])):
        rank.checkpointer.write(rank.snapshot(step), named_steps)
    assert steps_in(tmp_path) == [3, 4, 5]


def test_a_run_that_went_back_keeps_its_new_checkpoints(tmp_path: Path) -> None:
    _, rank, _ = _trained(tmp_path)
    for step in (2, 4):
        damaged = rank.checkpointer.write(rank.snapshot(step))
    next(damaged.glob("*.safetensors")).unlink()
    assert rank.restore() == 2
    rank.checkpointer.write(rank.snapshot(3))
    assert rank.restore() == 3
    assert steps_in(tmp_path) == [2, 3]


def test_what_a_killed_trainer_left_goes_with_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rank, _ = _trained(tmp_path)

    def die(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    for step, target in ((1, (manifest, "publish")), (2, (manifest.shutil, "rmtree"))):
        with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
            killed.setattr(*target, die)
            rank.checkpointer.write(rank.snapshot(step))
    rank.checkpointer.write(rank.snapshot(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003"]


def test_a_checkpoint_is_never_gone_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rank, _ = _trained(tmp_path)
    rank.checkpointer.write(rank.snapshot(1))
    delete = shutil.rmtree

    def checked(folder: Path, **options: bool) -> None:
        delete(folder, **options)
        assert manifest.newest(tmp_path)[1]["step"] == 1

    monkeypatch.setattr(shutil, "rmtree", checked)
    rank.checkpointer.write(rank.snapshot(1))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_checkpoint_counts_although_an_older_one_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rank, _ = _trained(tmp_path)
    for step in (1, 2):
        rank.checkpointer.write(rank.snapshot(step))

    delete = shutil.rmtree

    def busy(folder: Path, *, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "a reader has a file of it open", str(folder))
        delete(folder, ignore_errors=True)

    monkeypatch.setattr(shutil, "rmtree", busy)
    assert rank.checkpointer.write(rank.snapshot(3)).is_dir()
    assert rank.restore() == 3


def test_a_damaged_checkpoint_is_refused_and_the_previous_one_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, rank, _ = _trained(tmp_path)
    for step in (1, 2, 3):
        folder = rank.checkpointer.write(rank.snapshot(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    shard = next(folder.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert rank.restore() == 2
    assert any("step-00000003" in getattr(record, "reason", "") for record in caplog.records)
    (tmp_path / "step-00000002" / manifest.MANIFEST).unlink()
    with pytest.raises(NotFoundError, match="damaged: step-00000003, step-00000002"):
        rank.restore()


@pytest.mark.parametrize("is_own", [True, False])
def test_a_rank_that_has_no_other_checkpoint_cannot_start(tmp_path: Path, is_own: bool) -> None:
    _, rank, _ = _trained(tmp_path)
    folder = rank.checkpointer.write(rank.snapshot(2))
    settings = TrainerSettings(controller_address="unused", run_id="run", worker_id="trainer-0")
    root, start_from = (tmp_path, None) if is_own else (tmp_path / "new", str(folder))
    assert _resume(rank, root, start_from, settings) == 2
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(manifest.UnusableCheckpointError):
        _resume(rank, root, start_from, settings)


@pytest.mark.parametrize(
    "error", [manifest.UnusableCheckpointError("damaged"), OtherCheckpointError("other")]
)
async def test_the_controller_learns_that_a_worker_cannot_start(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    reports = []

    class Session:
        spec, transferqueue_address = SPEC, "unused"

        def report(self, **_: object) -> None:
            pass

        def report_outages(self, outage: object) -> None:
            pass

        async def report_own_failure(self, cause: str, *, code: str) -> None:
            reports.append((cause, code))

    def build(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(start, "connect_data", lambda *_: nullcontext(None))
    monkeypatch.setattr(start, "QueueTransfers", lambda *_: SimpleNamespace(finish=nothing))
    ranks = SimpleNamespace(broadcast=lambda command: None)
    settings = TrainerSettings(controller_address="unused", run_id="run", worker_id="trainer-0")
    with pytest.raises(type(error)):
        async with AsyncExitStack() as stack:
            await start.load(stack, Session(), ranks, settings, build)
    assert reports == [(str(error), error.reason)]


async def nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "free space there"),
        (errno.EDQUOT, "free space there"),
        (None, "free space there"),  # of a library that has its own text
        (errno.EROFS, "a folder that the trainer can write to"),
        (errno.EACCES, "a folder that the trainer can write to"),
    ],
)
def test_a_folder_that_takes_no_checkpoint_is_reported_with_a_fix_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None, fix: str
) -> None:
    def fail(*_: Any) -> Path:
        raise OSError("no space left") if number is None else OSError(number, os.strerror(number))

    _, rank, queue = _trained(tmp_path / "checkpoints")
    monkeypatch.setattr(rank.checkpointer, "_write", fail)
    with pytest.raises(FailedPreconditionError, match=fix):
        rank.checkpointer.write(rank.snapshot(1))
    assert not rank.train(StepCommand(2, queue.meta)).skipped


def test_a_checkpoint_below_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _, rank, _ = _trained(tmp_path / "file" / "checkpoints")
    with pytest.raises(FailedPreconditionError, match="a folder that the trainer can write to"):
        rank.checkpointer.write(rank.snapshot(1))


def test_too_many_skipped_steps_go_back_to_the_checkpoint_and_then_end_the_run(
    tmp_path: Path,
) -> None:
    spec = spec_of(algorithm={"max_nonfinite_steps": 0})
    policy = policy_of(spec)
    queue = random_queue(policy)
    rank = rank_of(spec, policy, queue, root=tmp_path)
    rank.checkpointer.write(rank.snapshot(1))
    saved = {name: value.clone() for name, value in policy.named_parameters()}
    rank.train(StepCommand(2, queue.meta))
    queue.fields["rewards"].values[0] = torch.inf
    assert rank.train(StepCommand(3, queue.meta)).metrics["rewound_to_step"] == 1
    assert all(torch.equal(value, saved[name]) for name, value in policy.named_parameters())
    with pytest.raises(NotFiniteError, match="all steps since the last good checkpoint"):
        rank.train(StepCommand(4, queue.meta))


def test_a_trainer_returns_to_the_last_checkpoint_before_the_skipped_steps(tmp_path: Path) -> None:
    spec = spec_of(algorithm={"max_nonfinite_steps": 1})
    policy = policy_of(spec)
    queue = random_queue(policy)
    rank = rank_of(spec, policy, queue, root=tmp_path)
    rank.train(StepCommand(1, queue.meta))
    rank.checkpointer.write(rank.snapshot(1))
    saved = {name: value.clone() for name, value in policy.named_parameters()}
    rank.train(StepCommand(2, queue.meta))
    queue.fields["rewards"].values[0] = torch.nan
    assert rank.train(StepCommand(3, queue.meta)).skipped
    rank.checkpointer.write(rank.snapshot(3))
    assert rank.train(StepCommand(4, queue.meta)).metrics["rewound_to_step"] == 1
    assert all(torch.equal(value, saved[name]) for name, value in policy.named_parameters())
    # A restarted trainer knows from its checkpoint that the steps before were skipped.
    again = rank_of(spec, policy_of(spec), queue, root=tmp_path)
    assert again.restore() == 3
    assert "rewound_to_step" not in again.train(StepCommand(4, queue.meta)).metrics
    assert again.train(StepCommand(5, queue.meta)).metrics["rewound_to_step"] == 1


def test_skipped_steps_without_a_checkpoint_before_them_end_the_run(tmp_path: Path) -> None:
    spec = spec_of(algorithm={"max_nonfinite_steps": 0})
    policy = policy_of(spec)
    queue = random_queue(policy)
    rank = rank_of(spec, policy, queue, root=tmp_path)
    queue.fields["rewards"].values[0] = torch.nan
    with pytest.raises(NotFiniteError, match="no checkpoint is of an earlier step"):
        rank.train(StepCommand(1, queue.meta))


def test_an_exported_folder_loads_elsewhere(tmp_path: Path) -> None:
    policy, rank, _ = _trained(tmp_path / "checkpoints")
    folder = rank.checkpointer.write(rank.snapshot(1))
    export_checkpoint(folder, SPEC, tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "hf").encode("12+3")])
    policy.model.set_attn_implementation("sdpa")
    torch.testing.assert_close(loaded(ids).logits, policy.model(ids).logits)
