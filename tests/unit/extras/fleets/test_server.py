"""A server samples only under the version that a request names, for the rollout that attached last."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.extras.fleets import serve
from services.extras.fleets import server as module
from services.extras.fleets.client import (
    ServerAwayError,
    ServerBusyError,
    ServerRefusedError,
)
from services.extras.fleets.protocol import (
    API,
    GENERATE,
    LOAD,
    SESSION_HEADER,
    STATE,
    VERSION_HEADER,
    WEIGHTS,
    WITHOUT_TOKEN,
)
from services.extras.fleets.vllm_server import VllmServer
from services.extras.fleets.weights import BUCKET_BYTES
from tests.unit.extras.fleets.servers import (
    LOCAL,
    TOKEN,
    FakeServer,
    attached,
    fleet_weights,
    serving,
)

BODY = {
    "token_ids": [1, 2],
    "sampling_params": {"max_tokens": 3},
    "stream": True,
}


async def _post(server: FakeServer, path: str, body: Any = None, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(
            f"{server.address}{path}",
            json=body,
            headers={"Authorization": f"Bearer {TOKEN}", **headers},
        )


async def _brought(client: VllmServer, version: int, value: float) -> None:
    weights = fleet_weights(version, value)
    await client.upload(weights)
    await client.load(weights)


async def test_only_health_checks_need_no_token() -> None:
    async with serving() as (server,), httpx.AsyncClient(trust_env=False) as client:
        for path, status in (("/health", 200), ("/metrics", 401), (STATE, 401), (GENERATE, 401)):
            assert (await client.get(f"{server.address}{path}")).status_code == status, path
            wrong = {"Authorization": "Bearer another"}
            response = await client.get(f"{server.address}{path}", headers=wrong)
            assert response.status_code == status, path
        right = {"Authorization": f"Bearer {TOKEN}"}
        assert (await client.get(f"{server.address}/metrics", headers=right)).status_code == 200


@pytest.mark.parametrize("keys", [None, [], [""]])
async def test_a_server_without_a_token_receives_weights_only_if_it_is_configured_to(
    keys: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "")
    async with serving() as (server,):
        assert server.app is not None
        server.app.state.args.api_key = keys
        client = VllmServer(server.address, owner="a", reach=LOCAL)
        with pytest.raises(ServerRefusedError, match="403: this server has no token"):
            await client.attach()
        assert (await _post(server, "/metrics")).status_code != 403
        monkeypatch.setenv(WITHOUT_TOKEN, "1")
        await client.attach()
        await client.close()


def test_serve_refuses_an_empty_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "")
    with pytest.raises(SystemExit, match="VLLM_API_KEY is set but empty"):
        serve.main()


async def test_a_request_samples_only_under_the_version_that_it_names() -> None:
    async with serving() as (server,), attached(server) as client:
        headers = client.request_headers() | {VERSION_HEADER: "1"}
        assert (await _post(server, GENERATE, BODY, **headers)).status_code == 412
        await _brought(client, 1, 0.5)
        server.engine.steps = asyncio.Semaphore(3)
        assert (await _post(server, GENERATE, BODY, **headers)).status_code == 200
        await _brought(client, 2, 0.25)
        assert (await _post(server, GENERATE, BODY, **headers)).status_code == 412
        assert server.engine.num_sampled == 3


async def test_a_restarted_server_refuses_the_session_of_the_one_before() -> None:
    async with serving() as (server,), attached(server) as client:
        await _brought(client, 1, 0.5)
        headers = client.request_headers()
        await server.restart()
        response = await _post(server, GENERATE, BODY, **headers)
        assert response.status_code == 412
        assert "restarted" in response.json()["error"]
        with pytest.raises(ServerAwayError, match="412"):
            await client.check()


async def test_another_owner_is_refused_until_the_first_one_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as (server,), attached(server) as client:
        await _brought(client, 1, 0.5)
        headers = client.request_headers()
        other = VllmServer(server.address, owner="other", reach=LOCAL, token=TOKEN)
        with pytest.raises(ServerBusyError, match="'run/rollout-0' uses this server"):
            await other.attach()
        monkeypatch.setattr(module, "LEASE_S", 0.0)
        await other.attach()
        assert other.version is None
        assert (await _post(server, GENERATE, BODY, **headers)).status_code == 412
        await other.close()


async def test_a_new_process_of_the_same_worker_takes_over_at_once() -> None:
    async with serving() as (server,), attached(server) as client:
        await _brought(client, 1, 0.5)
        headers = client.request_headers()
        async with attached(server):
            assert (await _post(server, GENERATE, BODY, **headers)).status_code == 412


async def test_a_response_of_an_earlier_version_is_cut_when_the_next_one_loads() -> None:
    async with serving() as (server,), attached(server) as client:
        await _brought(client, 1, 0.5)
        lines: list[str] = []
        first = asyncio.Event()

        async def read() -> None:
            async with client.stream(BODY) as response:
                async for line in response.aiter_lines():
                    lines.append(line)
                    first.set()

        reading = asyncio.create_task(read())
        server.engine.steps.release()
        await first.wait()
        await _brought(client, 2, 0.25)
        server.engine.steps.release()
        server.engine.steps.release()
        with pytest.raises(httpx.TransportError):
            await reading
        assert sum(line.startswith("data:") for line in lines) == 1
        assert "-0.5" in lines[0]


async def test_weights_that_arrived_in_part_or_wrong_are_not_loaded() -> None:
    weights = fleet_weights(1, 0.5)
    async with serving() as (server,), attached(server) as client:
        announced = {
            "version": 1,
            "bucket_bytes": 8192,
            "tensors": [[spec.name, spec.shape, spec.dtype] for spec in weights.plan.tensors],
        }
        session = {SESSION_HEADER: client.session}
        answer = await _post(server, WEIGHTS, announced, **session)
        assert answer.json() == {"num_buckets": 8}
        order = {"version": 1, "digest": weights.digest}
        response = await _post(server, LOAD, order, **session)
        assert response.status_code == 409
        assert "8 of 8 buckets have not arrived" in response.json()["error"]
        await client.upload(weights)
        response = await _post(server, LOAD, {"version": 1, "digest": "0" * 64}, **session)
        assert response.status_code == 422
        response = await _post(server, LOAD, {"version": 2, "digest": weights.digest}, **session)
        assert response.status_code == 409
        assert server.engine.bias == 0
        await client.check()
        assert client.version is None


def _announced(version: int) -> dict[str, Any]:
    specs = fleet_weights(version, 0.5).plan.tensors
    return {
        "version": version,
        "bucket_bytes": BUCKET_BYTES,
        "tensors": [[spec.name, spec.shape, spec.dtype] for spec in specs],
    }


async def test_a_late_upload_of_an_earlier_version_does_not_change_the_next_one() -> None:
    earlier, later = fleet_weights(5, 0.5), fleet_weights(6, 0.25)
    async with serving() as (server,), attached(server) as client:
        started, go_on = asyncio.Event(), asyncio.Event()

        async def parts() -> AsyncIterator[bytes]:
            first, *rest = b"".join(earlier.parts(0)), b""
            yield first[:10]
            started.set()
            await go_on.wait()
            yield first[10:] + b"".join(rest)

        await _post(server, WEIGHTS, _announced(5), **{SESSION_HEADER: client.session})
        async with httpx.AsyncClient(trust_env=False) as http:
            late = asyncio.ensure_future(
                http.put(
                    f"{server.address}{WEIGHTS}/0",
                    content=parts(),
                    headers={
                        "Authorization": f"Bearer {TOKEN}",
                        SESSION_HEADER: client.session,
                        VERSION_HEADER: "5",
                        "Content-Length": str(earlier.bucket_bytes(0)),
                    },
                )
            )
            await started.wait()
            await client.upload(later)
            go_on.set()
            response = await late
        assert response.status_code == 409
        assert "version 5 is no longer expected" in response.json()["error"]
        await client.load(later)
        assert server.engine.bias == 0.25


async def test_a_bucket_has_one_upload_for_each_announcement() -> None:
    weights = fleet_weights(1, 0.5)
    async with serving() as (server,), attached(server) as client:
        await client.upload(weights)
        with pytest.raises(ServerBusyError, match="bucket 0 of version 1 was sent before"):
            await client._send(weights, 0, asyncio.Semaphore(1))
        await client.load(weights)


async def test_a_refused_layout_frees_the_memory_of_the_version_before() -> None:
    async with serving() as (server,), attached(server) as client:
        await client.upload(fleet_weights(1, 0.5))
        files = _num_memories()
        wrong = _announced(2) | {"bucket_bytes": 0}
        response = await _post(server, WEIGHTS, wrong, **{SESSION_HEADER: client.session})
        assert response.status_code == 400
        assert _num_memories() == files - 1
        await _brought(client, 3, 0.25)


def _num_memories() -> int:
    """Returns how many memories for weights are open in this process."""
    targets = [str(file.resolve()) for file in Path("/proc/self/fd").iterdir()]
    return sum("slipstream-weights" in target for target in targets)


async def test_an_owner_whose_weights_load_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (server,), attached(server) as client:
        monkeypatch.setattr(module, "LEASE_S", 0.4)
        weights = fleet_weights(1, 0.5)
        await client.upload(weights)
        started, go_on = asyncio.Event(), asyncio.Event()

        async def slow(method: str, args: tuple[str, ...]) -> list[dict[str, Any]]:
            started.set()
            await go_on.wait()
            return [{"way": "compared", "differing": []}]

        server.engine.collective_rpc = slow  # type: ignore[method-assign]
        loading = asyncio.ensure_future(client.load(weights))
        await started.wait()
        other = VllmServer(server.address, owner="other", reach=LOCAL, token=TOKEN)
        with pytest.raises(ServerAwayError, match="425: weights have been loading"):
            await other.attach()
        attaching = asyncio.ensure_future(other.attach())
        await asyncio.sleep(0.1)  # it waits for the load
        go_on.set()
        with pytest.raises(ServerBusyError, match="uses this server"):
            await attaching
        await loading
        assert client.version == 1
        await other.close()


async def test_a_server_whose_parameters_differ_serves_nothing() -> None:
    async with serving() as (server,), attached(server) as client:
        server.engine.differing = ["weight"]
        weights = fleet_weights(1, 0.5)
        await client.upload(weights)
        with pytest.raises(ServerRefusedError, match="1 tensors differ, such as weight"):
            await client.load(weights)
        assert client.version is None
        response = await _post(
            server, GENERATE, BODY, **(client.request_headers() | {VERSION_HEADER: "1"})
        )
        assert response.status_code == 412


async def test_a_worker_without_the_extension_is_named() -> None:
    async with serving() as (server,), attached(server) as client:
        server.engine.error = AttributeError("no attribute 'load_fleet_weights'")
        weights = fleet_weights(1, 0.5)
        await client.upload(weights)
        with pytest.raises(ServerRefusedError, match="--worker-extension-cls"):
            await client.load(weights)


async def test_a_load_that_does_not_end_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORKERS_TIMEOUT_S", 0.05)
    async with serving() as (server,), attached(server) as client:

        async def never(method: str, args: tuple[str, ...]) -> list[dict[str, Any]]:
            await asyncio.Event().wait()
            return []

        server.engine.collective_rpc = never  # type: ignore[method-assign]
        weights = fleet_weights(1, 0.5)
        await client.upload(weights)
        with pytest.raises(ServerAwayError, match="did not load version 1 within"):
            await client.load(weights)
        await client.check()
        assert client.version is None


@pytest.mark.parametrize("headers", [{}, {"Retry-After": "0"}])
async def test_a_proxy_that_is_overloaded_is_asked_again(headers: dict[str, str]) -> None:
    answers = [
        httpx.Response(503, headers=headers),
        httpx.Response(429, headers=headers),
        httpx.Response(200, json={"version": 3, "digest": "d"}),
    ]
    client = VllmServer(
        "http://127.0.0.1:1",
        owner="a",
        reach=LOCAL,
        transport=httpx.MockTransport(lambda _: answers.pop(0)),
    )
    await client.check()
    assert client.version == 3
    await client.close()


async def test_a_proxy_that_stays_overloaded_is_given_up_at_the_deadline() -> None:
    client = VllmServer(
        "http://127.0.0.1:1",
        owner="a",
        reach=LOCAL,
        transport=httpx.MockTransport(lambda _: httpx.Response(429, text="slow down")),
    )
    with pytest.raises(ServerAwayError, match="429: slow down"):
        await client.ask("GET", STATE, timeout_s=0.3)
    await client.close()


async def test_a_server_without_the_middleware_is_named() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"Not Found"})

    client = VllmServer(
        "http://127.0.0.1:1",
        owner="a",
        reach=LOCAL,
        transport=httpx.ASGITransport(app),
    )
    with pytest.raises(ServerRefusedError, match="--middleware"):
        await client.attach()
    await client.close()


@pytest.mark.parametrize("answer", [[], {"api": API}, {"api": API, "session": "a"}])
async def test_a_malformed_answer_names_the_server(answer: Any) -> None:
    client = VllmServer(
        "http://127.0.0.1:1",
        owner="a",
        reach=LOCAL,
        transport=httpx.MockTransport(lambda _: httpx.Response(200, json=answer)),
    )
    with pytest.raises(ServerRefusedError, match=r"127\.0\.0\.1:1 sent a malformed answer"):
        await client.attach()
    assert not client.session
    await client.close()
