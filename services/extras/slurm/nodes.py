"""Asks every node of the allocation, by a step, for its address, GPUs, processors and free ports."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from services.common.errors import FailedPreconditionError
from services.common.fields import new_id
from services.common.task_group import TaskGroup
from services.extras.slurm.address import in_url
from services.extras.slurm.allocation import Allocation, Component, node_daemons
from services.extras.slurm.placement import Node
from services.extras.slurm.settings import SlurmSettings, step_environment
from services.extras.slurm.steps import StepRequest, srun_command

_KILL_S: Final = 5.0
"""Seconds in which srun ends after each of SIGTERM and SIGKILL."""


async def ask_nodes(
    allocation: Allocation, settings: SlurmSettings, state_directory: Path
) -> list[Node]:
    """Returns the nodes of the allocation, in Slurm's order.

    Raises:
        FailedPreconditionError: If a node does not answer in time, does not see the state directory, or has
            no usable address.
    """
    daemons = await asyncio.to_thread(node_daemons, allocation.nodes)
    addresses = {name: address for name, (address, _) in daemons.items()}
    stamp = state_directory / f".{new_id('nodes')}"
    stamp.touch()
    arguments = {
        "network": str(settings.network or ""),
        "addresses": addresses,
        "peer": next(iter(addresses.values()), ""),
        "stamp": str(stamp),
    }
    try:
        answers = await asyncio.gather(
            *(
                _ask(allocation, component, settings, arguments)
                for component in allocation.components
            )
        )
    finally:
        stamp.unlink()
    nodes = []
    for index, (component, facts) in enumerate(zip(allocation.components, answers, strict=True)):
        for name, tasks in component.tasks.items():
            _check(facts[name], state_directory)
            nodes.append(
                Node(
                    name=name,
                    component=index,
                    address=in_url(facts[name]["address"]),
                    gpus=tuple(facts[name]["gpus"]),
                    tasks=tasks,
                    processors=facts[name]["processors"],
                    ports=tuple(facts[name]["ports"]),
                    daemon=daemons.get(name, ("", 0)),
                )
            )
    return nodes


async def silence(node: Node, timeout_s: float) -> str:
    """Returns why a node does not answer, though Slurm may not have noticed; empty if its slurmd accepts."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(*node.daemon)
    except (OSError, TimeoutError) as error:
        cause = getattr(error, "strerror", None) or f"no answer within {timeout_s:.0f} s"
        return f"node {node.name} does not answer at the port of its slurmd: {cause}"
    writer.close()
    return ""


def _check(facts: Mapping[str, Any], state_directory: Path) -> None:
    name = facts["name"]
    if not facts["sees_state"]:
        raise FailedPreconditionError(
            f"the state directory {state_directory} is another folder on node {name}, or none; set "
            "--state-directory to a folder on a file system that all nodes share"
        )
    if facts["problem"]:
        raise FailedPreconditionError(f"node {name}: {facts['problem']}")


async def _ask(
    allocation: Allocation,
    component: Component,
    settings: SlurmSettings,
    arguments: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """Returns what the nodes of a component report, by node."""
    request = StepRequest(
        name="slipstream-nodes",
        group=component.group,
        nodes=list(component.tasks),
        tasks_per_node=1,
        module="services.extras.slurm.probe",
        arguments=[json.dumps(arguments)],
    )
    command = srun_command(request, job_id=allocation.job_id, extra=settings.srun_arguments)
    process = await asyncio.create_subprocess_exec(
        *command,
        env=step_environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, error_output = await _read(process, settings.node_timeout_s)
    # A line without its end is part of an answer.
    lines = [line for line in output.splitlines(keepends=True) if line.endswith(b"\n")]
    facts = {line["name"]: line for line in map(json.loads, lines)}
    if missing_nodes := [name for name in component.tasks if name not in facts]:
        why = error_output.decode(errors="replace").strip() or "no error output"
        raise FailedPreconditionError(
            f"nodes {', '.join(missing_nodes)} of the allocation gave no answer ({why}); {sys.executable} "
            "and Slipstream must be at the same path on all nodes, and SLIPSTREAM_SLURM_NODE_TIMEOUT_S is "
            f"{settings.node_timeout_s:.0f}"
        )
    return facts


async def _read(process: Process, timeout_s: float) -> tuple[bytes, bytes]:
    """Returns what a process writes to its output and error output until it ends or has been ended."""
    assert process.stdout is not None
    assert process.stderr is not None
    output, error_output = bytearray(), bytearray()
    async with TaskGroup() as tasks:
        pending = {
            tasks.create_task(_append(process.stdout, output)),
            tasks.create_task(_append(process.stderr, error_output)),
            tasks.create_task(process.wait()),
        }
        _, pending = await asyncio.wait(pending, timeout=timeout_s)
        # srun may ignore SIGTERM, and its own children may keep the pipes open after SIGKILL.
        for number in (signal.SIGTERM, signal.SIGKILL):
            if pending:
                with suppress(ProcessLookupError):
                    process.send_signal(number)
                _, pending = await asyncio.wait(pending, timeout=_KILL_S)
        for task in pending:
            task.cancel()
    return bytes(output), bytes(error_output)


async def _append(stream: asyncio.StreamReader, output: bytearray) -> None:
    while chunk := await stream.read(1 << 16):
        output += chunk
