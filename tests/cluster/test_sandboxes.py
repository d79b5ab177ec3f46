"""Sandboxes of episodes in pods of a real cluster, with the rights that the chart grants to rollouts."""

import asyncio
import sys
import time
from collections.abc import Iterator

import pytest

from services.common.runspec.rollout import SandboxSpec
from services.extras.sandboxes.kubernetes import LABEL
from services.rollout.sandbox.base import SandboxError
from services.rollout.sandbox.base import SandboxHosts as Access
from services.rollout.sandbox.pool import SandboxPool
from tests.cluster.network import NODE_IP
from tests.cluster.node import Cluster
from tests.cluster.test_control_plane import NAMESPACE, WORKERS, helm, install

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

BOXES = f"{NAMESPACE}-sandboxes"
SMALL = {"memory_bytes": 128 << 20, "cpus": 0.2, "disk_bytes": 64 << 20}
IMAGE = "localhost/slipstream/transferqueue:test"
ACCOUNT = "demo-slipstream-worker"
KILLED = """
import asyncio
from pathlib import Path
from services.common.runspec.rollout import SandboxSpec
from services.rollout.sandbox.base import SandboxHosts
from services.rollout.sandbox.pool import SandboxPool

async def main():
    hosts = SandboxHosts(namespace={namespace!r}, url={url!r}, credentials=Path({credentials!r}))
    spec = SandboxSpec(kind="kubernetes", image={image!r}, **{small!r})
    async with SandboxPool(spec, hosts=hosts).open({{}}) as box:
        print("ready", flush=True)
        await box.run("sleep 1000")

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def access(machine: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Access]:
    """Yields a rollout's API access: the token of the workers' account and the cluster's certificate."""
    peers = f'sandboxes.apiTo=[{{"ipBlock": {{"cidr": "{NODE_IP}/32"}}}}]'
    install(machine, "--set", "sandboxes.enabled=true", "--set-json", peers)
    folder = tmp_path_factory.mktemp("credentials")
    (folder / "token").write_bytes(_token(machine))
    (folder / "ca.crt").write_bytes((machine.folder / "pki" / "ca.crt").read_bytes())
    yield Access(namespace=BOXES, url=f"https://{NODE_IP}:6443", credentials=folder)
    helm(machine, "uninstall", "demo", "--wait")


def _token(machine: Cluster) -> bytes:
    """Creates a token through the API, as the kubelet does for a projected volume."""
    body = {"spec": {"audiences": [], "expirationSeconds": 3600}}
    response = machine.core.create_namespaced_service_account_token(ACCOUNT, WORKERS, body)
    return response.status.token.encode()


def _pods(machine: Cluster) -> dict[str, str]:
    items = machine.core.list_namespaced_pod(BOXES, label_selector=f"{LABEL}=true").items
    return {pod.metadata.name: pod.status.phase for pod in items}


async def test_a_pod_is_a_sandbox(machine: Cluster, access: Access) -> None:
    content = bytes(range(256)) * 999
    pool = SandboxPool(SandboxSpec(kind="kubernetes", image=IMAGE, **SMALL), hosts=access)
    await pool.prepare()
    async with pool.open({}) as box:
        (phase,) = _pods(machine).values()
        assert phase == "Running"
        result = await box.run("pwd; echo err >&2; exit 3")
        # The order of the two streams is not defined.
        assert (sorted(result.text.split()), result.exit_status) == (["/app", "err"], 3)
        assert (await box.run("cat", stdin=b"given")).text == "given"
        slow = await box.run("sleep 60", timeout_s=1)
        assert (slow.limit, slow.exit_status) == ("time", 137)
        long = await box.run(f": {'x' * 20_000}\nyes | head -c 1000000")
        assert (len(long.output), long.is_truncated) == (64 << 10, True)
        await box.write("/sandbox/deep/file", content)
        assert await box.read("/sandbox/deep/file") == content
        with pytest.raises(SandboxError, match="No such file"):
            await box.read("missing")
        token = await box.run("ls /var/run/secrets/kubernetes.io")
        assert token.exit_status != 0
    await pool.close()
    assert not _pods(machine)


async def test_a_pod_ends_with_a_killed_rollout(machine: Cluster, access: Access) -> None:
    program = KILLED.format(
        namespace=access.namespace,
        url=access.url,
        credentials=str(access.credentials),
        image=IMAGE,
        small=SMALL,
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    process.kill()
    await process.wait()
    deadline = time.monotonic() + 60
    while "Running" in _pods(machine).values():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.5)
    assert _pods(machine)
    pool = SandboxPool(SandboxSpec(kind="kubernetes", image=IMAGE, **SMALL), hosts=access)
    await pool.prepare()
    await pool.close()
    while _pods(machine):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.5)


async def test_a_rollout_sees_no_pod_of_other_namespaces(access: Access) -> None:
    elsewhere = Access(namespace=WORKERS, url=access.url, credentials=access.credentials)
    pool = SandboxPool(SandboxSpec(kind="kubernetes", image=IMAGE, **SMALL), hosts=elsewhere)
    with pytest.raises(ValueError, match="403"):
        await pool.prepare()
    await pool.close()
