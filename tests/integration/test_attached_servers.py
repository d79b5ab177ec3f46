"""A run that attaches to servers: it trains, and continues while one of them is killed and started again."""

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.helpers.attached_servers import allow_attached_servers
from tests.helpers.cli import environment, started
from tests.helpers.ports import free_port

pytestmark = pytest.mark.timeout(300)

TOKEN = "a-token-of-servers"
STEPS = 8


class Server:
    """Process of ``tests.helpers.torch_server``."""

    def __init__(self, spec: Path) -> None:
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        module = (sys.executable, "-m", "tests.helpers.torch_server")
        self._command = (*module, str(self.port), str(spec), TOKEN)
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, env=environment())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                httpx.get(f"{self.address}/health", trust_env=False)
                return
            except httpx.TransportError:
                assert self._process.poll() is None, "the server ended"
                time.sleep(0.1)
        raise TimeoutError(self.address)


@pytest.fixture
def servers(plumbing: Path) -> Iterator[list[Server]]:
    with closing(Server(plumbing)) as first, closing(Server(plumbing)) as second:
        for server in (first, second):
            server.wait()
        yield [first, second]


@pytest.mark.parametrize("mode", ["cpu_async", "servers"])
def test_a_run_trains_with_servers_of_which_one_is_killed_and_started_again(
    mode: str,
    plumbing: Path,
    servers: list[Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allow_attached_servers(tmp_path / "secrets", monkeypatch, token=TOKEN, secret="FLEET")
    addresses = [server.address for server in servers]
    overrides = {
        "rollout.engine": "vllm-server",
        "rollout.engine_arguments": json.dumps(
            {"addresses": addresses, "token": {"secret": "FLEET"}}
        ),
        "rollout.replicas": "1",
        "rollout.max_response_tokens": "32",
        "weight_sync.mode": mode,
        "trainer.steps": str(STEPS),
    }
    settings = [argument for item in overrides.items() for argument in ("--set", "=".join(item))]
    arguments = ("run", plumbing, "--state-directory", tmp_path / "state", *settings)
    killed = servers[0]
    with started(*arguments, until=r"step +2/") as (process, lines):
        killed.close()
        killed.start()
        out, _ = process.communicate(timeout=240)
        assert process.returncode == 0, "".join(lines) + out
    (summary,) = tmp_path.glob("state/run_*/summary.json")
    result = json.loads(summary.read_text())
    assert (result["state"], result["steps"]) == ("SUCCEEDED", STEPS)
    assert result["staleness"]["max"] <= 1
    # Tokens under other weights than those of their version would differ by whole nats.
    steps = summary.with_name("metrics.jsonl").read_text().splitlines()
    assert max(json.loads(step)["kl_rollout"] for step in steps) < 1e-5
    with closing(sqlite3.connect(tmp_path / "state" / "slipstream.db")) as database:
        query = "SELECT message FROM events WHERE type = 'EngineServerLost'"
        loss_messages = [message for (message,) in database.execute(query)]
    assert [killed.address in message for message in loss_messages] == [True]
