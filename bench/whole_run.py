"""A run by all services on this host, as a user starts it, and what it left behind."""

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

REPOSITORY = Path(__file__).parents[1]
_SORT4 = REPOSITORY / "examples" / "sort4.yaml"


@dataclass(frozen=True, slots=True)
class WholeRun:
    """A run that has succeeded."""

    summary: dict[str, Any]
    steps: list[dict[str, Any]]
    """What each step reported."""

    def means(self, names: Iterable[str], *, after: int) -> dict[str, float]:
        """Means over the steps but for the first ``after``; 0 for a number that a step does not report."""
        steps = self.steps[after:]
        return {name: round(mean(step.get(name, 0.0) for step in steps), 4) for name in names}


def whole_run(folder: Path, settings: Iterable[str], *, spec: Path = _SORT4) -> WholeRun:
    """Train to the end.

    Args:
        folder: Where runs and logs go.
        settings: What differs from the specification, such as ``trainer.steps=3``.
        spec: The specification.

    Raises:
        SystemExit: If the run fails, with what it said.
    """
    command = [
        *(sys.executable, "-m", "services.cli.main", "run", str(spec), "--json"),
        *("--state-directory", str(folder)),
        *(part for setting in settings for part in ("--set", setting)),
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    summary = Path(done.stdout.splitlines()[-1])
    lines = summary.with_name("metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return WholeRun(json.loads(summary.read_text(encoding="utf-8")), list(map(json.loads, lines)))
