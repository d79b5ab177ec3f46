"""Changes running runs through the REST API."""

from typing import Any

import httpx


def patch_run(api: httpx.Client, run_id: str, change: dict[str, Any]) -> dict[str, Any]:
    """Patches a run and returns its former state; tries again if the run changed since it was read."""
    path = f"/v1/runs/{run_id}"
    while True:
        run = api.get(path).raise_for_status()
        answer = api.patch(path, json=change, headers={"If-Match": run.headers["ETag"]})
        if answer.status_code != 412:
            assert answer.status_code == 200, answer.text
            return dict(run.json())
