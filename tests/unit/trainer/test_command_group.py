"""Reports of other ranks to rank 0."""

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
