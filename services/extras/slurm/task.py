"""One process of a worker, as a task of a step: ``python -m services.extras.slurm.task PLAN``.

srun forwards SIGUSR2 to all processes of a step and answers SIGTERM by killing them. So SIGUSR2 asks this
process to stop the worker, which gets SIGTERM alone: an engine's own processes end with the worker.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.host import interface_of
from services.common.parent import die_with_parent, module_command

_SIGNALLED = 128
"""Exit code, as in shells, of a process that a signal ended: this plus the signal's number."""


def main() -> None:
    """Runs the process of this task until it ends, and exits with its code."""
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    share = plan["nodes"][os.environ["SLURMD_NODENAME"]]
    threads = {"OMP_NUM_THREADS": str(share["threads"])}
    environment = {**threads, **os.environ, **plan["environment"], **_of_node(plan, share)}
    # A worker inherits what is ignored. Slurm sends SIGUSR1 to steps if a job asks for it without "B:".
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    worker = subprocess.Popen(  # noqa: S603 -- a module of this project
        module_command(plan["module"]), env=environment, preexec_fn=die_with_parent
    )
    signal.signal(signal.SIGUSR2, lambda *_: worker.terminate())
    # Slurm sends it to the worker too, which may still save what it has.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = worker.wait()
    sys.exit(_SIGNALLED - code if code < 0 else code)


def _of_node(plan: Mapping[str, Any], share: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables of this task's node and rank."""
    prefix, address = plan["prefix"], share["address"]
    changes = {
        f"{prefix}BIND": f"{address}:0",
        f"{prefix}ADVERTISE_HOST": address,
        "CUDA_VISIBLE_DEVICES": ",".join(share["gpus"]),
    }
    if interface := interface_of(address.strip("[]")):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if name not in os.environ:
                changes[name] = interface
    if plan["ranks"] > 1:
        changes |= {
            "RANK": os.environ["SLURM_PROCID"],
            "LOCAL_RANK": os.environ["SLURM_LOCALID"],
            "WORLD_SIZE": str(plan["ranks"]),
            "MASTER_ADDR": plan["master"].strip("[]"),
            "MASTER_PORT": str(plan["port"]),
        }
    return changes


if __name__ == "__main__":
    main()
