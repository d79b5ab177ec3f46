"""Reports what one node of the allocation offers: ``python -m services.extras.slurm.probe ARGUMENTS``.

Runs as one task of a step on every node, and prints one line of JSON.
"""

import json
import os
import random
import socket
import sys
from contextlib import suppress
from ipaddress import ip_network
from pathlib import Path

from services.common.host import usable_processors
from services.controller.launch.gpus import host_gpus
from services.extras.slurm.address import AddressError, address_of

_NUM_PORTS = 32
# Between the ports of well-known services and Linux' ephemeral ports, as for workers of one host.
_PORTS = range(20_000, 32_000)


def main() -> None:
    """Prints the facts of this node; the argument is JSON of what ``nodes.ask_nodes`` knows."""
    arguments = json.loads(sys.argv[1])
    name = os.environ["SLURMD_NODENAME"]
    network = ip_network(arguments["network"]) if arguments["network"] else None
    facts = {
        "name": name,
        # Without the variable, Slurm allocated no GPU of this node, even if the node has some.
        "gpus": host_gpus(os.environ.get("CUDA_VISIBLE_DEVICES", "").replace("NoDevFiles", "")),
        "processors": usable_processors(),
        "ports": _free_ports(),
        "sees_state": Path(arguments["stamp"]).exists(),
        "address": "",
        "problem": "",
    }
    try:
        facts["address"] = address_of(
            network=network,
            configured=arguments["addresses"].get(name, ""),
            peer=arguments["peer"],
        )
    except AddressError as error:
        facts["problem"] = str(error)
    sys.stdout.write(json.dumps(facts) + "\n")


def _free_ports() -> list[int]:
    """Returns random free ports, which differ between the jobs of a node."""
    ports = []
    for port in random.sample(_PORTS, 2 * _NUM_PORTS):
        with suppress(OSError), socket.create_server(("", port)):
            ports.append(port)
    return ports[:_NUM_PORTS]


if __name__ == "__main__":
    main()
