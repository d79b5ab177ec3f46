"""Kinds of environment servers, which every service loads. Imports no client."""

from typing import Final

from services.common.runspec.rollout import EnvironmentKind

OPENENV: Final = EnvironmentKind(
    title="OpenEnv", opens="services.extras.environments.openenv:open_server"
)
