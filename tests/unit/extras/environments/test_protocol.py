"""Environment protocol: valid and invalid requests and responses."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from services.extras.environments.client import HttpEnvironment
from services.extras.environments.host import Host
from services.extras.environments.protocol import as_json
from services.rollout.calls.outside import AddressPolicy, ExternalService
from services.rollout.failures import CallError

URL = "http://127.0.0.1:1"
HERE = AddressPolicy({"127.0.0.1"})


class Counting:
    """Environment that counts messages and is done after three steps."""

    num_environments = 0

    def __init__(self, *, start: int = 0) -> None:
        Counting.num_environments += 1
        self.count = start

    def reset(self, task: Any, *, seed: int) -> str:
        return f"count from {self.count} for {task['name']}"

    async def step(self, message: Any) -> dict[str, Any]:
        self.count += 1
        return {
            "messages": [{"role": "user", "content": f"{self.count}"}],
            "done": self.count >= 3,
            "reward": {"said": 1.0},
            "metrics": {"length": len(message["content"])},
        }

    def close(self) -> dict[str, float]:
        return {"closed": 0.5}


def environment(
    answer: Callable[[httpx.Request], Any] | httpx.AsyncBaseTransport, **changes: Any
) -> HttpEnvironment:
    if not isinstance(answer, httpx.AsyncBaseTransport):
        answer = httpx.MockTransport(answer)
    service = ExternalService(URL, reach=HERE, transport=answer)
    return HttpEnvironment("games", service, **{"timeout_s": 5.0, "wait_s": 5.0, **changes})


def hosted(make: Any, *, max_episodes: int = 10, **arguments: Any) -> HttpEnvironment:
    host = Host(make, "games", arguments, max_episodes=max_episodes)
    return environment(httpx.ASGITransport(host.app()), timeout_s=1.0, wait_s=0.2)


async def test_an_episode_starts_continues_and_ends() -> None:
    games = hosted(Counting, start=1)
    await games.check()
    session, first = await games.begin({"name": "me"}, seed=3)
    assert [message["content"] for message in first.messages] == ["count from 1 for me"]
    second = await session.step({"role": "assistant", "content": "abc"})
    assert (second.is_done, second.reward, second.metrics) == (False, {"said": 1.0}, {"length": 3})
    third = await session.step({"role": "assistant", "content": ""})
    assert third.is_done
    assert (await session.close()).reward == {"closed": 0.5}
    with pytest.raises(CallError, match=r"environment 'games'.*step 3: "):
        await session.step({"role": "assistant", "content": ""})


async def test_a_step_that_comes_twice_happens_once() -> None:
    host = Host(Counting, "games", {})
    client = httpx.AsyncClient(transport=httpx.ASGITransport(host.app()), base_url=URL)
    body = {"task": {"name": "me"}, "seed": 0}
    name = (await client.post("/v1/episodes", json=body)).json()["episode"]
    step = {"step": 1, "message": {"role": "assistant", "content": "a"}}
    answers = [(await client.post(f"/v1/episodes/{name}", json=step)).json() for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0]["messages"][0]["content"] == "1"
    late = await client.post(f"/v1/episodes/{name}", json={**step, "step": 4})
    assert late.status_code == 409
    assert "step 4" in late.json()["error"]


async def test_a_full_environment_is_waited_for_and_a_broken_connection_tried_again() -> None:
    answers = iter([503, 429, None, 200])

    def answer(request: httpx.Request) -> httpx.Response:
        status = next(answers)
        if status is None:
            raise httpx.ConnectError("reset by peer")
        return httpx.Response(status, json={"episode": "e", "messages": "go"})

    _, first = await environment(answer).begin({}, seed=0)
    assert first.messages[0]["content"] == "go"


async def test_a_missing_episode_slot_is_a_failure_with_the_reason() -> None:
    games = hosted(Counting, max_episodes=1)
    await games.begin({"name": "one"}, seed=0)
    with pytest.raises(CallError, match=r"'games'.*0.2 s") as e:
        await games.begin({"name": "two"}, seed=0)
    assert e.value.kind == "timeout"


async def test_episode_ids_cannot_be_guessed() -> None:
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(Host(Counting, "games", {}).app()), base_url=URL
    )
    body = {"task": {"name": "me"}, "seed": 0}
    names = [(await client.post("/v1/episodes", json=body)).json()["episode"] for _ in range(9)]
    assert len(set(names)) == 9
    assert min(map(len, names)) >= 32
    for guess in ("1", "2", names[0][:-1], names[0].swapcase()):
        assert (await client.delete(f"/v1/episodes/{guess}")).status_code == 404


async def test_an_idle_episode_is_closed_and_frees_its_slot() -> None:
    closed = asyncio.Event()

    class Closing(Counting):
        async def close(self) -> dict[str, float]:
            closed.set()
            return {}

    host = Host(Closing, "games", {}, max_episodes=1, idle_s=0.05)
    games = environment(httpx.ASGITransport(host.app()))
    session, _ = await games.begin({"name": "one"}, seed=0)
    async with asyncio.timeout(10):
        await closed.wait()
    with pytest.raises(CallError, match="episode"):
        await session.step({"role": "assistant", "content": ""})
    await games.begin({"name": "two"}, seed=0)


@pytest.mark.parametrize("body", [b"[]", b"{", b"[" * 100_000, b'{"task": {}}'])
async def test_an_incomplete_request_is_rejected(body: bytes) -> None:
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(Host(Counting, "games", {}).app()), base_url=URL
    )
    assert (await client.post("/v1/episodes", content=body)).status_code == 400


def begun(answer: Any) -> Callable[[httpx.Request], httpx.Response]:
    return lambda _: httpx.Response(200, content=json.dumps(answer))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"messages": "hi"}, "id of its episode"),
        ({"episode": "e"}, "messages must be"),
        ({"episode": "e", "messages": "hi", "done": "yes"}, "done must be true or false"),
        ({"episode": "e", "messages": [{"role": "assistant", "content": ""}]}, "a message must be"),
        ({"episode": "e", "messages": [{"role": "user", "content": 3}]}, "a message must be"),
        ({"episode": "e", "messages": "hi", "rewrad": 1}, "rewrad"),
        ({"episode": "e", "messages": "hi", "reward": "great"}, "reward must be a number"),
        ({"episode": "e", "messages": "hi", "reward": {"a": float("nan")}}, "finite number"),
        ({"episode": "e", "messages": "hi", "reward": {"": 1}}, "reward"),
        ({"episode": "e", "messages": "hi", "tools": {"name": "go"}}, "tools must be a list"),
        (["no", "object"], "JSON object"),
        ({"episode": "e", "messages": "x" * (2 << 20)}, "1048576 bytes"),
    ],
)
async def test_wrong_responses_are_failures_with_the_reason(answer: Any, message: str) -> None:
    with pytest.raises(CallError, match=message) as caught:
        await environment(begun(answer)).begin({}, seed=0)
    assert caught.value.kind == "invalid_value"
    assert "games" in caught.value.message or "127.0.0.1" in caught.value.message


async def test_a_status_without_an_error_is_reported() -> None:
    with pytest.raises(CallError, match=r"302: \{\}"):
        await environment(lambda _: httpx.Response(302, json={})).begin({}, seed=0)


async def test_an_answer_to_another_step_is_rejected() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        begin = {"episode": "e", "messages": "go"}
        is_begin = request.url.path == "/v1/episodes"
        return httpx.Response(200, json=begin if is_begin else {"step": 7, "messages": "late"})

    session, _ = await environment(answer).begin({}, seed=0)
    with pytest.raises(CallError, match="step 7"):
        await session.step({"role": "assistant", "content": ""})


async def test_a_silent_peer_fails_at_the_deadline() -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(CallError, match="'games'") as e:
        await environment(answer, timeout_s=0.05).begin({}, seed=0)
    assert e.value.kind == "timeout"


async def test_another_protocol_version_is_rejected() -> None:
    with pytest.raises(CallError, match="protocol version 2"):
        await environment(begun({"protocol": 2})).check()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"messages": "x" * (17 << 20)}, "bytes"),
        (["a list"], "list"),
        ({"messages": "a", "reward": object()}, "not JSON serializable"),
        ({"messages": "a", "reward": float("nan")}, "{.*nan"),
        ({"messages": "a\ud800"}, "surrogates not allowed"),
    ],
)
async def test_wrong_results_of_an_environment_class_are_reported(
    result: Any, message: str
) -> None:
    class Wrong:
        def reset(self, task: Any, *, seed: int) -> Any:
            return result

    with pytest.raises(CallError, match=message):
        await hosted(Wrong).begin({}, seed=0)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("gold"), "KeyError: 'gold'"),
        (SystemExit(3), "SystemExit: 3"),
        (ValueError("\ud800 is no text"), r"ValueError: \\ud800 is no text"),
    ],
)
async def test_an_exception_of_an_environment_class_is_reported_and_frees_its_slot(
    error: BaseException, message: str
) -> None:
    class Broken:
        def reset(self, task: Any, *, seed: int) -> Any:
            raise error

    games = hosted(Broken, max_episodes=1)
    for _ in range(2):
        with pytest.raises(CallError, match=f"'games'.*{message}"):
            await games.begin({}, seed=0)


async def test_a_deeply_nested_answer_is_rejected() -> None:
    deep = httpx.Response(200, content=b"[" * 100_000)
    with pytest.raises(CallError, match="JSON object"):
        await environment(lambda _: deep).begin({}, seed=0)


@pytest.mark.parametrize(
    ("options", "status", "named"),
    [
        (["gone.py:Game", "--bind=unix:{place}/socket"], 1, "gone.py"),
        (["gone.py:Game", "--bind=unix:{place}/socket", "--arguments=[1]"], 2, "--arguments"),
        (["gone.py:Game", "--bind=unix:{place}/socket", "--arguments={{"], 2, "--arguments"),
    ],
)
def test_a_host_that_cannot_start_ends_with_an_error_status(tmp_path, options, status, named):
    command = [sys.executable, "-m", "services.extras.environments.host"]
    process = subprocess.run(
        [*command, *(option.format(place=tmp_path) for option in options)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == status
    assert named in process.stdout + process.stderr


def test_an_answer_may_have_numbers_of_numpy() -> None:
    answer = {
        "done": np.bool_(True),
        "reward": {"a": np.float32(0.5)},
        "metrics": {"b": np.int64(3)},
    }
    assert json.loads(as_json(answer)) == {"done": True, "reward": {"a": 0.5}, "metrics": {"b": 3}}
    with pytest.raises(ValueError, match="JSON"):
        as_json({"reward": np.float32("nan")})
