"""The allocation of this job: its nodes by component, from Slurm's environment and ``scontrol``."""

import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.launchers import Site
from services.common.runspec.loader import SpecError
from services.extras.slurm.address import AddressError, address_of
from services.extras.slurm.settings import SlurmSettings, slurm_environment

_SCONTROL_S = 30.0
_DEFAULT_PORT = "6818"
_FACT = re.compile(r"(\w+)=(\S+)")
_SETTING = re.compile(r"^(\w+)\s*=\s*(\S+)", re.MULTILINE)
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True, slots=True)
class Component:
    """A whole allocation, or one component of a heterogeneous job."""

    job_id: str
    """Id of the component, which is a separate job."""
    group: int | None
    """Index of the component (``srun --het-group``); None outside of heterogeneous jobs."""
    tasks: Mapping[str, int]
    """Number of tasks of each node, in Slurm's order of the nodes."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The nodes of a job."""

    job_id: str
    components: Sequence[Component]

    @property
    def nodes(self) -> list[str]:
        return [node for component in self.components for node in component.tasks]


def read_allocation(environment: Mapping[str, str]) -> Allocation:
    """Returns the allocation that Slurm's variables describe.

    Raises:
        SpecError: If this process is not in an allocation, or ``scontrol`` fails.
    """
    job_id = environment.get("SLURM_JOB_ID", "")
    if not job_id:
        raise SpecError(
            [
                "--launcher slurm: this is no Slurm allocation (SLURM_JOB_ID is not set); submit the command "
                "with sbatch, or run it in salloc; examples/slurm has scripts"
            ]
        )
    if missing_commands := [
        name for name in ("srun", "scontrol", "scancel") if shutil.which(name) is None
    ]:
        raise SpecError(
            [
                f"--launcher slurm: {', '.join(missing_commands)} not found in PATH; add the folder of "
                "Slurm's programs"
            ]
        )
    size = int(environment.get("SLURM_HET_SIZE", 0))
    if not size:
        return Allocation(job_id, [_component(environment, None)])
    return Allocation(job_id, [_component(environment, group) for group in range(size)])


def _component(environment: Mapping[str, str], group: int | None) -> Component:
    suffix = "" if group is None else f"_HET_GROUP_{group}"
    node_list = environment[f"SLURM_JOB_NODELIST{suffix}"]
    nodes = scontrol("show", "hostnames", node_list).split()
    counts = task_counts(environment.get(f"SLURM_TASKS_PER_NODE{suffix}", ""))
    counts += [1] * (len(nodes) - len(counts))
    return Component(
        environment[f"SLURM_JOB_ID{suffix}"], group, dict(zip(nodes, counts, strict=False))
    )


def task_counts(text: str) -> list[int]:
    """Returns the tasks of each node from ``SLURM_TASKS_PER_NODE``, such as ``2(x3),1``."""
    return [int(count) for count, repeats in _COUNT.findall(text) for _ in range(int(repeats or 1))]


def node_daemons(nodes: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Returns the ``NodeAddr`` of each node and the port of its slurmd.

    Raises:
        SpecError: If ``scontrol`` fails.
    """
    lines = scontrol("show", "node", ",".join(nodes), "--oneliner").splitlines()
    facts = [dict(_FACT.findall(line)) for line in lines]
    default = _DEFAULT_PORT
    if any("Port" not in fact for fact in facts):
        default = dict(_SETTING.findall(scontrol("show", "config"))).get("SlurmdPort", default)
    return {
        fact["NodeName"]: (fact.get("NodeAddr", ""), int(fact.get("Port", default)))
        for fact in facts
        if "NodeName" in fact
    }


def site() -> Site:
    """Returns this host, with its address for workers on the nodes of the allocation.

    Raises:
        SpecError: If this process is not in an allocation, or this host has no usable address.
    """
    environment, settings = slurm_environment(), SlurmSettings()
    allocation = read_allocation(environment)
    addresses = {name: address for name, (address, _) in node_daemons(allocation.nodes).items()}
    # A command of salloc may run on a host outside of the allocation.
    configured = addresses.get(environment.get("SLURMD_NODENAME", ""), socket.gethostname())
    try:
        host = address_of(
            network=settings.network,
            configured=configured,
            peer=next(iter(addresses.values()), configured),
        )
    except AddressError as error:
        raise SpecError([f"--launcher slurm: {error}"]) from error
    return Site(host=host, has_other_hosts=True)


def scontrol(*arguments: str) -> str:
    """Returns the output of ``scontrol``.

    Raises:
        SpecError: If it fails or does not answer in time.
    """
    command = ["scontrol", *arguments]
    try:
        scontrol_run = subprocess.run(  # noqa: S603 -- arguments of this module
            command, check=True, capture_output=True, text=True, timeout=_SCONTROL_S
        )
    except (subprocess.SubprocessError, OSError) as error:
        error_output = getattr(error, "stderr", None) or str(error)
        raise SpecError(
            [f"--launcher slurm: {' '.join(command)} failed: {str(error_output).strip()}"]
        ) from error
    return scontrol_run.stdout
