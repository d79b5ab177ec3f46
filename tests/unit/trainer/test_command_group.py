"""Reports of other ranks to rank 0, and simultaneous failures of several ranks."""

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
