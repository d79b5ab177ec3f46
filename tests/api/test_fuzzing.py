"""Schemathesis against a live controller, as two tenants: every check, no failure.

``SLIPSTREAM_API_EXAMPLES`` sets how many requests each operation gets per phase.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from services.controller.api.principals import TokenStore
from services.controller.store.database import Database
from tests.helpers.cli import REPOSITORY

pytestmark = pytest.mark.timeout(900)

EXAMPLES = os.environ.get("SLIPSTREAM_API_EXAMPLES", "4")
ADMIN = "slp_" + "a" * 43
SPEC = {
    "name": "fuzzed",
    "model": {"path": "tiny:qwen2-0.4m"},
    "data": {"train": {"source": "jsonl", "path": "prompts.jsonl"}},
    "rollout": {"max_response_tokens": 8, "rewards": [{"name": "exact_match"}]},
    "trainer": {"steps": 3, "prompts_per_step": 4},
}


@pytest.fixture
def controller(tmp_path) -> Iterator[str]:
    """URL of a controller whose runs wait for workers that never come."""
    (tmp_path / "token").write_text(ADMIN)
    ready = tmp_path / "ready"
    settings = {
        "TRANSFERQUEUE_ADDRESS": "127.0.0.1:9",
        "STATE_DIRECTORY": str(tmp_path / "state"),
        "LAUNCHER": "none",
        "ADMIN_TOKEN_FILE": str(tmp_path / "token"),
        "READY_FILE": str(ready),
        "MAX_ACTIVE_RUNS": "1",
        "MAX_QUEUED_RUNS": "100000",
    }
    environment = {f"SLIPSTREAM_CONTROLLER_{key}": value for key, value in settings.items()}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.controller"],
            env={**os.environ, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while not ready.exists():
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.1)
            yield json.loads(ready.read_text())["rest"]
        finally:
            process.kill()
            process.wait()


def tenants(state: Path) -> dict[str, str]:
    """Tokens of admins of two projects."""
    database = Database(f"sqlite:///{state / 'slipstream.db'}")
    store = TokenStore(database)
    tokens = {
        project: store.create(name=f"admin-{project}", project=project, role="admin")
        for project in ("blue", "red")
    }
    database.close()
    return tokens


def seed(url: str, token: str) -> None:
    """Give a tenant runs in several states."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}) as client:
        specs = [{**SPEC, "name": f"seed-{number}"} for number in range(4)]
        paths = [client.post("/v1/runs", json=spec).headers["Location"] for spec in specs]
        client.post(f"{paths[2]}/pause").raise_for_status()
        client.post(f"{paths[3]}/cancel").raise_for_status()


def test_no_request_finds_a_fault(controller, tmp_path):
    tokens = tenants(tmp_path / "state")
    for token in tokens.values():
        seed(controller, token)
    users = [
        {
            "name": project,
            "fixedHeaders": [{"name": "Authorization", "value": f"Bearer {token}"}],
        }
        for project, token in tokens.items()
    ]
    (tmp_path / "auth.yaml").write_text(yaml.safe_dump({"auth": users}))
    arguments = [
        *("--config-file", REPOSITORY / "schemathesis.toml", "run", f"{controller}/openapi.json"),
        *("--auth-wfc", tmp_path / "auth.yaml", "--checks", "all"),
        *("--max-examples", EXAMPLES, "--generation-deterministic", "--no-color"),
        # They end when a run does.
        *("--exclude-path-regex", "/stream$"),
    ]
    done = subprocess.run(
        [str(Path(sys.executable).with_name("schemathesis")), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
