"""Tests of episodes with an unmodified server of the OpenEnv package."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from services.extras.environments.openenv import OpenEnv
from services.extras.environments.workflow import Environments
from services.rollout.calls.outside import AddressPolicy
from services.rollout.calls.pool import CallPool
from services.rollout.failures import BusyError, CallError
from services.rollout.workflows.base import WorkflowResources
from tests.helpers.served_episode import Scripted, make_episode

HERE = AddressPolicy({"127.0.0.1"})
RESOURCES = WorkflowResources(calls=CallPool(1), reach=HERE)


def openenv_app(*, most: int = 4) -> Any:
    server = pytest.importorskip("openenv.core.env_server.http_server")
    interfaces = pytest.importorskip("openenv.core.env_server.interfaces")
    types = pytest.importorskip("openenv.core.env_server.types")

    class Shout(types.Action):
        text: str

    class EchoObservation(types.Observation):
        echo: str = ""

    class Echo(interfaces.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: Any = None, episode_id: Any = None, **_: Any) -> Any:
            self.steps = 0
            return EchoObservation(echo=f"say something, {seed is not None}")

        def step(self, action: Any, timeout_s: Any = None, **_: Any) -> Any:
            self.steps += 1
            if action.text == "raise":
                raise RuntimeError("too loud")
            return EchoObservation(echo=action.text.upper(), reward=0.5, done=self.steps == 2)

        @property
        def state(self) -> Any:
            return types.State(step_count=self.steps)

    return server.create_fastapi_app(Echo, Shout, EchoObservation, max_concurrent_envs=most)


@asynccontextmanager
async def serving(app: Any, port: int = 0) -> AsyncIterator[int]:
    """Serves an application with uvicorn, as the OpenEnv package does, and yields the port."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None))
        task = asyncio.ensure_future(server.serve([listener]))
        yield listener.getsockname()[1]
        server.should_exit = server.force_exit = True
        await task


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serving(openenv_app()) as port:
        yield port


def workflow(port: int, **changes: Any) -> Environments:
    arguments = {"action": {"text": "{message}"}, "observe": "echo"}
    return Environments(
        environment=f"openenv+http://127.0.0.1:{port}", chat=False, arguments=arguments, **changes
    )


async def test_an_openenv_server_shapes_an_episode(port: int) -> None:
    played = workflow(port)
    async with played.serving(RESOURCES):
        episodes = [make_episode(Scripted(["hello ", "you"])) for _ in range(3)]
        await asyncio.gather(*[played.run(episode) for episode in episodes])
    for episode in episodes:
        texts = [episode.text(turn) for turn in episode.turns]
        assert texts == ["say something, True", "hello ", "HELLO ", "you"]
        assert episode.earned == {"reward": {"reward": 1.0}, "metrics": {}}


async def test_errors_of_an_openenv_server_have_its_name(port: int) -> None:
    played = workflow(port)
    async with played.serving(RESOURCES):
        with pytest.raises(CallError, match=rf"'openenv\+http://127.0.0.1:{port}'.*loud"):
            await played.run(make_episode(Scripted(["raise"])))
    wrong = Environments(
        environment=f"openenv+http://127.0.0.1:{port}", arguments={"observe": "board"}
    )
    with pytest.raises(ValueError, match="'board'"):
        async with wrong.serving(RESOURCES):
            pass


async def test_a_place_in_an_openenv_server_is_waited_for() -> None:
    async with serving(openenv_app(most=1)) as port:
        server = OpenEnv(
            f"openenv+http://127.0.0.1:{port}",
            reach=HERE,
            action={"text": "{message}"},
            observe="echo",
            timeout_s=5.0,
            wait_s=5.0,
        )
        first, _ = await server.begin({}, seed=0)
        waiting = asyncio.ensure_future(server.begin({}, seed=0))
        await asyncio.wait([waiting], timeout=0.2)
        assert not waiting.done()
        await first.close()
        second, _ = await waiting
        await second.close()


async def test_a_server_that_starts_again_is_waited_for() -> None:
    async with serving(openenv_app()) as port:
        pass
    server = OpenEnv(
        f"openenv+http://127.0.0.1:{port}",
        reach=HERE,
        action={"text": "{message}"},
        observe="echo",
        timeout_s=30.0,
        wait_s=30.0,
    )
    beginning = asyncio.ensure_future(server.begin({}, seed=0))
    await asyncio.wait([beginning], timeout=0.1)
    assert not beginning.done()
    async with serving(openenv_app(), port):
        session, _ = await beginning
        await session.close()


async def test_a_server_that_is_not_there_is_a_failure_by_name() -> None:
    server = OpenEnv(
        "openenv+http://127.0.0.1:1", reach=HERE, action={}, observe=None, timeout_s=0.1, wait_s=0.1
    )
    with pytest.raises(CallError, match=r"'openenv\+http://127.0.0.1:1'"):
        await server.begin({}, seed=0)


async def test_a_host_that_does_not_resolve_is_not_a_server_that_is_full() -> None:
    class Nowhere(AddressPolicy):
        async def resolve(self, host: str, port: int) -> str:
            raise BusyError

    server = OpenEnv(
        "openenv+http://gone:1", reach=Nowhere(), action={}, observe=None, timeout_s=0.1, wait_s=600
    )
    with pytest.raises(CallError) as error:
        await server.begin({}, seed=0)
    assert error.value.kind == "exception"
