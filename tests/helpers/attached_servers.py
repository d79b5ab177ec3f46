"""Settings of rollout workers that attach to servers on this machine."""

from pathlib import Path

import pytest


def allow_attached_servers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, token: str, secret: str = "FLEET_TOKEN"
) -> None:
    """Lets the workers of a test read the token of servers on this machine, and connect to them.

    Args:
        folder: Folder of the workers' secrets; created if it is missing.
        secret: Name of the secret with the token.
    """
    folder.mkdir(exist_ok=True)
    (folder / secret).write_text(token)
    monkeypatch.setenv("SLIPSTREAM_ROLLOUT_SECRETS_DIRECTORY", str(folder))
    monkeypatch.setenv("SLIPSTREAM_ROLLOUT_REWARD_HOSTS", '["127.0.0.1"]')
