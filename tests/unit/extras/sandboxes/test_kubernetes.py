"""Sandboxes in pods, tested with a stub of the Kubernetes API."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from services.common.runspec.rollout import SandboxSpec
from services.rollout.failures import CallError
from services.rollout.sandbox.base import SandboxError, SandboxHosts
from services.rollout.sandbox.pool import SandboxPool
from tests.helpers.kubernetes_api import DENY_EGRESS, TOKEN, KubernetesApi


@asynccontextmanager
async def pool_of_pods(tmp_path, **spec):
    api = KubernetesApi(tmp_path)
    async with api.serving() as hosts:
        pool = SandboxPool(SandboxSpec(kind="kubernetes", image="debian:13", **spec), hosts=hosts)
        await pool.prepare()
        try:
            yield pool, api
        finally:
            await pool.close()


async def test_a_pod_runs_commands_and_keeps_every_byte(tmp_path) -> None:
    content = bytes(range(256)) * 999
    async with pool_of_pods(tmp_path) as (pool, api):
        async with pool.open({}) as box:
            (name,) = api.pods
            assert (await box.run("pwd; echo err >&2; exit 3")).text == f"{tmp_path / name}\nerr\n"
            result = await box.run("cat; kill -9 $$", stdin=b"given")
            assert (result.text, result.exit_status, result.limit) == ("given", 137, "")
            assert (await box.run("true \0")).exit_status == 126
            assert (await box.run("true", stdin=bytes(1 << 20))).exit_status == 0
            await box.write("deep/it's a file", content)
            assert await box.read("deep/it's a file") == content
            snapshot = await box.snapshot()
            await box.run("rm -r deep; touch other")
            await box.restore(snapshot)
            assert (await box.run("ls")).text == "deep\n"
            with pytest.raises(SandboxError, match="No such file"):
                await box.read("missing")
            long = f"echo {'x' * 9000}\nexit 4\n"
            result = await box.run(long)
            assert (len(result.output), result.exit_status) == (9001, 4)
        assert not api.pods


async def test_time_and_output_of_a_command_are_limited(tmp_path) -> None:
    async with pool_of_pods(tmp_path, output_bytes=1000) as (pool, _), pool.open({}) as box:
        slow = await box.run("sleep 60", timeout_s=0.2)
        assert (slow.limit, slow.exit_status) == ("time", 137)
        long = await box.run("yes | head -c 100000")
        assert (len(long.output), long.is_truncated, long.exit_status) == (1000, True, 0)


async def test_a_pod_has_limits_and_no_rights(tmp_path) -> None:
    async with pool_of_pods(tmp_path, memory_bytes=1 << 28, cpus=0.5) as (pool, api):
        async with pool.open({}):
            (pod,) = api.pods.values()
        container = pod["spec"]["containers"][0]
        limits = container["resources"]["limits"]
        assert (limits["memory"], limits["cpu"]) == (str(1 << 28), "0.5")
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert not pod["spec"]["automountServiceAccountToken"]


async def test_a_pod_ends_with_its_connection_and_the_next_rollout_deletes_it(tmp_path) -> None:
    async with pool_of_pods(tmp_path) as (pool, api):
        async with asyncio.timeout(30):
            async with pool.open({}) as box:
                # the kernel closes the connection of a killed process
                await box._sandbox._connection.close()
                (pod,) = api.pods.values()
                async with api.changed:
                    await api.changed.wait_for(lambda: pod["status"]["phase"] == "Succeeded")
                box._sandbox._has_ended = True  # and a killed process does not delete its pod
        assert api.pods
        await pool.prepare()
        assert not api.pods


@pytest.mark.parametrize(
    "policies",
    [
        [],
        [{"spec": {"podSelector": {}, "policyTypes": ["Ingress"]}}],
        [{"spec": {**DENY_EGRESS["spec"], "egress": [{}]}}],
        [{"spec": {**DENY_EGRESS["spec"], "podSelector": {"matchLabels": {"a": "b"}}}}],
    ],
)
async def test_a_namespace_that_does_not_deny_egress_is_refused(tmp_path, policies) -> None:
    async with pool_of_pods(tmp_path) as (pool, api):
        api.policies = policies
        with pytest.raises(ValueError, match="egress"):
            await pool.prepare()


async def test_what_prevents_a_start_is_reported_and_nothing_is_left(tmp_path) -> None:
    async with pool_of_pods(tmp_path) as (pool, api):
        api.stuck = "ImagePullBackOff"
        with pytest.raises(CallError, match="does not start: no"):
            async with pool.open({}):
                pass
        assert not api.pods
        (tmp_path / "token").write_text("another")
        with pytest.raises(CallError, match="401"):
            async with pool.open({}):
                pass
        (tmp_path / "token").write_text(TOKEN)


async def test_an_installation_without_a_namespace_is_refused() -> None:
    pool = SandboxPool(SandboxSpec(kind="kubernetes", image="debian:13"), hosts=SandboxHosts())
    with pytest.raises(ValueError, match=r"rollout\.sandbox\.kind"):
        await pool.prepare()
