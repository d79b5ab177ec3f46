"""Agents: functions in a process, services, failures."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from services.common.http.server import serve_http
from services.common.runspec.rollout import SandboxSpec
from services.extras.agents.agent import Agent
from services.extras.bubblewrap import bubblewrap
from services.rollout.calls.outside import AddressPolicy
from services.rollout.calls.pool import CallPool
from services.rollout.failures import CallError
from services.rollout.sandbox.pool import SandboxPool
from services.rollout.sandbox.service import SandboxService
from services.rollout.workflows.base import Interrupted, WorkflowResources
from tests.helpers.served_episode import Scripted, make_episode

AGENTS = """
import os, time
import httpx

def ask(base_url, api_key, model, messages):
    response = httpx.post(
        f"{base_url}/chat/completions",
        headers={"Authorization": f"Bearer {api_key}"},
        json={"model": model, "messages": messages},
        timeout=30,
    )
    response.raise_for_status()
    return response.json()["choices"][0]["message"]

def plain(base_url, api_key, model, prompt, row):
    messages = [{"role": "user", "content": prompt}]
    messages.append(ask(base_url, api_key, model, messages))
    messages.append({"role": "user", "content": "sure?"})
    ask(base_url, api_key, model, messages)

async def coroutine(base_url, api_key, model, prompt, row):
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as client:
        await client.post(f"{base_url}/completions", json={"model": model, "prompt": prompt})

def working(base_url, api_key, model, prompt, row, sandbox):
    sandbox.write("notes", "one\\n")
    reply = ask(base_url, api_key, model, [{"role": "user", "content": prompt}])
    return sandbox.run(f"cat notes; echo {reply['content']}").text.split() == ["one", "hey"]

async def working_async(base_url, api_key, model, prompt, row, sandbox):
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as client:
        await client.post(f"{base_url}/completions", json={"model": model, "prompt": prompt})
    return (await sandbox.run("echo 3")).text == "3\\n"

async def broken(**_): raise KeyError("no luck")
async def idle(**_): pass
def dies(**_): os._exit(3)
async def slow(**_):
    import asyncio
    await asyncio.sleep(100)
"""


@pytest.fixture
def agents(tmp_path: Path) -> str:
    (tmp_path / "agents.py").write_text(AGENTS)
    return str(tmp_path / "agents.py")


@asynccontextmanager
async def serving(agent: str, **arguments):
    workflow = Agent(agent=agent, **arguments)
    async with workflow.serving(
        WorkflowResources(calls=CallPool(1), reach=AddressPolicy(["127.0.0.1"]))
    ):
        yield workflow


@pytest.mark.parametrize(("name", "lines"), [("plain", ["a", "b"]), ("coroutine", ["c"])])
async def test_an_agents_requests_become_the_sample(agents, name, lines):
    async with serving(f"{agents}:{name}") as workflow:
        episodes = [make_episode(Scripted(lines)) for _ in range(8)]
        await asyncio.gather(*[workflow.run(episode) for episode in episodes])
    for episode in episodes:
        assert episode.response_text == lines[-1]
        assert [turn.is_sampled for turn in episode.response_turns] == [True, False, True][
            : 2 * len(lines) - 1
        ]


@pytest.mark.skipif(not bubblewrap.is_usable(), reason="needs bubblewrap")
@pytest.mark.parametrize("name", ["working", "working_async"])
async def test_an_agent_gets_the_sandbox_of_its_episode(agents, name):
    service = SandboxService(SandboxPool(SandboxSpec()))
    async with (
        serving(f"{agents}:{name}") as workflow,
        service.serving("127.0.0.1:0", host="127.0.0.1"),
        service.open({}) as sandbox,
    ):
        episode = make_episode(Scripted(["hey"]))
        episode.sandbox = sandbox
        await workflow.run(episode)
    assert episode.earned is True


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("broken", "exception", "KeyError: 'no luck'"),
        ("idle", "exception", "the policy"),
        ("dies", "sandbox_killed", "exit status 3"),
        ("slow", "timeout", "longer than 0.2 s"),
    ],
)
async def test_failures_of_an_agent_are_typed_and_the_next_episode_runs(
    agents, name, kind, message
):
    async with serving(f"{agents}:{name}", timeout_s=0.2 if name == "slow" else 20) as workflow:
        for _ in range(2):
            with pytest.raises(CallError, match=message) as caught:
                await workflow.run(make_episode(Scripted([])))
            assert caught.value.kind == kind


async def test_an_interruption_ends_the_agent_and_keeps_the_tokens(agents):
    episode = make_episode(Scripted(["first", "second"], cut=2))
    async with serving(f"{agents}:plain") as workflow:
        with pytest.raises(Interrupted):
            await workflow.run(episode)
    assert [turn.is_cut for turn in episode.recorded({})] == [False, False, False, True]


async def test_an_agent_may_be_a_service():
    async def act(scope, receive, send):
        task = httpx.Response(200, content=(await receive())["body"]).json()
        async with httpx.AsyncClient() as client:
            await client.post(
                f"{task['base_url']}/completions",
                headers={"Authorization": f"Bearer {task['api_key']}"},
                json={"model": task["model"], "prompt": task["prompt"]},
            )
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    episode = make_episode(Scripted(["hey"]))
    async with (
        serve_http("127.0.0.1:0", act) as port,
        serving(f"http://127.0.0.1:{port}/run") as workflow,
    ):
        await workflow.run(episode)
    async with serving(f"http://127.0.0.1:{port}/run") as workflow:
        with pytest.raises(CallError, match="does not respond"):
            await workflow.run(make_episode(Scripted([])))
    assert episode.response_text == "hey"


async def test_an_agent_that_does_not_exist_is_named_before_the_run_starts(agents):
    with pytest.raises(ValueError, match=r"workflow_arguments\.agent.*no 'missing'"):
        async with serving(f"{agents}:missing"):
            pass
