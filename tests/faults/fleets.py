"""Attached servers and their router: processes behind links that die, freeze and lose their connections."""

import json
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest import mock

import psutil

from tests.faults.training import Training, processes_of
from tests.helpers.cli import environment
from tests.helpers.links import Link, ThreadedLinks
from tests.helpers.ports import free_port

TOKEN = "a-token-of-servers"
_SERVERS = ("server-0", "server-1")
_ROUTER = "router"
_MAX_FREEZE_S = 25.0
"""Longer than the time-out of an answer and than a rollout's lease of a server."""

Fault = Callable[[random.Random], None]


class Fleet:
    """Two servers and a router that lists them; each is a process that is reached through a link.

    Args:
        folder: Folder for logs and secrets.
        spec: Specification of the model that the servers have.
    """

    def __init__(self, folder: Path, spec: Path) -> None:
        self._folder = folder
        self._links = ThreadedLinks()
        self._ports = {name: free_port() for name in (*_SERVERS, _ROUTER)}
        self._link_of: dict[str, Link] = {}
        self._spec = spec
        self._processes: dict[str, psutil.Popen] = {}
        self._timers: list[threading.Timer] = []

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Starts everything, and lets runs find the servers' token, while the block runs."""
        secrets = self._folder / "secrets"
        secrets.mkdir()
        (secrets / "FLEET").write_text(TOKEN)
        variables = {
            "SLIPSTREAM_ROLLOUT_SECRETS_DIRECTORY": str(secrets),
            "SLIPSTREAM_ROLLOUT_REWARD_HOSTS": '["127.0.0.1"]',
        }
        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, variables))
            stack.enter_context(self._links.serving())
            stack.callback(self._close)
            for name, port in self._ports.items():
                self._link_of[name] = self._links.add(port)
            for name in self._ports:
                self._start(name)
            yield

    def settings(self) -> tuple[str, ...]:
        """Returns the overrides of a run that attaches to the servers."""
        arguments = {"addresses": [self._link_of[_ROUTER].address], "token": {"secret": "FLEET"}}
        return (
            "rollout.engine=vllm-server",
            f"rollout.engine_arguments={json.dumps(arguments)}",
            "rollout.replicas=1",
        )

    def faults(self, training: Training) -> Mapping[str, Fault]:
        """Returns what can happen to servers, router and rollout, by name."""
        faults: dict[str, Fault] = {
            "freeze rollout-0": lambda draws: self._freeze_rollout(training, draws)
        }
        for name in self._ports:
            faults[f"kill {name}"] = lambda _, name=name: self._kill(name)
            faults[f"freeze {name}"] = lambda draws, name=name: self._suspend(
                self._processes[name], draws
            )
            faults[f"cut {name}"] = lambda draws, name=name: self._change(
                self._link_of[name].cut, name, draws
            )
            faults[f"silence {name}"] = lambda draws, name=name: self._change(
                self._link_of[name].freeze, name, draws
            )
        return faults

    def _start(self, name: str) -> None:
        port = str(self._ports[name])
        if name == _ROUTER:
            listed = self._folder / "servers.txt"
            listed.write_text("\n".join(self._link_of[server].address for server in _SERVERS))
            command = ["tests.helpers.router_server", port, str(listed)]
        else:
            command = ["tests.helpers.torch_server", port, str(self._spec), TOKEN]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = psutil.Popen(
                [sys.executable, "-m", *command], env=environment(), stdout=log, stderr=log
            )

    def _kill(self, name: str) -> None:
        """Kills a process and starts it again."""
        self._processes[name].kill()
        self._processes[name].wait()
        self._start(name)

    def _suspend(self, process: psutil.Process, draws: random.Random) -> None:
        """Stops a process for a random time."""
        process.suspend()

        def resume() -> None:
            with suppress(psutil.NoSuchProcess):  # it was killed meanwhile
                process.resume()

        self._later(resume, draws)

    def _freeze_rollout(self, training: Training, draws: random.Random) -> None:
        process = processes_of(psutil.Process(training.process.pid)).get("rollout-0")
        if process is not None:
            with suppress(psutil.NoSuchProcess):
                self._suspend(process, draws)

    def _change(self, change: Callable[[], None], name: str, draws: random.Random) -> None:
        """Changes a link for a random time."""
        self._links.change(change)
        self._later(lambda: self._links.change(self._link_of[name].restore), draws)

    def _later(self, end: Callable[[], None], draws: random.Random) -> None:
        timer = threading.Timer(draws.uniform(0.1, _MAX_FREEZE_S), end)
        timer.start()
        self._timers.append(timer)

    def _close(self) -> None:
        for timer in self._timers:
            timer.cancel()
            timer.join()
        for process in self._processes.values():
            process.kill()
            process.wait()
