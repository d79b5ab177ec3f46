"""Finds out what would make a run fail, before anything is started.

Every check is one that a service makes as well; here all of them are made at once, and all problems are
reported together.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from services.common.callables import load_callable
from services.common.models.loading import load_config
from services.common.models.tokenizer import load_tokenizer
from services.common.spec.loader import SpecError
from services.common.spec.run import RunSpec
from services.rollout.data import open_sources
from services.rollout.workflows.load import load_workflow

_ENGINE_PACKAGES = {"vllm": "vllm", "sglang": "sglang"}
_BUILT_IN_REWARDS = ("exact_match", "math_verify", "reasoning_gym", "code_tests")


def check(spec: RunSpec) -> None:
    """Check everything that can be checked on this machine.

    Raises:
        SpecError: With one line per problem.
    """
    problems: list[str] = []
    for step in (_check_model, _check_data, _check_rewards, _check_workflow, _check_engine):
        _collect(problems, step, spec)
    if problems:
        raise SpecError(problems)


def _collect(problems: list[str], step: Callable[[RunSpec], None], spec: RunSpec) -> None:
    try:
        step(spec)
    except (ValueError, OSError) as error:
        problems.append(str(error))


def _check_model(spec: RunSpec) -> None:
    path = spec.model.path
    if path.startswith(("/", ".", "~")) and not Path(path).expanduser().is_dir():
        raise ValueError(
            f"model.path: there is no folder {path!r}; name a folder with a model, a Hugging Face id such as "
            "'Qwen/Qwen2.5-0.5B', or a preset such as 'tiny:qwen2-0.4m'"
        )
    load_config(spec.model, load_tokenizer(spec.model))
    if spec.model.warm_start is not None:
        _check_callable("model.warm_start.examples", spec.model.warm_start.examples)


def _check_data(spec: RunSpec) -> None:
    open_sources(spec.data)


def _check_rewards(spec: RunSpec) -> None:
    for index, reward in enumerate(spec.rollout.rewards):
        if reward.name in _BUILT_IN_REWARDS or "://" in reward.name:
            continue
        key = f"rollout.rewards.{index}.name"
        if ":" not in reward.name:
            raise ValueError(
                f"{key}: {reward.name!r} is no reward; take one of {', '.join(_BUILT_IN_REWARDS)}, or "
                "'module:function' or 'file.py:function'"
            )
        _check_callable(key, reward.name)


def _check_workflow(spec: RunSpec) -> None:
    load_workflow(spec.rollout)
    arguments = spec.rollout.workflow_arguments
    named = {"agent": arguments.get("agent"), "tools": arguments.get("tools", ())}
    if spec.rollout.workflow == "agent" and "://" not in str(named["agent"]):
        _check_callable("rollout.workflow_arguments.agent", str(named["agent"]))
    if spec.rollout.workflow == "multi_turn":
        for tool in named["tools"]:
            _check_callable("rollout.workflow_arguments.tools", str(tool))


def _check_engine(spec: RunSpec) -> None:
    package = _ENGINE_PACKAGES.get(spec.rollout.engine)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(
            f"rollout.engine is {spec.rollout.engine!r}, but the package {package} is not installed; "
            f"install it, or set rollout.engine to 'torch'"
        )


def _check_callable(key: str, reference: str) -> None:
    try:
        load_callable(reference)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{key}: {error}") from error
