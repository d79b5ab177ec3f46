"""Changes of running runs by the REST API."""

from typing import Any

import httpx


def patch_run(api: httpx.Client, run_id: str, change: dict[str, Any]) -> dict[str, Any]:
    """Changes a run, again if its state changes in between; returns the run that was changed."""
    path = f"/v1/runs/{run_id}"
    while True:
        run = api.get(path).raise_for_status()
        answer = api.patch(path, json=change, headers={"If-Match": run.headers["ETag"]})
        if answer.status_code != 412:
            assert answer.status_code == 200, answer.text
            return dict(run.json())
