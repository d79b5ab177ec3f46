"""Tests of the questions to the nodes of an allocation, with programs that behave like Slurm's."""

import os
from pathlib import Path

import pytest

from services.common.errors import FailedPreconditionError
from services.extras.slurm import nodes
from services.extras.slurm.allocation import Allocation, Component
from services.extras.slurm.nodes import ask_nodes
from services.extras.slurm.settings import SlurmSettings

# It ignores SIGTERM.
SRUN = """\
trap '' TERM
echo '{"name": "n1"}'
echo -n '{"name": "n2", "addr'
echo 'slurmstepd: n2 is slow' >&2
while :; do sleep 0.05; done
"""


async def test_only_nodes_that_do_not_answer_in_time_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": ""}.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}")
        (programs / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(nodes, "_KILL_S", 0.5)
    allocation = Allocation("7", [Component("7", None, {"n1": 1, "n2": 1})])
    with pytest.raises(FailedPreconditionError, match=r"^nodes n2 of .*n2 is slow"):
        await ask_nodes(allocation, SlurmSettings(node_timeout_s=1), tmp_path)
