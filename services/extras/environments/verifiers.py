"""Adapter for environments of ``verifiers`` (0.4): their tasks become rows, and an agent plays them.

The environments are used unchanged. They query the policy through the endpoint of
``rollout.workflow: agent`` and score the result themselves. The rewards of their traces become the
terms by name, weights included; their metrics are only recorded.
"""

import functools
import itertools
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers import v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


def tasks_of(
    taskset: str, arguments: Mapping[str, Any], *, limit: int | None
) -> Sequence[Mapping[str, Any]]:
    """Returns the rows of a taskset.

    Args:
        arguments: Configuration of the environment (``EnvConfig``) besides the taskset's id.
        limit: Max rows; required for an infinite taskset.

    Raises:
        ValueError: If the configuration is invalid, or the taskset is infinite and has no limit.
    """
    config = {**arguments, "taskset": {**arguments.get("taskset", {}), "id": taskset}}
    tasks = _environment(json.dumps(config, sort_keys=True)).taskset
    if limit is None and not tasks.bounded:
        raise ValueError("the taskset is infinite; set limit to the number of tasks in an epoch")
    return [
        {
            "prompt": task.data.prompt_text or task.data.name or f"task {index}",
            "index": index,
            "verifiers": config,
        }
        for index, task in enumerate(itertools.islice(iter(tasks), limit))
    ]


async def play(
    base_url: str, api_key: str, model: str, prompt: str, row: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Plays one episode of the row's environment with the policy; returns reward and metrics.

    Raises:
        RuntimeError: If the environment could not finish or score the episode.
    """
    config = json.dumps(row["verifiers"], sort_keys=True)
    task = _task(config, row["index"])
    # An environment's servers keep a client for each key, so a new environment is loaded for each episode.
    environment = load_environment(resolve_env_config(json.loads(config)))
    variable = f"VERIFIERS_KEY_{secrets.token_hex(8)}"
    os.environ[variable] = api_key
    try:
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
        async with environment.serving():
            context = vf.ModelContext(model=model, client=client)
            episode = await environment.run_episode(task, context)
    finally:
        del os.environ[variable]
    if not episode.ok:
        raise RuntimeError(_problem(episode))
    return _rewards(episode.traces)


def _rewards(traces: Sequence[Any]) -> dict[str, Any]:
    """Returns rewards and metrics of an episode, prefixed by the agent's name if there are several."""
    terms: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for number, trace in enumerate(traces):
        name = getattr(trace.agent, "name", None) or str(number)
        prefix = f"{name}." if len(traces) > 1 else ""
        for term, reward in trace.rewards.items():
            if reward is None:
                raise RuntimeError(f"verifiers returned no reward {term!r}")
            terms[prefix + term] = reward.value
        metrics |= {
            prefix + name: float(value)
            for name, value in trace.metrics.items()
            if value is not None and prefix + name not in terms
        }
    return {"reward": terms, "metrics": metrics}


def _problem(episode: Any) -> str:
    """Returns the errors of an episode, first cause first."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    messages = [f"{error.type}: {error.message}" for error in errors]
    return "verifiers: " + ("; ".join(messages) or "the episode was stopped before its end")


@functools.lru_cache(16)
def _environment(config: str) -> Any:
    return load_environment(resolve_env_config(json.loads(config)))


@functools.lru_cache(4096)
def _task(config: str, index: int) -> Any:
    return next(itertools.islice(iter(_environment(config).taskset), index, None))
