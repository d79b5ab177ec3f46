"""Controllers on PostgreSQL: a second one takes over from a killed leader; a frozen database ends one."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import sqlalchemy as sa

from services.common.runspec.loader import load_spec
from slipstream_client import AsyncClient
from tests.helpers.cli import environment
from tests.helpers.databases import postgres_cluster
from tests.helpers.ports import free_port

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

TOKEN = "slp_" + "a" * 43


@contextmanager
def service(module: str, log: Path, **settings: object) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a service until the block ends."""
    prefix = f"SLIPSTREAM_{module.rpartition('.')[2].upper()}_"
    variables = {f"{prefix}{name.upper()}": str(value) for name, value in settings.items()}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            env={**environment(), **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(timeout=30)


def announced(path: Path, process: subprocess.Popen[bytes]) -> dict[str, str]:
    """Waits until a service serves; returns the addresses that it announces."""
    while not path.exists():
        assert process.poll() is None, path
        time.sleep(0.05)
    return json.loads(path.read_text())


async def test_another_controller_takes_over_from_a_killed_leader(plumbing, tmp_path):
    with ExitStack() as stack:
        url = stack.enter_context(postgres_cluster())
        if url is None:
            pytest.skip("PostgreSQL is not installed")
        ready_file = tmp_path / "queue.ready"
        module, log = "services.transferqueue", tmp_path / "queue.log"
        snapshots = tmp_path / "snapshots"
        queue = stack.enter_context(
            service(module, log, ready_file=ready_file, snapshot_folder=snapshots)
        )
        shared = {
            "transferqueue_address": announced(ready_file, queue)["address"],
            "state_directory": tmp_path / "state",
            "admin_token_file": tmp_path / "token",
            "leave_runs": "true",
            "database_url": url,
            "lease_ttl_s": 3,
            # Both controllers have the same addresses, as with a Kubernetes Service.
            "bind": f"127.0.0.1:{free_port()}",
            "rest_bind": f"127.0.0.1:{free_port()}",
        }
        shared["admin_token_file"].write_text(TOKEN)
        controllers = {}
        for name in ("one", "two"):
            log, ready_file = tmp_path / f"{name}.log", tmp_path / f"{name}.ready"
            controllers[name] = stack.enter_context(
                service("services.controller", log, holder=name, ready_file=ready_file, **shared)
            )
            if name == "one":
                announced(ready_file, controllers[name])
        address = f"http://{shared['rest_bind']}"
        async with AsyncClient(address, token=TOKEN, retry_s=60) as client:
            spec = load_spec(plumbing, ["trainer.steps=60"]).model_dump(mode="json")
            submitted = await client.submit(spec)
            async for event in submitted.follow():
                if event.type == "StepCommitted" and event.data["step"] == 5:
                    assert not (tmp_path / "two.ready").exists()
                    controllers["one"].kill()
            run, events = submitted.view, [event async for event in submitted.events()]
        assert (run.state, run.step) == ("SUCCEEDED", 60), run.message
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert not {event.type for event in events} & {"WorkerLost", "Rewound"}
        _assert_closed(url)


def test_a_controller_whose_database_freezes_ends(tmp_path):
    with ExitStack() as stack:
        url = stack.enter_context(postgres_cluster())
        if url is None:
            pytest.skip("PostgreSQL is not installed")
        ready_file, token = tmp_path / "ready", tmp_path / "token"
        token.write_text(TOKEN)
        controller = stack.enter_context(
            service(
                "services.controller",
                tmp_path / "log",
                ready_file=ready_file,
                state_directory=tmp_path,
                admin_token_file=token,
                transferqueue_address="127.0.0.1:1",
                database_url=url,
                lease_ttl_s=1,
                bind="127.0.0.1:0",
                rest_bind="127.0.0.1:0",
            )
        )
        health = f"{announced(ready_file, controller)['rest']}/healthz"
        folder = Path(url.rpartition("=")[2])
        leader = psutil.Process(int((folder / "data" / "postmaster.pid").read_text().split()[0]))
        frozen = [leader, *leader.children()]
        stack.callback(lambda: [process.resume() for process in frozen])
        for process in frozen:
            process.suspend()
        # The kernel still accepts connections to the suspended database server.
        assert httpx.get(health, timeout=5).status_code == 200
        assert controller.wait(timeout=60) == 1


def _assert_closed(url: str) -> None:
    """Checks that every group was trained once and that the second controller leads."""
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        steps = connection.scalars(sa.text("SELECT groups_json FROM steps WHERE is_committed"))
        trained = [group[0] for text in steps for group in json.loads(text)]
        assert sorted(trained) == list(range(240))
        for query, expected in (
            ("SELECT count(*) FROM prompts", 0),
            ("SELECT count(*) FROM dead_letters", 0),
            ("SELECT num_issued FROM ledgers", 240),
            ("SELECT holder FROM leases", "two"),
        ):
            assert connection.scalar(sa.text(query)) == expected, query
    engine.dispose()
