"""File of scrape targets that lists the metrics endpoints of this host's workers for Prometheus."""

import json
import socket
from pathlib import Path


class MetricTargets:
    """Assigns each worker a port for its metrics and lists them in a ``file_sd_configs`` file.

    Args:
        file: The file; None assigns no ports. Entries of an earlier process are kept.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._ports: dict[tuple[str, str], int] = {}
        if file is not None and file.exists():
            for entry in json.loads(file.read_text(encoding="utf-8")):
                labels, port = entry["labels"], int(entry["targets"][0].rpartition(":")[2])
                self._ports[labels["run"], labels["pod"]] = port

    def add(self, run_id: str, worker_id: str) -> int:
        """Assigns a free port to a worker that starts; returns 0 without a file."""
        if self._file is None:
            return 0
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port: int = listener.getsockname()[1]
        self._ports[run_id, worker_id] = port
        self._write()
        return port

    def remove(self, run_id: str) -> None:
        """Removes the workers of a run."""
        self._ports = {key: port for key, port in self._ports.items() if key[0] != run_id}
        self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        # Labels as in a cluster, for which the dashboards are made.
        entries = [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"run": run_id, "pod": worker_id}}
            for (run_id, worker_id), port in self._ports.items()
        ]
        # Replaced atomically, so that Prometheus never reads half a file.
        whole = self._file.with_name(f"{self._file.name}.new")
        whole.write_text(json.dumps(entries), encoding="utf-8")
        whole.replace(self._file)
