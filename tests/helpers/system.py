"""Running services that train submitted runs, as ``slipstream up`` starts them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.cli import Finished, slipstream, started


@dataclass(frozen=True)
class System:
    """Running services."""

    url: str
    state: Path
    """State directory, with a folder for each run."""

    def train(self, spec: Path, *overrides: str) -> Finished:
        """Submits a specification and waits for the run to end."""
        settings = [argument for override in overrides for argument in ("--set", override)]
        submitted = slipstream("submit", spec, "--url", self.url, *settings)
        assert submitted.code == 0, submitted.err
        run_id = submitted.out.strip()
        watched = slipstream("watch", run_id, "--url", self.url, "--state-directory", self.state)
        summary = self.state / run_id / "summary.json"
        return Finished(watched.code, f"{watched.out}{summary}\n", watched.err)


@contextmanager
def running_system(state: Path) -> Iterator[System]:
    """Runs a controller and a transferqueue until the block ends."""
    with started("up", "--port", "0", "--state-directory", state, until="controller at http"):
        yield System(json.loads((state / "up.json").read_text())["url"], state)
