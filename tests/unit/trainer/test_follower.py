"""Tests of the rows that ranks gather together before each sends its own."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.common.errors import DeadlineExceededError
from services.trainer.ranks.follower import Follower, GatheredRows


def test_a_sender_waits_for_rows_that_rank_0_has_not_gathered_yet() -> None:
    gathered, live = GatheredRows(), torch.ones(2)
    received_rows: list[torch.Tensor] = []
    sender = threading.Thread(
        target=lambda: received_rows.extend(rows for _, rows in gathered.wait(10))
    )
    sender.start()
    gathered.set([("weight", live)])
    sender.join(10)
    live.zero_()  # the rows are a copy
    assert [rows.tolist() for rows in received_rows] == [[1.0, 1.0]]
    assert [name for name, _ in gathered.wait(0)] == ["weight"]  # a repeated request finds them too


def test_rows_of_older_weights_are_never_sent() -> None:
    gathered = GatheredRows()
    gathered.set([("weight", torch.ones(1))])
    gathered.clear()
    with pytest.raises(DeadlineExceededError, match="rank 0 of the trainer did not gather"):
        gathered.wait(0)


def test_rows_are_kept_until_all_are_read() -> None:
    engine = SimpleNamespace(weights=SimpleNamespace(gathers_rows=True))
    rank: Any = SimpleNamespace(runner=SimpleNamespace(engine=engine))
    group: Any = None
    follower = Follower(group, rank)
    follower._gathered.set([("first", torch.ones(1)), ("second", torch.ones(1))])
    next(failed := follower.weight_tensors())
    failed.close()
    assert [name for name, _ in follower.weight_tensors()] == ["first", "second"]
    with pytest.raises(DeadlineExceededError):
        follower._gathered.wait(0)


def test_rows_that_replaced_those_read_are_kept() -> None:
    gathered = GatheredRows()
    gathered.set([("weight", torch.zeros(1))])
    read = gathered.wait(0)
    gathered.set([("weight", torch.ones(1))])
    gathered.clear(read)
    assert [rows.tolist() for _, rows in gathered.wait(0)] == [[1.0]]
