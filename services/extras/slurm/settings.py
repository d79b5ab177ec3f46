"""Settings of the launcher, and Slurm's variables in the environment of a job."""

import os

from pydantic import Field, IPvAnyNetwork
from pydantic_settings import BaseSettings, SettingsConfigDict

# srun reads all other variables of Slurm as requests for resources, such as those of the batch script.
_PASSED = frozenset(
    {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_HET_SIZE"}
)
_OF_COMPONENTS = "_HET_GROUP_"


class SlurmSettings(BaseSettings):
    """Settings of the launcher from ``SLIPSTREAM_SLURM_*``."""

    model_config = SettingsConfigDict(
        env_prefix="SLIPSTREAM_SLURM_", extra="ignore", use_attribute_docstrings=True
    )

    network: IPvAnyNetwork | None = None
    """Network of the nodes' addresses, such as 10.4.0.0/16. Default: a node's NodeAddr if that is an address
    of the node, otherwise its address on the route to the first node."""
    srun_arguments: tuple[str, ...] = ()
    """JSON list of further arguments of srun, such as those of a container plugin."""
    shards: bool = False
    """True to start a storage shard of the transferqueue on each further node, for samples that are too many
    for the memory or the network of one."""
    node_timeout_s: float = Field(120.0, gt=0)
    """Max seconds until every node of the allocation has answered at the start."""


def slurm_environment() -> dict[str, str]:
    """Returns the variables with which Slurm described the allocation to this process."""
    return {name: value for name, value in os.environ.items() if name.startswith("SLURM")}


def step_environment() -> dict[str, str]:
    """Returns the environment of a step.

    It is that of this process without the settings of the controller, which contain its key, and without the
    variables that srun would read as requests.
    """
    return {name: value for name, value in os.environ.items() if _is_passed(name)}


def _is_passed(name: str) -> bool:
    if name.startswith("SLIPSTREAM_CONTROLLER_"):
        return False
    if name.startswith(("SLURM", "SBATCH_", "SRUN_", "SALLOC_")):
        return name in _PASSED or _OF_COMPONENTS in name
    return True
