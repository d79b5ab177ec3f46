"""Tests of the placement of groups on shards."""

import pytest

from services.common.fields import group_of
from services.wire.data.placement import place
from services.wire.transferqueue.types import Shard


def shards(*names: str) -> list[Shard]:
    return [Shard(shard_id=name, endpoint="") for name in names]


def test_a_new_shard_takes_only_its_share() -> None:
    groups = [f"group-{n}" for n in range(3000)]
    before = [place(group, shards("a", "b")) for group in groups]
    after = [place(group, shards("a", "b", "c")) for group in groups]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"c"}
    assert 900 < len(moved) < 1100
    assert 1350 < before.count("a") < 1650


def test_without_a_shard_there_is_no_place() -> None:
    with pytest.raises(ValueError, match="no shard"):
        place("g", [])


def test_the_group_is_the_key_without_its_member() -> None:
    assert group_of("run.5.2") == "run.5"
    assert group_of("alone") == "alone"
