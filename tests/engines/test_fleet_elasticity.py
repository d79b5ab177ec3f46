"""A whole run with real servers that join, are asked to end, and restart with old weights while it trains."""

import importlib.util
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from services.common.models.loading import build_model, load_config
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.engines import ENGINES
from services.common.runspec.run import ModelSpec
from services.extras.fleets.labels import Label
from services.extras.fleets.local import (
    TOKEN,
    LocalServer,
    LocalSglang,
    LocalVllm,
    import_few_models,
)
from services.extras.fleets.protocol import STATE
from tests.helpers.attached_servers import allow_attached_servers
from tests.helpers.cli import SORT4, environment, started
from tests.helpers.logprob_check import check_logprobs
from tests.helpers.ports import free_port

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

_MAX_TOKENS = 64
_DEADLINE_S = 600
"""Longest wait for a server or for some steps: a busy host takes minutes to start a server."""
_GRACE_S = 60
"""Seconds between SIGTERM and SIGKILL; a pod has 30 by default."""
_MORE_STEPS = 3


def _kind(package: str, kind: type[LocalServer], *options: str) -> Any:
    is_missing = importlib.util.find_spec(package) is None
    mark = pytest.mark.skipif(is_missing, reason=f"{package} is not installed here")
    return pytest.param(kind, options, id=kind.engine, marks=mark)


def _old_weights(folder: Path) -> Path:
    """Writes the model of sort4 with the weights with which servers start; returns its folder."""
    spec = ModelSpec(path="tiny:qwen2-0.4m", tokenizer="chars:0123456789=")
    tokenizer = load_tokenizer(spec)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_model(load_config(spec, tokenizer), dtype=torch.float32, device="cpu")
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@contextmanager
def _router(listed: Path) -> Iterator[str]:
    """Yields the address of a router that lists the servers of a file."""
    port = free_port()
    command = [sys.executable, "-m", "tests.helpers.router_server", str(port), str(listed)]
    process = subprocess.Popen(command, env=environment())
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _version(server: LocalServer) -> str:
    """Returns the version that a server says to serve."""
    path = STATE if isinstance(server, LocalVllm) else "/model_info"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    try:
        answer = httpx.get(f"{server.address}{path}", headers=headers, timeout=30, trust_env=False)
    except httpx.TransportError:
        return ""
    if isinstance(server, LocalVllm):
        return str(answer.json()["version"])
    label = Label.parse(answer.json()["weight_version"])
    return "" if label is None else label.version


class _Run:
    """The run that a command trains, as its files show it."""

    def __init__(self, process: subprocess.Popen[str], state: Path) -> None:
        self._process = process
        self._state = state

    def steps(self) -> int:
        """Returns the number of steps so far."""
        (metrics,) = self._state.glob("run_*/metrics.jsonl")
        return metrics.read_text().count("\n")

    def events(self) -> list[tuple[str, str]]:
        """Returns the types and the messages of the events of servers so far."""
        with closing(sqlite3.connect(self._state / "slipstream.db", timeout=30)) as database:
            query = "SELECT type, message FROM events WHERE type LIKE 'Engine%' ORDER BY rowid"
            return database.execute(query).fetchall()

    def trains_on(self) -> None:
        """Waits for further steps."""
        enough = self.steps() + _MORE_STEPS
        self.until(lambda: self.steps() >= enough)

    def serves(self, server: LocalServer) -> None:
        """Waits until a server serves a version of this run."""
        self.until(lambda: _version(server).isdigit())

    def until(self, is_met: Callable[[], bool]) -> None:
        """Waits for a condition while the run trains."""
        deadline = time.monotonic() + _DEADLINE_S
        while not is_met():
            assert self._process.poll() is None, "the run ended"
            assert time.monotonic() < deadline, (self.steps(), self.events())
            time.sleep(0.2)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        _kind(
            "vllm",
            LocalVllm,
            *("--max-model-len", str(_MAX_TOKENS), "--max-num-batched-tokens", "2048"),
            *("--kv-cache-memory-bytes", str(64 << 20), "--shutdown-timeout", "300"),
        ),
        _kind("sglang", LocalSglang),
    ],
)
def test_a_run_trains_while_servers_join_drain_and_restart_with_old_weights(
    kind: type[LocalServer],
    options: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import_few_models()
    allow_attached_servers(tmp_path, monkeypatch, token=TOKEN)
    model, state, listed = (
        _old_weights(tmp_path / "model"),
        tmp_path / "state",
        tmp_path / "servers.txt",
    )
    servers = [kind(tmp_path, model, "--dtype", "float32", *options) for _ in range(3)]
    drained, killed, joining = servers
    listed.write_text(f"{drained.address}\n{killed.address}")
    with _router(listed) as router:
        settings = {
            "rollout.engine": kind.engine,
            "rollout.engine_arguments": json.dumps(
                {
                    "addresses": [router],
                    "token": {"secret": "FLEET_TOKEN"},
                    str(ENGINES[kind.engine].length_argument): _MAX_TOKENS,
                }
            ),
            "rollout.replicas": "1",
            "rollout.max_response_tokens": "40",
            "weight_sync.mode": "cpu_async",
            "trainer.steps": "100000",
            "trainer.prompts_per_step": "4",
            # Versions differ so much that the logprobs of tokens under another one do.
            "trainer.optimizer.learning_rate": "1e-3",
        }
        overrides = [part for item in settings.items() for part in ("--set", "=".join(item))]
        try:
            drained.start()
            killed.start()
            drained.wait()
            killed.wait()
            arguments = ("run", SORT4, "--state-directory", state, *overrides)
            with started(*arguments, until=r"step +2/") as (process, lines):
                run = _Run(process, state)
                joining.start()
                joining.wait()
                listed.write_text("\n".join(server.address for server in servers))
                run.serves(joining)
                run.trains_on()

                # SGLang's server does not end while it loads weights: its scheduler ends without an answer.
                with suppress(TimeoutError):
                    drained.drain(_GRACE_S)
                drained.kill()
                run.trains_on()
                drained.start()
                drained.wait()
                run.serves(drained)
                run.trains_on()

                killed.kill()
                killed.start()
                killed.wait()
                run.serves(killed)
                run.trains_on()

                listed.write_text(f"{drained.address}\n{joining.address}")
                run.trains_on()
                process.send_signal(signal.SIGINT)  # pauses the run with a checkpoint
                output, _ = process.communicate(timeout=_DEADLINE_S)
                num_steps, events = run.steps(), run.events()
        finally:
            for server in servers:
                server.kill()
    assert "paused" in "".join(lines) + output
    divergence = check_logprobs(state)
    print({"steps": num_steps, "events": events, **divergence})
    # Other versions have other logprobs, so that the check finds tokens of an unknown one.
    assert divergence["kl_of_older_tokens"] > 1e-5
    # A busy host may miss deadlines of other servers as well, or of the same ones more often.
    losses = [message for type_name, message in events if type_name == "EngineServerLost"]
    assert {s.address for s in (drained, killed)} <= {
        s.address for s in servers for message in losses if s.address in message
    }
    assert any(killed.address in message and "no longer lists" in message for message in losses)
