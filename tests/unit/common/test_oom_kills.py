"""Tests of whose processes a count of kills for lack of memory contains."""

from pathlib import Path

import pytest

from services.common.host import HOST_KILLS, num_oom_kills, oom_kill_file


@pytest.mark.parametrize(
    ("memberships", "file"),
    [
        ("0::/user.slice/session-1.scope", "user.slice/session-1.scope/memory.events.local"),
        ("0::/", "memory.events.local"),
        ("9:name=systemd:/\n4:memory:/a/b\n0::/", "memory/a/b/memory.oom_control"),
    ],
)
def test_kills_are_counted_in_the_own_control_group(
    tmp_path: Path, memberships: str, file: str
) -> None:
    (tmp_path / "cgroup").write_text(memberships)
    counter = tmp_path / "mounts" / file
    counter.parent.mkdir(parents=True)
    counter.write_text("low 3\noom 4\noom_kill 2\noom_kill_disable 7\n")
    assert oom_kill_file(tmp_path / "cgroup", tmp_path / "mounts") == counter
    assert num_oom_kills(counter) == 2


@pytest.mark.parametrize("memberships", ["0::/elsewhere", "4:memory:/elsewhere\n0::/", ""])
def test_without_a_control_group_that_counts_the_host_is_counted(
    tmp_path: Path, memberships: str
) -> None:
    (tmp_path / "cgroup").write_text(memberships)
    assert oom_kill_file(tmp_path / "cgroup", tmp_path) == HOST_KILLS


def test_where_nothing_counts_the_number_is_0(tmp_path: Path) -> None:
    assert oom_kill_file(tmp_path / "absent", tmp_path) == HOST_KILLS
    assert num_oom_kills(tmp_path / "absent") == 0
