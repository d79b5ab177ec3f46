"""Fake workers and transferqueue in memory, with the interfaces that the loops of a run use."""

import asyncio
from collections import defaultdict
from types import SimpleNamespace

from services.common.errors import DeadlineExceededError, UnavailableError
from services.common.fields import ROLLOUT_FIELDS
from services.common.runspec.loader import parse_spec
from services.common.runspec.workers import rows_gauge
from services.controller.membership import Worker
from services.controller.run.weights.session import SyncReport
from services.wire.batch import BlobRef, FieldColumn, KVBatchMeta
from services.wire.transferqueue.types import Stats
from services.wire.workers import TrainedStep
from tests.helpers.rest import SPEC


def specification(**parts):
    """Returns a specification of four steps that is evaluated only on request."""
    return parse_spec(
        {
            **SPEC,
            "data": {**SPEC["data"], "heldout": {"source": "jsonl", "path": "heldout.jsonl"}},
            "trainer": {"steps": 4, "prompts_per_step": 2},
            "validation": {"every": 0, "before_train": False, "at_end": False},
            **parts,
        }
    )


class MemoryQueue:
    """Fake transferqueue that reports samples and does not store them."""

    def __init__(self):
        self._arrived = defaultdict(asyncio.Queue)
        self.snapshots = []

    def put(self, groups, version):
        self._arrived[groups[0].partition_id].put_nowait(samples_of(groups, version))

    async def create_partition(self, partition_id, *, required_fields, quota_bytes=0):
        """Does nothing."""

    async def drop_partition(self, partition_id):
        return 0

    async def record_samples(self, run_id, *, max_bytes, max_steps, directory=""):
        """Does nothing."""

    async def stats(self):
        return Stats(partitions=(), shards=())

    async def get_batch(self, partition):
        return KVBatchMeta(partition_id=partition, keys=())

    async def watch(self, partition, revision):
        while True:
            yield await self._arrived[partition].get()

    async def watch_lost_samples(self, partition):
        await asyncio.Event().wait()
        yield

    async def release(self, partition, keys, attempts=()):
        """Does nothing."""

    async def save_snapshot(self, run_id, name):
        self.snapshots.append(name)

    async def restore_snapshot(self, run_id, name):
        return 0


class Workers:
    """Fake trainer and rollout that answer each call at once, or when a test permits it.

    Args:
        queue: Transferqueue that receives finished groups.
    """

    def __init__(self, queue):
        self.queue = queue
        self.may_train = asyncio.Event()
        self.may_train.set()
        self.trains = asyncio.Event()
        self.connects = asyncio.Event()
        self.may_connect = asyncio.Event()
        self.may_connect.set()
        self.lost, self.has_rollout = False, True
        self.other_workers = []
        self.turn = asyncio.Lock()
        self.trained, self.held_from = 0, 1
        self.version = -1
        self.cancels = asyncio.Event()
        self.step_timeouts, self.saved, self.kept_steps = [], [], []
        self.skipped, self.reported = set(), {}
        self.takes_too_long = False
        self.may_save = asyncio.Event()
        self.may_save.set()
        self.may_generate = self.may_answer = True
        self.evaluates = asyncio.Event()
        self.left_out = {}
        self.scored, self.publishing_turns = [], 0

    async def assemble(self, stack, run_id, spec, membership, **kwargs):
        """Returns the fakes that replace the connections of a run."""
        if self.has_rollout and membership.find(run_id, "rollout-0") is None:
            await membership.register(rollout_of(run_id, kwargs["attempt"]))
        self.connects.set()
        await self.may_connect.wait()
        self.lost = False
        weights = SimpleNamespace(
            pin=asyncio.Lock(),
            trainer_lock=self.turn,
            version=self.version,
            publish=self._publish,
            has_copy=lambda version: version == self.version,
            retain_copy=self._nothing_learned,
            is_lacking=False,
            store_troubles={},
            follow=self._nothing_learned,
        )
        is_scored = spec.now.topology.own_gpus("logp") > 0
        scoring = SimpleNamespace(needs_weights=is_scored, add_fields=self._scored)
        critic = SimpleNamespace(
            exists=False,
            train=self._nothing_learned,
            save=self._nothing_learned,
            await_uploads=self._nothing_learned,
        )
        return SimpleNamespace(
            attempt=kwargs["attempt"],
            is_queue_empty=True,
            trainer=self,
            trained=self.trained,
            served=self.version,
            rollout_pool=Rollout(self),
            scoring=scoring,
            critic=critic,
            weights=weights,
            serving=[],
            other_workers=self.other_workers,
            train_rows={"train": 64},
            heldout_rows={"heldout": 2},
        )

    def lose(self):
        """Makes the running train step fail."""
        self.lost = True
        self.may_train.set()

    async def train_step(self, command, *, timeout_s):
        step = command.step
        self.step_timeouts.append(timeout_s)
        if step >= self.held_from:
            self.trains.set()
            await self.may_train.wait()
            self.trains.clear()
        if self.lost:
            raise UnavailableError("the trainer does not answer")
        if self.takes_too_long:
            await asyncio.sleep(timeout_s)
            raise DeadlineExceededError("TrainStep: Deadline Exceeded")
        self.trained = step
        left_out = self.left_out if step == 2 else {}
        numbers = {"loss": 0.5, **self.reported.get(step, {})}
        skipped = step in self.skipped
        return TrainedStep(step=step, metrics=numbers, skipped=skipped, left_out=left_out)

    async def save_checkpoint(self, step, *, keep_steps, timeout_s):
        self.saved.append(step)
        self.kept_steps.append([*keep_steps])
        await self.may_save.wait()
        return f"/checkpoints/step-{step:08d}", 1

    async def _publish(self, newest):
        async with self.turn:
            version = newest()
        for _ in range(self.publishing_turns):
            await asyncio.sleep(0)
        self.version = version
        return SyncReport(
            version=version,
            digest="",
            num_bytes=1,
            copy_s=0.0,
            prepare_s=0.0,
            transfer_s=0.0,
            adopt_s=0.0,
            check_s=0.0,
            stall_s=0.0,
        )

    async def _scored(self, samples, *, weight_version, is_trained, timeout_s):
        if not is_trained:
            self.scored.append((weight_version, self.version))
        return samples

    async def await_uploads(self, *, timeout_s):
        """Does nothing."""

    async def _nothing_learned(self, *args, **kwargs):
        return {}


class Rollout:
    """Fake rollout pool with one rollout."""

    num_replicas = 1
    cut_off = frozenset()

    def __init__(self, workers):
        self._workers = workers

    def update_cut_off(self):
        return {}, []

    def newest_version(self):
        return self._workers.version

    def oldest_version(self):
        return self._workers.version

    def choose(self, holder, *, room):
        return "rollout-0", self._workers.version

    def present(self):
        return ["rollout-0"]

    def reserve(self, count):
        return []

    def has_weights(self, worker_id):
        return True

    def assigned(self, worker_id):
        """Does nothing: the pool does not track loads."""

    def detach_ending(self):
        """Does nothing: the rollout never ends."""

    def finished(self, worker_id):
        """Does nothing: the pool does not track loads."""

    def exclude_missed(self, names):
        """Does nothing: the rollout receives each version."""

    def readmit_current(self):
        """Does nothing."""

    def idle_seconds(self):
        return {"rollout-0": 0.0}

    def tokens_total(self):
        return 0.0

    def decode_times(self):
        return {}

    def acceptance_length(self):
        return {}

    def moved_at(self, worker_id, *, now):
        """Returns 0, because the rollout reports no tokens."""
        return 0.0

    async def start(self, by_worker):
        for groups in by_worker.values():
            is_heldout = groups and groups[0].split == "heldout"
            if is_heldout:
                self._workers.evaluates.set()
            may_work = self._workers.may_answer if is_heldout else self._workers.may_generate
            if groups and may_work:
                self._workers.queue.put(groups, self._workers.version)

    async def interrupt(self, names=None):
        """Does nothing: groups finish at once, so no group is running."""

    async def park_groups(self, group_ids):
        self._workers.cancels.set()

    async def cancel(self, group_ids):
        if group_ids:
            self._workers.cancels.set()


def rollout_of(run_id, attempt):
    """Returns the registered rollout of an attempt."""
    return Worker(
        run_id=run_id,
        worker_id="rollout-0",
        incarnation=str(attempt),
        role="rollout",
        address="a:1",
        host_id="h",
        last_heartbeat=0.0,
        state="loaded",
        gauges={rows_gauge("train"): 64.0, rows_gauge("heldout"): 2.0},
    )


def samples_of(groups, version):
    """Returns the metadata that a transferqueue reports after one put of the groups' samples."""
    pairs = [(group, member) for group in groups for member in group.members]
    count = len(pairs)
    columns = tuple(
        FieldColumn(
            name=name,
            dtype="float32",
            row_rank=1,
            tail_shape=(),
            lengths=(1,) * count,
            blob_indexes=(0,) * count,
            offsets=tuple(range(0, 4 * count, 4)),
        )
        for name in ROLLOUT_FIELDS
    )
    tags = {
        "group_id": tuple(group.group_id for group, _ in pairs),
        "member": tuple(member for _, member in pairs),
        "attempt": tuple(group.attempt for group, _ in pairs),
        "reward": tuple(float(member % 2) for _, member in pairs),
        "terms": tuple(f'{{"odd": {member % 2}}}' for _, member in pairs),
        "greedy": tuple(int(member == 0) for _, member in pairs),
        "v_min": (version,) * count,
        "response_tokens": (4,) * count,
        "answer": ("a",) * count,
        "finish_reason": ("stop",) * count,
        "data_source": ("math",) * count,
    }
    return KVBatchMeta(
        partition_id=groups[0].partition_id,
        keys=tuple(f"{group.group_id}.{member}" for group, member in pairs),
        fields=columns,
        blobs=(BlobRef(shard_id="s0", blob_id=0, size_bytes=4 * count, checksum=0),),
        tags=tags,
    )
