"""Reports of other ranks to rank 0, and simultaneous failures of several ranks."""

import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import distributed

from services.trainer.ranks import command_group
from services.trainer.ranks.command_group import CommandGroup


def test_rank_0_knows_what_another_rank_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    store = distributed.HashStore()
    monkeypatch.setattr(command_group, "_default_store", lambda: store)
    monkeypatch.setattr(distributed, "get_rank", lambda: 2)
    ranks = CommandGroup(3)
    assert ranks.outage() == ""
    ranks.share_outage("tq:1 is unreachable")
    assert ranks.outage() == "rank 2: tq:1 is unreachable"
    ranks.share_outage("")
    assert ranks.outage() == ""


def test_a_worker_whose_ranks_have_ended_reports_no_outage() -> None:
    ranks = CommandGroup(2)
    ranks.share_outage("tq:1 is unreachable")
    assert ranks.outage() == ""


@pytest.mark.parametrize("name", ["get_rank", "_default_store"])
def test_a_rank_may_fail_while_another_thread_aborts_the_groups(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ranks = CommandGroup(2)
    monkeypatch.setattr(command_group, "abort_processes", lambda: None)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: 1)

    def abort() -> None:
        ranks._abort("rank 0: out of memory")
        raise ValueError("Default process group has not been initialized")

    monkeypatch.setattr(distributed if name == "get_rank" else command_group, name, abort)
    assert "rank 0: out of memory" in str(ranks.fail("rank 1: out of memory, too"))
    assert "rank 0: out of memory" in str(ranks.fail("once more"))


@contextmanager
def worker_of(size: int, *, silent: Collection[int] = ()) -> Iterator[distributed.Store]:
    """Yields the store of a worker on two hosts of two ranks, of which all but the silent ones answer."""
    store = distributed.HashStore()
    for rank in range(size):
        store.set(f"worker/host/{rank}", f"10.0.0.{1 + rank // 2} node-{rank // 2}")
        if rank not in silent:
            store.set(f"worker/present/{rank}", "")
    yield store


@pytest.mark.parametrize(
    ("silent", "named"),
    [
        ((3,), "rank 3 on node-1 (10.0.0.2) does not answer; rank 1: Read error [10.0.0.2]:7"),
        (
            (2, 3),
            "rank 2 on node-1 (10.0.0.2), rank 3 on node-1 (10.0.0.2) do not answer; "
            "rank 1: Read error [10.0.0.2]:7",
        ),
        (
            (),
            "lost a connection to rank 2 on node-1 (10.0.0.2) or rank 3 on node-1 (10.0.0.2); "
            "rank 1: Read error [10.0.0.2]:7",
        ),
    ],
)
def test_the_cause_of_a_failed_collective_names_the_ranks_that_do_not_answer(
    monkeypatch: pytest.MonkeyPatch, silent: tuple[int, ...], named: str
) -> None:
    monkeypatch.setattr(command_group, "abort_processes", lambda: None)
    monkeypatch.setattr(command_group, "_ANSWER_S", 0.1)
    monkeypatch.setattr(distributed, "get_rank", lambda: 1)
    with worker_of(4, silent=silent) as store:
        monkeypatch.setattr(command_group, "_default_store", lambda: store)
        error = CommandGroup(4).fail("Read error [10.0.0.2]:7", blames_others=True)
        assert str(error).endswith(f"restart: {named}")
        assert store.get("worker/end").decode() == named
        assert store.check(["worker/roll-call"])


def test_a_rank_that_failed_by_itself_is_the_cause_of_the_others_failed_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command_group, "abort_processes", lambda: None)
    with worker_of(4, silent=(3,)) as store:
        monkeypatch.setattr(command_group, "_default_store", lambda: store)
        monkeypatch.setattr(distributed, "get_rank", lambda: 3)
        CommandGroup(4).fail("out of memory")
        monkeypatch.setattr(distributed, "get_rank", lambda: 1)
        error = CommandGroup(4).fail("Read error [10.0.0.2]:7", blames_others=True)
    assert str(error).endswith("restart: rank 3: out of memory")


_WAITING_RANK = """
import sys, time
from torch import distributed
from services.trainer.ranks import command_group

rank = int(sys.argv[1])
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
command_group._END_S = 0.1
ranks = command_group.CommandGroup(2)
with ranks.listening():
    if rank == 1:
        ranks.fail("out of memory")
    time.sleep(600)
"""


def test_ranks_that_wait_after_a_failure_kill_themselves_with_their_stacks(tmp_path: Path) -> None:
    command = (sys.executable, "-c", _WAITING_RANK)
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, output = rank.communicate(timeout=120)
            assert rank.returncode == 1
            assert "this rank did not end and is killed" in output
            assert 'File "<string>", line 13 in <module>' in output
    finally:
        for rank in ranks:
            rank.kill()
