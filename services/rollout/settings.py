"""Settings of a rollout process."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.settings import WorkerSettings


class RolloutSettings(WorkerSettings):
    """Settings from the environment variables ``SLIPSTREAM_ROLLOUT_*``."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_ROLLOUT_")

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the engine; ``auto`` uses a GPU if there is one."""
    engine: str = ""
    """Name of the run's engine, if it uses GPUs: its own process then begins its imports before this worker
    knows the specification."""
    gpu_neighbours: tuple[str, ...] = ()
    """Roles of other workers on the same GPU, if a host has too few GPUs; the engine leaves them memory."""
    gpus_free_file: Path | None = None
    """File whose existence allows the engine to take its GPUs, if it shares them with the trainer in
    turns; imports and data are loaded before. None if the GPUs are free."""
    agent_bind: str = "127.0.0.1:0"
    """``host:port`` of the endpoint for agents (``rollout.workflow: agent``).

    Loopback serves agents on this machine or in this pod; bind to all interfaces only for an agent elsewhere.
    """
    sandbox_bind: str = "127.0.0.1:0"
    """``host:port`` by which agents and environments reach the sandboxes of their episodes."""
    sandbox_namespace: str = ""
    """Kubernetes namespace of the sandboxes of ``rollout.sandbox.kind: kubernetes``."""
    sandbox_runtime_class: str = ""
    """Runtime class of their pods, such as ``gvisor``."""
    sandbox_domain: str = ""
    """Domain of an installation of E2B other than E2B's own, for ``rollout.sandbox.kind: e2b``."""
    kubernetes_url: str = "https://kubernetes.default.svc"
    """Address of the Kubernetes API."""
    kubernetes_credentials: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    """Folder with ``token`` and ``ca.crt`` for the Kubernetes API."""
    drain_timeout_s: float = Field(3.0, gt=0)
    """Max time to cache unfinished groups after SIGTERM; must be below the sender's grace period."""


def environment_of_user_code() -> dict[str, str]:
    """Returns this process's environment without its own settings, which include the run's token."""
    return {
        name: value
        for name, value in os.environ.items()  # noqa: TID251 -- this is the settings module
        if not name.startswith("SLIPSTREAM_")
    }
