"""Built-in rewards, workflows and agents by name.

The tables hold import paths because a process loads only what its run names: the import of
math-verify alone takes seconds.
"""

from collections.abc import Mapping
from typing import Final

_REWARDS: Final = "services.rollout.rewards"
_WORKFLOWS: Final = "services.rollout.workflows"

REWARDS: Final[Mapping[str, str]] = {
    "exact_match": f"{_REWARDS}.answers:exact_match",
    "math_verify": f"{_REWARDS}.math_answer:math_answer",
    "reasoning_gym": f"{_REWARDS}.answers:gym_answer",
    "code_tests": f"{_REWARDS}.code_tests:code_tests",
}
"""The rewards by the value of ``rollout.rewards.N.name``."""

EARNED: Final = "environment"
"""Name of the reward whose score the environment or the agent gave to the episode."""

NEED_ANSWERS: Final = frozenset({"exact_match", "math_verify", "code_tests"})
"""Rewards that compare with the expected answer."""

WORKFLOWS: Final[Mapping[str, str]] = {
    "single_turn": f"{_WORKFLOWS}.base:SingleTurn",
    "multi_turn": f"{_WORKFLOWS}.multi_turn:MultiTurn",
    "agent": "services.rollout.openai.agent:Agent",
    "environment": "services.rollout.environments.workflow:Environments",
}
"""The workflows by the value of ``rollout.workflow``."""

AGENTS: Final[Mapping[str, str]] = {"verifiers": "services.rollout.environments.verifiers:play"}
"""The agents by the value of ``rollout.workflow_arguments.agent``."""

SERVICES: Final = ("http://", "https://", "grpc://", "grpcs://")
"""Prefixes of the addresses of reward services."""
