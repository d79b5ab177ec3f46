"""Tests of the allocation that Slurm's variables describe."""

import os
import stat
from pathlib import Path

import pytest

from services.common.runspec.loader import SpecError
from services.extras.slurm import allocation
from services.extras.slurm.allocation import node_daemons, read_allocation, site, task_counts


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs programs that answer like Slurm's; ``scontrol`` reads its answers from files."""
    for name in ("srun", "scancel"):
        program(tmp_path / name, "exit 0")
    program(tmp_path / "scontrol", f'cat "{tmp_path}/$(echo "$*" | tr " /" "__")"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    return tmp_path


def program(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("text", "counts"), [("2(x2)", [2, 2]), ("4,1(x3),2", [4, 1, 1, 1, 2]), ("", [])]
)
def test_tasks_of_nodes_are_counted(text, counts):
    assert task_counts(text) == counts


def test_an_allocation_has_its_nodes_with_their_tasks(slurm):
    (slurm / "show_hostnames_n[1-2]").write_text("n1\nn2\n")
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2,1"}
    allocation = read_allocation(variables)
    assert allocation.nodes == ["n1", "n2"]
    assert [(c.job_id, c.group, c.tasks) for c in allocation.components] == [
        ("7", None, {"n1": 2, "n2": 1})
    ]


def test_a_heterogeneous_job_has_components(slurm):
    for name in ("a1", "b1"):
        (slurm / f"show_hostnames_{name}").write_text(f"{name}\n")
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST": "a1",
        "SLURM_JOB_ID_HET_GROUP_0": "7",
        "SLURM_JOB_ID_HET_GROUP_1": "8",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "a1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "b1",
    }
    components = read_allocation(variables).components
    assert [(c.job_id, c.group, [*c.tasks]) for c in components] == [
        ("7", 0, ["a1"]),
        ("8", 1, ["b1"]),
    ]


def test_a_command_outside_of_an_allocation_is_refused(slurm):
    with pytest.raises(SpecError, match="sbatch"):
        read_allocation({})


def test_a_failed_command_of_slurm_is_reported_with_its_output(slurm):
    program(slurm / "scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SpecError, match="Unable to contact slurm controller"):
        node_daemons(["n1"])


def test_a_command_of_slurm_that_does_not_answer_is_reported(slurm, monkeypatch):
    program(slurm / "scontrol", "exec sleep 60")
    monkeypatch.setattr(allocation, "_SCONTROL_S", 0.1)
    with pytest.raises(SpecError, match="scontrol show node n1"):
        node_daemons(["n1"])


def test_services_listen_on_the_address_of_their_node(slurm, monkeypatch):
    (slurm / "show_hostnames_n1").write_text("n1\n")
    (slurm / "show_node_n1_--oneliner").write_text(
        "NodeName=n1 Arch=x86_64 NodeAddr=127.0.0.11 Port=17001 State=IDLE\n"
    )
    for name, value in {"JOB_ID": "7", "JOB_NODELIST": "n1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    host_site = site()
    assert (host_site.host, host_site.has_other_hosts) == ("127.0.0.11", True)
    monkeypatch.setenv("SLIPSTREAM_SLURM_NETWORK", "203.0.113.0/24")
    with pytest.raises(SpecError, match="SLIPSTREAM_SLURM_NETWORK"):
        site()
