"""Runs that share a server: sessions, adapters, isolation and the end of a run."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from starlette.requests import Request
from torch import Tensor

from services.extras.external_engine.shared_tensors import open_shared
from services.extras.fleets import adapters as module
from services.extras.fleets import vllm_adapters
from services.extras.fleets.answers import RefusedError
from services.extras.fleets.client import ServerAwayError, ServerBusyError, ServerRefusedError
from services.extras.fleets.protocol import (
    ADAPTERS,
    ATTACH,
    GENERATE,
    LOAD,
    SESSION_HEADER,
    STATE,
    VERSION_HEADER,
    WEIGHTS,
)
from services.extras.fleets.vllm_server import VllmServer
from services.extras.fleets.weights import FleetWeights, adapter_weights
from services.weightsync.adapters import FROZEN_DIGEST, frozen_digest
from services.weightsync.weight_plan import LORA_DOWN, LORA_UP
from tests.helpers.engines import until
from tests.unit.extras.fleets.servers import LOCAL, TOKEN, FakeEngine, FakeServer, serving

_BASE = torch.arange(32, dtype=torch.uint8)
_TLS = ssl.create_default_context()  # of all clients: to make one takes longer than a request


@pytest.fixture(autouse=True)
def long_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps sessions that expire otherwise while a busy machine opens many connections."""
    monkeypatch.setattr(module, "LEASE_S", 120.0)


class FakeAdapters:
    """Adapters of a fake engine."""

    def __init__(self, engine: FakeEngine) -> None:
        self.max_adapters, self.max_rank = 3, 8
        self.slots, self.capacity_tokens = 4, 1 << 20
        self.loads = True
        """False if workers keep other tensors than those that arrived."""
        self._engine = engine

    async def base_digest(self) -> str:
        return bytes(_BASE.tolist()).hex()

    async def load(self, lora_id: int, name: str, description: str) -> list[str]:
        tensors = open_shared(description)
        self._engine.adapters[name] = float(next(iter(tensors.values())).flatten()[0])
        digest = bytes(frozen_digest(tensors.items()).tolist()).hex()
        return [digest if self.loads else "0" * 64]

    async def remove(self, lora_id: int, name: str) -> None:
        del self._engine.adapters[name]


def _sent(value: float) -> dict[str, Tensor]:
    owner = "model.layers.0.self_attn.q_proj"
    return {
        owner + LORA_DOWN: torch.full((2, 8), value),
        owner + LORA_UP: torch.full((8, 2), value),
        FROZEN_DIGEST: _BASE,
    }


def _weights(version: int, value: float) -> FleetWeights:
    return adapter_weights(version, _sent(value))


@asynccontextmanager
async def _shared() -> AsyncIterator[FakeServer]:
    """Yields a server that runs can share."""
    async with serving() as (server,):
        assert server.app is not None
        server.app.state.slipstream_adapters = FakeAdapters(server.engine)
        yield server


def _client(server: FakeServer, run: str, *, share: float = 1.0, proof: str = "") -> VllmServer:
    return VllmServer(
        server.address,
        owner=f"{run}/rollout-0",
        reach=LOCAL,
        token=TOKEN,
        share=share,
        proof=proof or f"proof of {run}",
    )


@asynccontextmanager
async def _attached(
    server: FakeServer, run: str, value: float, **options: Any
) -> AsyncIterator[VllmServer]:
    """Yields a client that serves its version 0, whose logprobs are ``-value``."""
    client = _client(server, run, **options)
    await client.attach()
    try:
        await _bring(client, 0, value)
        yield client
    finally:
        await client.close()


async def _bring(client: VllmServer, version: int, value: float) -> None:
    weights = _weights(version, value)
    await client.upload(weights)
    await client.load(weights)


async def _send(
    server: FakeServer, method: str, path: str, body: Any = None, **headers: str
) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, verify=_TLS, timeout=120) as client:
        return await client.request(
            method,
            f"{server.address}{path}",
            json=body,
            headers={"Authorization": f"Bearer {TOKEN}", **headers},
        )


def _body(tokens: int = 2, **changes: Any) -> dict[str, Any]:
    return {
        "token_ids": [1, 2],
        "sampling_params": {"max_tokens": tokens},
        "stream": True,
        **changes,
    }


async def _generate(
    server: FakeServer, client: VllmServer, body: dict[str, Any] | None = None
) -> httpx.Response:
    headers = client.request_headers()
    return await _send(server, "POST", GENERATE, body or _body(), **headers)


def _free_steps(server: FakeServer, number: int = 1000) -> None:
    for _ in range(number):
        server.engine.steps.release()


async def test_each_run_samples_under_its_own_adapter() -> None:
    async with (
        _shared() as server,
        _attached(server, "a", 1.0) as first,
        _attached(server, "b", 2.0) as second,
    ):
        _free_steps(server)
        for client, value in ((first, 1.0), (second, 2.0)):
            assert await client.score([1, 2, 3]) == (-value, -value)
            assert f'"logprob": {-value}' in (await _generate(server, client)).text


async def test_a_version_that_was_replaced_stays_until_its_last_request_ends() -> None:
    async with _shared() as server, _attached(server, "a", 1.0) as client:
        old = asyncio.ensure_future(_generate(server, client, _body(3)))
        await until(lambda: bool(server.engine.requests), poll_s=0.005)
        await _bring(client, 1, 5.0)
        assert sorted(server.engine.adapters.values()) == [1.0, 5.0]
        _free_steps(server)
        answer = await old
        assert answer.text.count('"logprob": -1.0') == 3
        await until(lambda: [*server.engine.adapters.values()] == [5.0], poll_s=0.005)
        assert '"logprob": -5.0' in (await _generate(server, client)).text


async def test_a_request_for_a_version_that_is_not_in_service_samples_nothing() -> None:
    async with _shared() as server, _attached(server, "a", 1.0) as client:
        headers = client.request_headers() | {VERSION_HEADER: "7"}
        answer = await _send(server, "POST", GENERATE, _body(), **headers)
        assert answer.status_code == 412
        assert "serves 0" in answer.text


async def test_requests_of_an_older_version_are_cut_if_two_newer_ones_come() -> None:
    async with _shared() as server, _attached(server, "a", 1.0) as client:
        old = asyncio.ensure_future(_generate(server, client, _body(3)))
        await until(lambda: bool(server.engine.requests), poll_s=0.005)
        await _bring(client, 1, 5.0)
        await _bring(client, 2, 6.0)
        answer = await old
        assert '"finish_reason": "abort"' in answer.text
        await until(lambda: [*server.engine.adapters.values()] == [6.0], poll_s=0.005)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (_body(model="NAME OF THE OTHER"), 400),
        (_body(request_id="that of another"), 400),
        (_body(priority=-1), 400),
        (_body(kv_transfer_params={}), 400),
        (_body(sampling_params={"max_tokens": 1, "n": 1000}), 400),
        (_body(sampling_params={"max_tokens": 1, "extra_args": {}}), 400),
        (_body(sampling_params={}), 400),
    ],
    ids=["model", "request_id", "priority", "kv_transfer", "n", "extra_args", "no_max_tokens"],
)
async def test_a_request_cannot_reach_beyond_its_run(body: dict[str, Any], status: int) -> None:
    async with (
        _shared() as server,
        _attached(server, "a", 1.0) as first,
        _attached(server, "b", 2.0),
    ):
        names = {value: name for name, value in server.engine.adapters.items()}
        if "model" in body:
            body = {**body, "model": names[2.0]}
        answer = await _generate(server, first, body)
        assert answer.status_code == status
        assert not server.engine.requests


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", GENERATE),
    ],
)
async def test_other_paths_of_the_server_are_closed_while_runs_share_it(
    method: str, path: str
) -> None:
    async with _shared() as server:
        async with _attached(server, "a", 1.0):
            answer = await _send(server, method, path, _body())
            assert answer.status_code == 403
            assert (await _send(server, "GET", "/metrics")).status_code == 200
        _free_steps(server)
        assert (await _send(server, method, path, _body())).status_code != 403


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", STATE),
        ("DELETE", ATTACH),
        ("POST", WEIGHTS),
        ("PUT", f"{WEIGHTS}/0"),
        ("POST", LOAD),
    ],
)
async def test_a_guessed_session_opens_nothing(method: str, path: str) -> None:
    async with _shared() as server, _attached(server, "a", 1.0) as client:
        guessed = {SESSION_HEADER: "0" * len(client.session), VERSION_HEADER: "0"}
        answer = await _send(server, method, path, {"version": 0}, **guessed)
        assert answer.status_code == 412
        assert [*server.engine.adapters.values()] == [1.0]


async def test_a_run_cannot_take_over_anothers_session_by_its_name() -> None:
    async with _shared() as server, _attached(server, "a", 1.0) as client:
        with pytest.raises(ServerBusyError, match="with other credentials"):
            await _client(server, "a", proof="another").attach()
        await client.check()
        assert client.version == 0


async def test_a_restarted_worker_takes_its_own_session_over() -> None:
    async with (
        _shared() as server,
        _attached(server, "a", 1.0) as client,
        _attached(server, "a", 3.0) as again,
    ):
        assert [*server.engine.adapters.values()] == [3.0]
        with pytest.raises(ServerAwayError):
            await client.check()
        await again.check()


async def test_a_run_that_ends_removes_its_adapters_and_no_others() -> None:
    async with _shared() as server, _attached(server, "a", 1.0) as first:
        async with _attached(server, "b", 2.0) as second:
            cut = asyncio.ensure_future(_generate(server, second, _body(5)))
            generating = asyncio.ensure_future(_generate(server, first, _body(5)))
            await until(lambda: len(server.engine.requests) == 2, poll_s=0.005)
        assert '"finish_reason": "abort"' in (await cut).text
        await until(lambda: [*server.engine.adapters.values()] == [1.0], poll_s=0.005)
        _free_steps(server)
        assert (await generating).text.count('"logprob": -1.0') == 5


async def test_a_silent_session_ends_and_its_adapters_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CLEANUP_EVERY_S", 0.01)
    async with _shared() as server, _attached(server, "a", 1.0):
        monkeypatch.setattr(module, "LEASE_S", 0.05)
        await until(lambda: not server.engine.adapters, poll_s=0.005)


async def test_a_run_with_whole_weights_is_refused_with_the_owners_named() -> None:
    async with _shared() as server:
        whole = VllmServer(server.address, owner="w/rollout-0", reach=LOCAL, token=TOKEN)
        async with _attached(server, "a", 1.0), _attached(server, "b", 2.0):
            with pytest.raises(ServerBusyError, match="a/rollout-0, b/rollout-0 use this server"):
                await whole.attach()
        with pytest.raises(ServerRefusedError, match="--enable-lora"):
            await whole.attach()


async def test_a_run_with_adapters_is_refused_by_a_server_without_them() -> None:
    async with serving() as (server,):
        with pytest.raises(ServerRefusedError, match="start vLLM with --enable-lora"):
            await _client(server, "a").attach()


async def test_a_server_takes_as_many_runs_as_it_has_adapters_at_once() -> None:
    async with (
        _shared() as server,
        _attached(server, "a", 1.0),
        _attached(server, "b", 1.0),
        _attached(server, "c", 1.0),
    ):
        with pytest.raises(ServerBusyError, match="--max-loras"):
            await _client(server, "d").attach()


async def test_a_run_on_another_base_is_refused() -> None:
    async with _shared() as server:
        client = _client(server, "a")
        await client.attach()
        weights = adapter_weights(0, {**_sent(1.0), FROZEN_DIGEST: _BASE + 1})
        await client.upload(weights)
        with pytest.raises(ServerRefusedError, match="base weights have digest"):
            await client.load(weights)
        assert not server.engine.adapters
        await client.close()


async def test_a_run_whose_base_is_read_for_long_keeps_its_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CLEANUP_EVERY_S", 0.005)
    async with _shared() as server:
        assert server.app is not None
        adapters = server.app.state.slipstream_adapters
        is_checked, end_expired = asyncio.Event(), module.SharedServer._end_expired

        async def check(shared: module.SharedServer) -> None:
            await end_expired(shared)
            is_checked.set()

        async def read_base() -> str:
            monkeypatch.setattr(module, "LEASE_S", -1.0)
            is_checked.clear()
            await is_checked.wait()
            monkeypatch.setattr(module, "LEASE_S", 15.0)
            return bytes(_BASE.tolist()).hex()

        adapters.base_digest = read_base
        client = _client(server, "a")
        await client.attach()
        monkeypatch.setattr(module.SharedServer, "_end_expired", check)
        await _bring(client, 0, 1.0)
        assert client.version == 0
        await client.close()


async def test_a_request_that_arrives_while_its_version_is_replaced_samples_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _shared() as server, _attached(server, "a", 1.0) as client:
        arrives, go_on = asyncio.Event(), asyncio.Event()
        read_body = module.read_body

        async def wait(request: Request) -> dict[str, Any]:
            if request.url.path == GENERATE:
                arrives.set()
                await go_on.wait()
            return await read_body(request)

        monkeypatch.setattr(module, "read_body", wait)
        asking = asyncio.ensure_future(_generate(server, client))
        await arrives.wait()
        await _bring(client, 1, 5.0)
        go_on.set()
        answer = await asking
        assert (answer.status_code, server.engine.requests) == (412, [])
        assert "serves 1" in answer.text


async def test_an_engine_that_hangs_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_adapters, "WORKERS_TIMEOUT_S", 0.05)
    ended = asyncio.Event()

    async def hang(method: str, args: tuple[object, ...]) -> list[dict[str, Any]]:
        await ended.wait()
        return []

    state = SimpleNamespace(
        engine_client=SimpleNamespace(collective_rpc=hang),
        openai_serving_models=SimpleNamespace(lora_requests={}),
    )
    adapters = vllm_adapters.VllmAdapters(state)
    with pytest.raises(RefusedError, match="did not end load_fleet_adapter within"):
        await adapters._call("load_fleet_adapter", 1, "name", "")
    await adapters.remove(1, "name")
    ended.set()


async def test_an_adapter_that_the_engine_holds_otherwise_gets_no_work() -> None:
    async with _shared() as server:
        assert server.app is not None
        server.app.state.slipstream_adapters.loads = False
        client = _client(server, "a")
        await client.attach()
        with pytest.raises(ServerRefusedError, match="holds another adapter"):
            await _bring(client, 0, 1.0)
        assert not server.engine.adapters
        await client.close()


@pytest.mark.parametrize("share", [0, -1, "nan", 1001, "much"])
async def test_a_share_that_is_no_weight_is_refused(share: Any) -> None:
    async with _shared() as server:
        body = {"owner": "a/rollout-0", "holds": ADAPTERS, "share": share}
        answer = await _send(server, "POST", ATTACH, body)
        assert answer.status_code == 400


async def test_the_state_counts_tokens_by_run() -> None:
    async with (
        _shared() as server,
        _attached(server, "a", 1.0, share=2.0) as first,
        _attached(server, "b", 2.0),
    ):
        _free_steps(server)
        await _generate(server, first, _body(7))
        state = (await _send(server, "GET", STATE)).json()
        usage = {row["run"]: row for row in state["runs"]}
        assert (usage["a"]["tokens"], usage["a"]["share"]) == (7, 2.0)
        assert (usage["b"]["tokens"], usage["b"]["version"]) == (0, 0)
        assert "session" not in usage["a"]


async def test_a_flood_of_one_run_leaves_slots_to_another() -> None:
    async with (
        _shared() as server,
        _attached(server, "a", 1.0) as flooding,
        _attached(server, "b", 2.0) as other,
    ):
        flood = [asyncio.ensure_future(_generate(server, flooding, _body(50))) for _ in range(40)]
        await until(lambda: len(server.engine.requests) == 4, poll_s=0.005)
        tasks = [asyncio.ensure_future(_generate(server, other, _body(2))) for _ in range(2)]
        await until(lambda: len(server.engine.requests) == 6, poll_s=0.005)
        # Two of the four that ran were asked to yield.
        await until(lambda: sum(task.done() for task in flood) == 2, poll_s=0.005)
        yielded = [task.result().text for task in flood if task.done()]
        assert all('"finish_reason": "abort"' in text for text in yielded)
        _free_steps(server, 10_000)
        for task in tasks:
            assert (await task).text.count('"logprob": -2.0') == 2
        await asyncio.gather(*flood)


async def test_a_request_whose_client_left_is_not_sent_to_the_engine() -> None:
    async with _shared() as server, _attached(server, "a", 1.0) as client:
        running = [asyncio.ensure_future(_generate(server, client, _body(5))) for _ in range(4)]
        await until(lambda: len(server.engine.requests) == 4, poll_s=0.005)
        waiting = asyncio.ensure_future(_generate(server, client, _body(5)))

        async def num_waiting() -> int:
            state = (await _send(server, "GET", STATE)).json()
            return int(state["runs"][0]["waiting"])

        while await num_waiting() != 1:  # noqa: ASYNC110 -- another process would answer
            await asyncio.sleep(0.005)
        waiting.cancel()
        while await num_waiting() != 0:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        _free_steps(server)
        await asyncio.gather(*running)
        assert len(server.engine.requests) == 4


def test_other_tensors_than_adapters_are_refused() -> None:
    with pytest.raises(ValueError, match="e_score_correction_bias"):
        adapter_weights(0, {**_sent(1.0), "mlp.gate.e_score_correction_bias": torch.zeros(4)})
