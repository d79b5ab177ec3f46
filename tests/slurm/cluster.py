"""A Slurm cluster on this machine: the daemons of Debian's slurm-wlm, with nodes that are all this host."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from services.common.host import free_port

_PORTS = range(10_000, 20_000)
_READY_S = 30.0
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
SlurmctldPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,bf_max_time=1
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
MpiDefault=none
SlurmdTimeout=30
KillWait=5
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=600
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=2 PreemptMode=OFF
"""


@dataclass
class Cluster:
    """A running cluster.

    Each node has eight processors, its own loopback address, and two devices that Slurm takes for GPUs.
    """

    root: Path
    nodes: Sequence[str]
    environment: Mapping[str, str]
    processes: list[psutil.Process] = field(default_factory=list)

    def command(self, *words: str, timeout_s: float = 30.0) -> str:
        """Returns the output of a command of Slurm."""
        result = subprocess.run(
            words, env=dict(self.environment), capture_output=True, text=True, timeout=timeout_s
        )
        assert result.returncode == 0, (words, result.stderr)
        return result.stdout

    def submit(self, script: Path, *arguments: str, options: Sequence[str] = ()) -> str:
        """Submits a batch script and returns the job's id."""
        output = self.command("sbatch", "--parsable", *options, str(script), *arguments)
        return output.strip().partition(";")[0]

    def state(self, job: str) -> str:
        """Returns the state of a job, such as RUNNING."""
        text = self.command("scontrol", "show", "job", job, "--oneliner")
        return text.partition("JobState=")[2].split()[0]

    def kill_node(self, name: str) -> None:
        """Kills a node's daemon and everything that it started."""
        daemon = int((self.root / f"{name}.pid").read_text())
        os.kill(daemon, signal.SIGKILL)
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                # The daemon of a step has no such variable, but its child has.
                if process.environ().get("SLURMD_NODENAME") == name and self._is_ours(process):
                    parent = process.parent()
                    if parent is not None and parent.name().startswith("slurmstepd"):
                        parent.kill()
                    process.kill()

    def _is_ours(self, process: psutil.Process) -> bool:
        return process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]


def missing_programs() -> list[str]:
    return [
        name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None
    ]


@contextmanager
def running_cluster(root: Path, names: Sequence[str]) -> Iterator[Cluster]:
    """Runs a cluster until the block ends; the daemons and all jobs end with it."""
    for folder in ("state", "munge", *(f"spool-{name}" for name in names)):
        (root / folder).mkdir()
    lines = [_CONFIGURATION.format(root=root, port=free_port(_PORTS))]
    for number, name in enumerate(names, 11):
        lines.append(
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.{number} "
            f"Port={free_port(_PORTS)} CPUs=8 Gres=gpu:2\n"
        )
    configuration = root / "slurm.conf"
    # Node lines come before the partition that names all nodes.
    head, _, tail = lines[0].partition("PartitionName")
    configuration.write_text(head + "".join(lines[1:]) + "PartitionName" + tail)
    for number in (0, 1):
        os.mknod(root / f"gpu{number}", 0o600 | 0o020000, os.makedev(1, 3))
    (root / "gres.conf").write_text(f"Name=gpu File={root}/gpu[0-1] Flags=nvidia_gpu_env\n")
    environment = {name: text for name, text in os.environ.items() if not name.startswith("SLURM")}
    # The jobs run the command of this environment, which need not be active.
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    cluster = Cluster(root, names, {**environment, "PATH": path, "SLURM_CONF": str(configuration)})
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    try:
        _start_munge(root / "munge")
        cluster.command("slurmctld", "-c")
        for name in names:
            cluster.command("slurmd", "-N", name)
        _await_nodes(cluster)
        yield cluster
    finally:
        _end(cluster, before)


def _start_munge(folder: Path) -> None:
    """Starts a credential service with a new key."""
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    folder.chmod(0o711)
    options = {
        "--socket": "socket",
        "--key-file": "key",
        "--pid-file": "munged.pid",
        "--log-file": "munged.log",
        "--seed-file": "seed",
    }
    words = ["munged", "--force", *(f"{name}={folder / file}" for name, file in options.items())]
    subprocess.run(words, check=True, timeout=30, capture_output=True)


def _await_nodes(cluster: Cluster) -> None:
    end = time.monotonic() + _READY_S
    states: set[str] = set()
    while time.monotonic() < end:
        states = set(cluster.command("sinfo", "-h", "-N", "-o", "%T").split())
        if states == {"idle"}:
            return
        time.sleep(0.2)
    log = (cluster.root / "slurmctld.log").read_text()[-2000:]
    raise AssertionError(f"nodes are {states} after {_READY_S:.0f} s: {log}")


def _end(cluster: Cluster, before: set[int]) -> None:
    """Kills the daemons and what they started: they detach from this process, but have its configuration."""
    for _ in range(2):  # a daemon may start one more process before it ends
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                # The daemon of a step has no such variable, but a folder of the cluster.
                is_ours = process.environ().get("SLURM_CONF") == cluster.environment["SLURM_CONF"]
                is_ours |= process.cwd().startswith(str(cluster.root))
                if is_ours and process.pid not in before and process.pid != os.getpid():
                    process.kill()
    with suppress(OSError, ValueError):
        os.kill(int((cluster.root / "munge" / "munged.pid").read_text()), signal.SIGTERM)
