"""Harbor tasks, each in the sandbox of its episode."""

import json
from contextlib import asynccontextmanager

import pytest

from services.common.runspec.rollout import SandboxSpec
from services.extras.agents.remote_sandbox import RemoteSandbox
from services.extras.bubblewrap import bubblewrap
from services.extras.environments.harbor import HarborTask, tasks
from services.rollout.sandbox.pool import SandboxPool
from services.rollout.sandbox.service import SandboxService

TASK = """
schema_version = "1.4"

[metadata]
difficulty = "easy"

[verifier]
timeout_sec = 60.0
env = {EXPECTED = "7"}

[agent]
timeout_sec = 60.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 512
"""
TEST = """#!/bin/bash
mkdir -p /logs/verifier
python3 /tests/test_outputs.py > /logs/verifier/reward.txt
"""
OUTPUTS = """
import os, sys
sys.path.insert(0, os.getcwd())
from calc import add
print(int(add(3, 4) == int(os.environ["EXPECTED"])))
"""


def make_task(root, name="fix", *, task=TASK, test=TEST):
    files = {
        "task.toml": task,
        "instruction.md": "add(3, 4) must be 7.",
        "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\nCOPY . /app\n",
        "environment/calc.py": "def add(a, b):\n    return a - b\n",
        "tests/test.sh": test,
        "tests/test_outputs.py": OUTPUTS,
        "solution/solve.sh": "#!/bin/bash\nsed -i 's/-/+/' calc.py\n",
    }
    for path, content in files.items():
        (root / name / path).parent.mkdir(parents=True, exist_ok=True)
        (root / name / path).write_text(content)
    return root / name


def call(command):
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}


@asynccontextmanager
async def played(root):
    """Yields the environment of a folder's only task, after its reset in a sandbox."""
    (row,) = tasks(str(root))
    spec = SandboxSpec(image=str(root), image_column="files", folders=("/app", "/tests", "/logs"))
    service = SandboxService(SandboxPool(spec))
    async with service.serving("127.0.0.1:0", host="127.0.0.1"), service.open(row) as box:
        environment = HarborTask()
        observation = await environment.reset(row, seed=0, sandbox=RemoteSandbox(box.access))
        assert observation["messages"] == "add(3, 4) must be 7."
        assert observation["tools"][0]["function"]["name"] == "bash"
        yield environment


@pytest.mark.skipif(not bubblewrap.is_usable(), reason="needs bubblewrap")
async def test_a_task_runs_unchanged_and_its_tests_write_the_reward(tmp_path) -> None:
    solution = (make_task(tmp_path) / "solution" / "solve.sh").read_text()
    async with played(tmp_path) as environment:
        observation = await environment.step(call("pwd; ls; cat /tests/* 2>&1; false"))
        message = observation["messages"][0]
        assert message["tool_call_id"] == "1"
        assert message["content"].startswith("/app\nDockerfile\ncalc.py\n")
        assert "EXPECTED" not in message["content"]  # the tests are copied into the sandbox later
        assert message["content"].endswith("(status 1)")
        observation = await environment.step(call(solution))
        assert "done" not in observation
        assert await environment.step({"role": "assistant", "content": "Done."}) == {
            "messages": [],
            "done": True,
            "reward": {"reward": 1.0},
        }
        assert await environment.close() is None


@pytest.mark.skipif(not bubblewrap.is_usable(), reason="needs bubblewrap")
async def test_an_episode_that_a_limit_ends_is_judged_and_cheating_does_not_count(tmp_path) -> None:
    make_task(tmp_path)
    async with played(tmp_path) as environment:
        cheat = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json"
        await environment.step(call(cheat))
        observation = await environment.step(
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "x"}}]}
        )
        assert "command" in observation["messages"][0]["content"]
        assert await environment.close() == {"reward": 0.0}


@pytest.mark.skipif(not bubblewrap.is_usable(), reason="needs bubblewrap")
@pytest.mark.parametrize(
    "test", ["#!/bin/bash\necho broken\n", "#!/bin/bash\necho no > /logs/verifier/reward.txt\n"]
)
async def test_tests_without_a_reward_fail_the_episode(tmp_path, test) -> None:
    make_task(tmp_path, test=test)
    async with played(tmp_path) as environment:
        with pytest.raises((RuntimeError, ValueError), match="fix"):
            await environment.step({"role": "assistant", "content": ""})


def test_images_are_the_task_s_own_or_named_after_it(tmp_path) -> None:
    make_task(tmp_path, "one")
    make_task(tmp_path, "two", task=TASK + 'docker_image = "registry/two:1"\n')
    rows = tasks(str(tmp_path), image="tasks/{name}:3")
    assert [row["image"] for row in rows] == ["tasks/one:3", "registry/two:1"]


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("gpus = 1", "environment.gpus"),
        ('os = "windows"', "environment.os"),
        ('network_mode = "allowlist"', "environment.network_mode"),
        ('env = {KEY = "${KEY}"}', "environment.env.KEY"),
        ('[[steps]]\nname = "one"', "steps"),
        ("[verifier.environment]\ncpus = 1", "verifier.environment"),
    ],
)
def test_what_a_sandbox_has_no_place_for_is_refused_by_name(tmp_path, more, key) -> None:
    make_task(tmp_path, task=TASK + more + "\n")
    with pytest.raises(ValueError, match=key):
        tasks(str(tmp_path))
