"""State of the transferqueue when a controller resumes a run."""

from types import SimpleNamespace

import pytest

from services.common.errors import (
    AlreadyExistsError,
    DataLossError,
    InternalError,
    ResourceExhaustedError,
)
from services.controller.run.connections import create_partitions, max_lag, served_version
from tests.unit.controller.run.test_refill import SPEC

TRAIN = "run_a/train"


class Queue:
    """Fake transferqueue with a revision per partition, which counts the writes."""

    def __init__(self):
        self.revisions = {}

    async def stats(self):
        revisions = self.revisions.items()
        partitions = [SimpleNamespace(partition_id=name, revision=n) for name, n in revisions]
        return SimpleNamespace(partitions=partitions)

    async def create_partition(self, name, **_):
        self.revisions.setdefault(name, 0)

    async def record_samples(self, run_id, **_):
        pass

    async def restore_snapshot(self, run_id, snapshot_id):
        if any(self.revisions.values()):
            raise AlreadyExistsError(f"{run_id} has samples")
        self.revisions[TRAIN] = 3
        return 3

    async def drop_partition(self, name):
        self.revisions.pop(name, None)


async def test_a_queue_that_lost_everything_counts_as_empty_until_something_is_stored():
    queue = Queue()
    assert await create_partitions(queue, "run_a", SPEC)
    assert TRAIN in queue.revisions
    # The controller that created the partitions may have died before it restarted the lost groups.
    assert await create_partitions(queue, "run_a", SPEC)
    queue.revisions[TRAIN] = 8
    assert not await create_partitions(queue, "run_a", SPEC)


async def test_partitions_that_a_dead_controller_did_not_drop_are_dropped_before_others_are_created():
    queue = Queue()
    assert await create_partitions(queue, "run_a", SPEC, snapshot_id="slot-0")
    assert queue.revisions[TRAIN] == 3
    # The controller died after it had dropped the first partition.
    queue.revisions = {"run_a/records": 2}
    assert await create_partitions(queue, "run_a", SPEC, snapshot_id="slot-0")
    assert queue.revisions == {"run_a/train": 0, "run_a/validation": 0, "run_a/partial": 0}


@pytest.mark.parametrize("error", [ResourceExhaustedError, InternalError, DataLossError])
async def test_samples_that_cannot_be_restored_are_generated_again(error):
    queue = Queue()

    async def restore_snapshot(run_id, snapshot_id):
        raise error("no")

    queue.restore_snapshot = restore_snapshot
    assert await create_partitions(queue, "run_a", SPEC, snapshot_id="slot-0")
    assert queue.revisions[TRAIN] == 0


def test_a_version_counts_as_served_only_if_all_workers_serve_it():
    def worker(version, state="ready"):
        return SimpleNamespace(weight_version=version, state=state)

    assert served_version([worker(4), worker(4)]) == 4
    assert served_version([]) == -1
    # The previous controller died while it sent a version to the rollouts one by one.
    assert served_version([worker(4), worker(5)]) == -1
    assert served_version([worker(4), worker(4, "loaded")]) == -1


@pytest.mark.parametrize(
    ("max_staleness", "publish_every", "lag"),
    [(0, 1, 0), (1, 1, 0), (4, 1, 2), (4, 3, 2), (4, 4, 1), (4, 5, 0)],
)
def test_a_late_rollout_never_keeps_the_trainer_from_the_next_published_version(
    max_staleness, publish_every, lag
):
    sync = SimpleNamespace(is_stored=True, publish_every=publish_every)
    spec = SimpleNamespace(weight_sync=sync, algorithm=SimpleNamespace(max_staleness=max_staleness))
    assert max_lag(spec) == lag
    # The gate opens by a version that is as old as possible; steps are trained up to this one.
    assert -lag + max_staleness + 1 >= publish_every
    sync.is_stored = False
    assert max_lag(spec) == 0
