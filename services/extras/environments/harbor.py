"""Tasks of Harbor (https://harborframework.com), unchanged, in the sandboxes of their episodes.

A task is a folder with ``instruction.md``, ``task.toml``, ``environment/`` and ``tests/test.sh``. The policy
runs commands in the sandbox with one tool; then the tests run, and write the reward. Harbor itself is not
needed. Features of tasks that sandboxes do not support are refused by name: a network, several steps or
containers, another user, GPUs.
"""

import asyncio
import json
import math
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from services.extras.agents.remote_sandbox import RemoteSandbox

TESTS: Final = "/tests"
"""Folder of the tests in the sandbox, as in Harbor."""
REWARDS: Final = "/logs/verifier"
"""Folder in which the tests write ``reward.json`` or ``reward.txt``, as in Harbor."""
_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command in a shell. Answer without a call when the task is done.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
_VERIFIER_TIMEOUT_S = 600.0
# Unsupported tables and keys of task.toml, each with the values that are accepted as they change nothing.
_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "steps": ([],),
    "agent.user": ("root", 0),
    "agent.network_mode": ("no-network",),
    "verifier.user": ("root", 0),
    "verifier.network_mode": ("no-network",),
    "verifier.environment": (),
    "verifier.environment_mode": ("shared",),
    "verifier.collect": ([],),
    "environment.network_mode": ("no-network", "public"),
    "environment.allow_internet": (True, False),
    "environment.os": ("linux",),
    "environment.gpus": (0,),
    "environment.tpu": (),
    "environment.mcp_servers": ([],),
    "environment.healthcheck": (),
}


def tasks(folder: str, *, image: str = "{name}") -> list[dict[str, Any]]:
    """Returns a row for each task in a folder, for ``data.train.source: python``.

    Args:
        folder: Folder with a folder for each task.
        image: Name of the image that was built from the ``environment/Dockerfile`` of a task, with the task's
            ``{name}``; tasks with ``environment.docker_image`` use that.

    Returns:
        Rows with ``prompt``, ``task`` (its folder), ``image``, and ``files`` (its folder ``environment``,
        relative to ``folder``). ``rollout.sandbox.image_column`` is ``image``, or ``files`` with bubblewrap.

    Raises:
        ValueError: If a task needs a feature that sandboxes do not support; the message has the key.
    """
    root = Path(folder).resolve()
    return [_row(path.parent, root, image) for path in sorted(root.glob("*/task.toml"))]


class HarborTask:
    """Plays one task.

    Args:
        workdir: Folder in which commands run, if it is not the sandbox's own; ``environment.workdir`` of the
            task takes precedence.
    """

    def __init__(self, *, workdir: str = "") -> None:
        self._workdir = workdir
        self._folder = Path()
        self._task: Mapping[str, Any] = {}
        self._sandbox: RemoteSandbox | None = None
        self._is_verified = False

    async def reset(
        self, task: Mapping[str, Any], *, seed: int, sandbox: RemoteSandbox
    ) -> dict[str, Any]:
        """Returns the instruction and the tool."""
        del seed
        self._folder, self._sandbox = Path(task["task"]), sandbox
        self._task = await asyncio.to_thread(_config, self._folder)
        self._workdir = _value(self._task, "environment.workdir") or self._workdir
        return {"messages": task["prompt"], "tools": [_TOOL]}

    async def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Runs the commands of a message; runs the tests if it has none."""
        calls = message.get("tool_calls") or ()
        if not calls:
            return {"messages": [], "done": True, "reward": await self._verify()}
        answers = [
            {"role": "tool", "tool_call_id": call.get("id", ""), "content": await self._run(call)}
            for call in calls
        ]
        return {"messages": answers}

    async def close(self) -> dict[str, float] | None:
        """Runs the tests if a limit ended the episode."""
        return None if self._is_verified or self._sandbox is None else await self._verify()

    async def _run(self, call: Mapping[str, Any]) -> str:
        arguments = call["function"]["arguments"]
        try:
            command = (json.loads(arguments) if isinstance(arguments, str) else arguments)[
                "command"
            ]
        except (ValueError, KeyError, TypeError):
            return 'the arguments must be {"command": "..."}'
        variables = _value(self._task, "environment.env") or {}
        result = await self._box.run(self._in_workdir(str(command), variables))
        end = f"(killed: {result.limit})" if result.limit else f"(status {result.exit_status})"
        return f"{result.text}{end}"

    async def _verify(self) -> dict[str, float]:
        """Runs the tests and returns the rewards by name."""
        self._is_verified = True
        # Files that the policy wrote to these folders do not count.
        await self._box.run(f"rm -rf {REWARDS} {TESTS}/*; mkdir -p {REWARDS} {TESTS}")
        for path, content in await asyncio.to_thread(_files, self._folder / "tests"):
            await self._box.write(f"{TESTS}/{path}", content)
        variables = {
            **(_value(self._task, "environment.env") or {}),
            **(_value(self._task, "verifier.env") or {}),
        }
        script = f"chmod +x {TESTS}/test.sh; {TESTS}/test.sh > {REWARDS}/test-stdout.txt 2>&1"
        timeout_s = float(_value(self._task, "verifier.timeout_sec") or _VERIFIER_TIMEOUT_S)
        await self._box.run(self._in_workdir(script, variables), timeout_s=timeout_s)
        result = await self._box.run(
            f"cat {REWARDS}/reward.json 2>/dev/null || cat {REWARDS}/reward.txt 2>/dev/null"
        )
        if result.exit_status != 0:
            output = (await self._box.run(f"tail -c 500 {REWARDS}/test-stdout.txt")).text
            raise RuntimeError(f"the tests of {self._folder.name!r} wrote no reward: {output}")
        return _rewards(result.text, self._folder.name)

    def _in_workdir(self, command: str, variables: Mapping[str, str]) -> str:
        exports = "".join(
            f"export {name}={shlex.quote(str(value))}; " for name, value in variables.items()
        )
        return f"cd {shlex.quote(self._workdir or '.')} && {exports}\n{command}"

    @property
    def _box(self) -> RemoteSandbox:
        assert self._sandbox is not None
        return self._sandbox


def _row(folder: Path, root: Path, image: str) -> dict[str, Any]:
    config = _config(folder)
    return {
        "prompt": (folder / "instruction.md").read_text(encoding="utf-8"),
        "task": str(folder),
        "image": _value(config, "environment.docker_image") or image.format(name=folder.name),
        "files": f"{folder.relative_to(root)}/environment",
    }


def _config(folder: Path) -> Mapping[str, Any]:
    """Reads and checks ``task.toml``. Raises ValueError if a sandbox cannot run the task."""
    config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    for key, neutral in _UNSUPPORTED.items():
        value = _value(config, key)
        if value is not None and value not in neutral:
            raise ValueError(
                f"Harbor task {folder.name!r}: {key} = {value!r} is not supported in a sandbox; leave the "
                "task out"
            )
    if (folder / "environment" / "docker-compose.yaml").exists():
        raise ValueError(
            f"Harbor task {folder.name!r} has several containers (environment/docker-compose.yaml), but a "
            "sandbox is one; leave the task out"
        )
    for key in ("environment.env", "verifier.env"):
        for name, value in (_value(config, key) or {}).items():
            if "${" in str(value):
                raise ValueError(
                    f"Harbor task {folder.name!r}: {key}.{name} = {value!r} refers to a variable of the "
                    "host, which sandboxes do not see; give the value"
                )
    if not (folder / "tests" / "test.sh").exists():
        raise ValueError(
            f"Harbor task {folder.name!r} has no tests/test.sh, which writes the reward"
        )
    return config


def _value(config: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a dotted key; None if the key is missing."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _files(folder: Path) -> Sequence[tuple[str, bytes]]:
    def found() -> Iterator[tuple[str, bytes]]:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield str(path.relative_to(folder)), path.read_bytes()

    return list(found())


def _rewards(text: str, name: str) -> dict[str, float]:
    """Reads ``reward.json`` or ``reward.txt``. Raises ValueError."""
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"the tests of {name!r} wrote no number as reward: {text[:80]!r}"
        ) from error
    rewards = answer if isinstance(answer, dict) else {"reward": answer}
    for key, value in rewards.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"the tests of {name!r} wrote the reward {key!r} = {value!r:.80}")
    return {key: float(value) for key, value in rewards.items()}
