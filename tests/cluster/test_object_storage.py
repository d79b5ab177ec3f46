"""A run on a real cluster whose checkpoints, records and samples are in an object store, and on no volume."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.observability import dashboards
from services.extras.objects.connection import ObjectFolder
from services.extras.objects.layout import download_checkpoint, read_manifest, stored_checkpoints
from services.extras.objects.records import record_objects
from services.extras.objects.transfers import Patience
from tests.cluster.network import NODE_IP
from tests.cluster.node import Cluster
from tests.cluster.prometheus import empty_panels, prometheus
from tests.cluster.release import (
    CLEARING_S,
    NAMESPACE,
    WORKERS,
    Installed,
    assert_ledger_closes,
    eventually,
    installed_release,
    sort4_spec,
)
from tests.helpers.cli import slipstream
from tests.helpers.s3 import environment, needs_s3, new_bucket, s3_server

pytestmark = [needs_s3, pytest.mark.cluster, pytest.mark.timeout(1200)]

_SECRET = "s3-keys"


@pytest.fixture(scope="module")
def installed(machine: Cluster) -> Iterator[Installed]:
    with installed_release(machine, has_trackers=False) as release:
        yield release


@pytest.fixture
def bucket(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Gives the release a store and no claim for checkpoints; yields the URL of a bucket."""
    with s3_server(NODE_IP) as port:
        settings = environment(port, NODE_IP)
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        url = new_bucket(port, NODE_IP)
        address = {name: settings.pop(name) for name in ("AWS_REGION", "AWS_ENDPOINT_URL")}
        secret: Any = {"metadata": {"name": _SECRET}, "stringData": settings}
        installed.cluster.core.create_namespaced_secret(WORKERS, secret)
        installed.upgrade(
            "workers.checkpoints.existingClaim=",
            f"workers.allowedUrls={{{url}}}",
            f"workers.envFromSecrets={{{_SECRET}}}",
            *(f"workers.env.{name}={value}" for name, value in address.items()),
            *(
                f"{program}.env.{name}={value}"
                for program in ("controller", "transferqueue")
                for name, value in (address | settings).items()
            ),
            *(
                f"networkPolicy.egress.{peers}[0].ipBlock.cidr={NODE_IP}/32"
                for peers in ("workersTo", "transferqueueTo")
            ),
        )
        yield url


def uploaded_steps(installed: Installed, run_id: str) -> list[int]:
    return [event["data"]["step"] for event in installed.events(run_id, "CheckpointUploaded")]


def read_samples(source: str) -> dict[str, dict[str, object]]:
    """Returns what ``slipstream samples`` shows of a store, by the samples' ids."""
    listing = slipstream("samples", source, "--json", "--limit", "0")
    assert listing.code == 0, listing.err
    samples = [json.loads(line) for line in listing.out.splitlines()]
    return {sample["id"]: sample for sample in samples}


def verify_checkpoints(url: str, folder: Path) -> list[int]:
    """Downloads and verifies all visible checkpoints; returns their steps."""
    store, steps = ObjectFolder(url), []
    for checkpoint in stored_checkpoints(store.list()).values():
        if checkpoint.is_published:
            manifest = read_manifest(store, checkpoint.name)
            target = folder / checkpoint.name
            download_checkpoint(store, checkpoint.name, manifest, target, patience=Patience(url))
            steps.append(checkpoint.step)
    return sorted(steps)


def test_a_run_in_a_store_resumes_there_after_the_loss_of_each_pod_with_its_disk(
    installed: Installed, bucket: str, tmp_path: Path
) -> None:
    core = installed.cluster.core
    folder = f"{bucket}/runs/sort"
    warm_start = sort4_spec()["model"]["warm_start"] | {"steps": 50}
    checkpoint = {"every": 5, "directory": folder}
    with prometheus(installed.cluster) as scraping:
        # The test is not about what the run learns: its steps are small.
        run_id = installed.submit(
            model={"warm_start": warm_start},
            rollout={"replicas": 1, "group_size": 4},
            trainer={"steps": 5000, "prompts_per_step": 8, "checkpoint": checkpoint},
            validation={"every": 0},
            record="full",
            samples={"directory": f"{bucket}/samples"},
            limits={"max_restarts": 3},
        )
        samples_url = f"{bucket}/samples/{run_id}"
        installed.wait(run_id, lambda run: run["step"] >= 8, timeout_s=600)
        eventually(lambda: bool(uploaded_steps(installed, run_id)), timeout_s=60)
        eventually(lambda: bool(ObjectFolder(samples_url).list()), timeout_s=60)
        assert installed.events(run_id, "CheckpointsVolatile") == []

        def is_plotted() -> bool:
            empty = empty_panels(scraping, dashboards.OVERVIEW, seconds=60)
            return "Uploads of checkpoints and samples" not in empty

        eventually(is_plotted, timeout_s=60)

    trainer = f"{run_id.replace('_', '-')}-trainer-0"
    core.delete_namespaced_pod(trainer, WORKERS, grace_period_seconds=0)
    eventually(lambda: bool(installed.events(run_id, "WorkerLost")), timeout_s=100)
    eventually(lambda: len(installed.events(run_id, "WorkersReady")) > 1, timeout_s=400)
    # The run goes back to its newest upload, unless that has its last step.
    rewound = installed.events(run_id, "Rewound")
    uploaded = uploaded_steps(installed, run_id)
    resumed = rewound[0]["data"]["step"] if rewound else max(uploaded)
    assert resumed in uploaded
    installed.wait(run_id, lambda run: run["step"] >= resumed + 8, timeout_s=300)

    earlier = read_samples(samples_url)
    assert earlier
    queue = "demo-slipstream-transferqueue-0"
    core.delete_namespaced_pod(queue, NAMESPACE, grace_period_seconds=0)
    step = installed.run(run_id)["step"]
    installed.wait(run_id, lambda run: run["step"] >= step + 8, timeout_s=400)
    eventually(lambda: max(uploaded_steps(installed, run_id)) > step, timeout_s=100)
    installed.api.post(f"/v1/runs/{run_id}/cancel").raise_for_status()
    eventually(lambda: not installed.pods(run_id), timeout_s=CLEARING_S)
    run = installed.run(run_id)
    assert_ledger_closes(run)

    steps = verify_checkpoints(folder, tmp_path)
    # A run that is cancelled may end between an upload and its event.
    assert steps[-1] >= max(uploaded_steps(installed, run_id))
    objects, _ = record_objects(ObjectFolder(folder), Patience(folder))
    recorded = {path.partition("/")[0] for path in objects.values() if path.startswith("step-")}
    assert {f"step-{step:08d}" for step in range(steps[-1])} <= recorded
    # The transferqueue of an empty disk shows the samples of the lost one, and adds to them.
    answer = installed.api.get(f"/v1/runs/{run_id}/samples.jsonl").raise_for_status()
    served = {json.loads(line)["id"] for line in answer.text.splitlines()}
    assert earlier.keys() <= served
    eventually(lambda: served <= read_samples(samples_url).keys(), timeout_s=60)

    etag = {"If-Match": installed.api.get(f"/v1/runs/{run_id}").headers["ETag"]}
    path = f"/v1/runs/{run_id}?delete_checkpoints=true"
    installed.api.delete(path, headers=etag).raise_for_status()
    eventually(lambda: not ObjectFolder(bucket).list(), timeout_s=60)
