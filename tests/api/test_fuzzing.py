"""Fuzzing of a running controller with Schemathesis as two tenants: all checks, without a failure.

``SLIPSTREAM_API_EXAMPLES`` sets how many requests each operation gets per phase.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from services.controller.api.principals import TokenStore
from services.controller.store.database import Database
from tests.helpers.cli import REPOSITORY
from tests.helpers.controllers import SPEC, running_controller, running_queue

pytestmark = pytest.mark.timeout(900)

EXAMPLES = os.environ.get("SLIPSTREAM_API_EXAMPLES", "4")


@pytest.fixture
def controller(tmp_path) -> Iterator[str]:
    """Yields the URL of a controller whose runs wait for workers that never register."""
    with (
        running_queue(tmp_path) as queue,
        running_controller(
            tmp_path,
            transferqueue_address=queue,
            max_queued_runs=100_000,
            max_requests_per_second=0,
        ) as controller,
    ):
        yield controller.url


def tenants(state: Path) -> dict[str, str]:
    """Creates an admin in each of two projects; returns their tokens by project."""
    database = Database(f"sqlite:///{state / 'slipstream.db'}")
    store = TokenStore(database)
    tokens = {
        project: store.create(name=f"admin-{project}", project=project, role="admin")
        for project in ("blue", "red")
    }
    database.close()
    return tokens


def seed(url: str, token: str) -> None:
    """Creates runs of a tenant in several states."""
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
        # Streams end only when a run ends.
        *("--exclude-path-regex", "/stream$"),
    ]
    result = subprocess.run(
        [str(Path(sys.executable).with_name("schemathesis")), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=880,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
