"""Jobs of the example scripts that train the example specification."""

import json
import re
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.cluster import Cluster

ROOT = Path(__file__).parents[2]
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
NO_VARIABLES: Mapping[str, str] = {}
QUICK = {"model.warm_start.steps": 50, "validation.every": 0, "trainer.world_size": 2}
"""Keys with which a run is about its workers rather than about what it learns."""


@dataclass
class Job:
    """A job that runs ``slipstream run``."""

    cluster: Cluster
    id: str
    folder: Path

    @property
    def state_directory(self) -> Path:
        return self.folder / "runs"

    @property
    def output(self) -> str:
        file = self.folder / "output"
        return file.read_text() if file.exists() else ""

    def steps(self) -> int:
        """Returns the number of finished steps."""
        return len(self._column("SELECT step FROM steps WHERE is_committed"))

    def events(self, kind: str) -> list[str]:
        """Returns the messages of the run's events of a kind."""
        return self._column("SELECT message FROM events WHERE type = ? ORDER BY seq", kind)

    def heldout(self) -> float:
        """Returns the last greedy score on held-out prompts that the run printed."""
        return float(re.findall(r"held-out, version \d+: greedy ([0-9.]+)", self.output)[-1])

    def until(self, is_met: Callable[[], bool], *, timeout_s: float) -> None:
        """Waits until a condition is met; fails if the job ends first."""
        end = time.monotonic() + timeout_s
        while not is_met():
            state = self.cluster.state(self.id)
            assert state not in _ENDED, f"the job is {state}: {self.report()}"
            assert time.monotonic() < end, f"not within {timeout_s:.0f} s: {self.report()}"
            time.sleep(0.5)

    def wait(self, *, timeout_s: float) -> None:
        """Waits until the job has ended well."""
        end = time.monotonic() + timeout_s
        while (state := self.cluster.state(self.id)) not in _ENDED:
            assert time.monotonic() < end, f"{state} after {timeout_s:.0f} s: {self.report()}"
            time.sleep(0.5)
        assert state == "COMPLETED", f"the job is {state}: {self.report()}"

    def report(self) -> str:
        """Returns the job's output and the ends of the logs."""
        logs = sorted(self.state_directory.glob("**/logs/*.log"))
        ends = [f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs]
        return "\n".join([self.output[-3000:], *ends])

    def nodes_of(self, worker_id: str) -> list[str]:
        """Returns the nodes on which a running worker was started."""
        return list(self.gpus_of(worker_id))

    def gpus_of(self, worker_id: str) -> dict[str, list[str]]:
        """Returns the GPUs of a running worker by node."""
        (plan,) = self.state_directory.glob(f"run_*/logs/{worker_id}.plan")
        nodes = json.loads(plan.read_text())["nodes"]
        return {name: share["gpus"] for name, share in nodes.items()}

    def _column(self, query: str, *values: str) -> list[str]:
        database = f"file:{self.state_directory / 'slipstream.db'}?mode=ro"
        try:
            with closing(sqlite3.connect(database, uri=True)) as connection:
                return [value for (value,) in connection.execute(query, values)]
        except sqlite3.OperationalError:  # the controller has not created it yet
            return []


def submit(
    cluster: Cluster,
    script: str,
    *,
    options: Sequence[str],
    keys: dict[str, object],
    components: Sequence[Sequence[str]] = ((),),
    variables: Mapping[str, str] = NO_VARIABLES,
) -> Job:
    """Submits one of the example scripts with the example specification.

    Args:
        options: Options of sbatch, which replace those of the script.
        keys: Values of keys of the specification.
        components: Further options for each component of a heterogeneous job.
        variables: Environment variables of the job.
    """
    folder = cluster.root / "job"
    folder.mkdir()
    overrides = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    environment = {**variables, "SLIPSTREAM_STATE": str(folder / "runs")}
    exported = ",".join(["ALL", *(f"{name}={value}" for name, value in environment.items())])
    common = (f"--output={folder}/output", f"--export={exported}", *options)
    job = cluster.submit(
        ROOT / "examples" / "slurm" / script,
        str(ROOT / "examples" / "sort4.yaml"),
        *overrides,
        options=[
            word
            for number, component in enumerate(components)
            for word in (*([":"] if number else []), *common, *component)
        ],
    )
    return Job(cluster, job, folder)
