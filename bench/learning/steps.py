"""Numbers of the steps of a whole run by all services on this host."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

REPOSITORY = Path(__file__).parents[2]


def measure_steps(spec: Path, settings: tuple[str, ...], *, warmup_steps: int) -> dict[str, float]:
    """Means of all numbers that the steps of a run report, but for the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "services.cli.main", "run", str(spec), "--json"),
            *("--state-directory", folder),
            *(part for setting in settings for part in ("--set", setting)),
        ]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the run failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        metrics = Path(done.stdout.splitlines()[-1]).parent / "metrics.jsonl"
        lines = metrics.read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines[warmup_steps:]]
    names = [name for name, value in steps[-1].items() if isinstance(value, int | float)]
    return {name: round(mean(step.get(name, 0.0) for step in steps), 4) for name in names}
