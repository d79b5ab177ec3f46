"""Tests of KubernetesLauncher: creation of pods, and reports of exits and pending pods."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.common.errors import FailedPreconditionError
from services.common.runspec.loader import parse_spec
from services.common.runspec.run import RunSpec
from services.common.security.credentials import Identity, acting_as, bearer_of
from services.controller.launch.launcher import WorkerExit
from services.extras.kubernetes import drain
from services.extras.kubernetes.launcher import KubernetesLauncher
from services.extras.kubernetes.pod_api import EVICTABLE_LABEL, Seen
from services.extras.kubernetes.worker_pods import accounting_labels
from tests.helpers.job_sets import NAME_LABEL, pods_of
from tests.helpers.specs import spec_with

RUN = "run_01"
SPEC = spec_with(
    data={"train": {"source": "python", "path": "sort4.py:train"}},
    rollout={"replicas": 1},
    trainer={"prompts_per_step": 1},
)
SPREAD = {
    **SPEC.model_dump(),
    "topology": {"gpus_per_node": 1},
    "trainer": {"steps": 1, "prompts_per_step": 1, "world_size": 2},
}
MORE = {"rollout": {"replicas": 3, "rewards": [{"name": "exact_match"}]}}

JOB = {"name": "node", "template": {"spec": {"completionMode": "Indexed"}}}
JOB_SET = {"metadata": {}, "spec": {"replicatedJobs": [JOB]}}

# The condition of a pod with a scheduling gate.
GATED = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "SchedulingGated",
    "message": "Scheduling is blocked due to non-empty scheduling gates",
}


@dataclass
class FakeCluster:
    """Fake Kubernetes API: pods by name, and the queue of events that a watch would fill."""

    changes: "asyncio.Queue[Seen]" = field(default_factory=asyncio.Queue)
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    refuses: str = ""
    ignores_deletion: bool = False
    queue_is_full: bool = False
    deletions: list[tuple[str, int | None]] = field(default_factory=list)
    secrets: dict[str, dict[str, Any]] = field(default_factory=dict)
    job_sets: dict[str, dict[str, Any]] = field(default_factory=dict)

    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    evicts: bool = False
    """True if an eviction is repeated until it is let through, as by ``kubectl drain``."""
    evictable: list[str] = field(default_factory=list)

    async def put_policy(self, policy: Mapping[str, Any]) -> None:
        self.policies[policy["metadata"]["name"]] = dict(policy)

    async def delete_policy(self, name: str) -> None:
        self.policies.pop(name, None)

    async def put_secret(self, secret: Mapping[str, Any]) -> None:
        self.secrets[secret["metadata"]["name"]] = dict(secret)

    async def delete_secret(self, name: str) -> None:
        self.secrets.pop(name, None)

    async def create(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        name = pod["metadata"]["name"]
        if self.refuses and name.endswith(self.refuses):
            raise FailedPreconditionError(f"Kubernetes refused pod {name}: exceeded quota")
        pod["metadata"]["uid"] = f"uid of {name}"
        status = {"conditions": [GATED]} if self.queue_is_full else {}
        self.pods[name] = {**pod, "status": {"phase": "Pending", **status}}
        return self.pods[name]

    async def list(self, selector: str) -> list[dict[str, Any]]:
        key, _, value = selector.partition("=")
        labels = {name: pod["metadata"]["labels"] for name, pod in self.pods.items()}
        fits = {
            name: key in object_labels and value in ("", object_labels[key])
            for name, object_labels in labels.items()
        }
        return [pod for name, pod in self.pods.items() if fits[name]]

    async def delete(
        self, name: str, *, grace_s: int | None = None, is_queued: bool = False
    ) -> bool:
        labels = self.pods.get(name, {}).get("metadata", {}).get("labels", {})
        assert is_queued == ("kueue.x-k8s.io/queue-name" in labels)
        self.deletions.append((name, grace_s))
        if name not in self.pods:
            return False
        if grace_s == 0 or not self.ignores_deletion:
            del self.pods[name]
            self.changes.put_nowait(Seen(name=name, body=None))
        return True

    async def allow_eviction(self, name: str) -> None:
        self.pods[name]["metadata"]["labels"][EVICTABLE_LABEL] = "true"
        self.evictable.append(name)
        if self.evicts:
            await self.delete(name)

    def place(self, name: str, node: str) -> None:
        """Places a pod on a node, where it runs."""
        pod = self.pods[name]
        spec = {**pod["spec"], "nodeName": node}
        states = [{"name": c["name"], "state": {"running": {}}} for c in spec["containers"]]
        self.pods[name] = {**pod, "spec": spec}
        self.change(name, phase="Running", containerStatuses=states)

    def has_no_room(self, name: str) -> None:
        """Reports that no node has room for a pod."""
        why = {"reason": "Unschedulable", "message": "0/1 nodes are available"}
        self.change(name, conditions=[{"type": "PodScheduled", "status": "False", **why}])

    async def create_job_set(self, body: Mapping[str, Any]) -> None:
        assert body["metadata"]["name"] not in self.job_sets
        self.job_sets[body["metadata"]["name"]] = dict(body)

    async def delete_job_set(self, name: str) -> bool:
        """Deletes a JobSet and its pods; the launcher processes the pods' deletion before this returns."""
        pods = self.pods.items()
        for pod in [n for n, p in pods if p["metadata"]["labels"].get(NAME_LABEL) == name]:
            del self.pods[pod]
            self.changes.put_nowait(Seen(name=pod, body=None))
        await self.settle()
        return self.job_sets.pop(name, None) is not None

    def make_pods(self, name: str) -> tuple[str, ...]:
        """Creates pods as the controllers of JobSets and Jobs do, and returns their names."""
        names: tuple[str, ...] = ()
        for pod in pods_of(self.job_sets[name]):
            pod_name = pod["metadata"]["name"]
            pod["metadata"]["uid"] = f"uid of {pod_name}"
            self.pods[pod_name] = pod
            self.change(pod_name, phase="Pending")
            names += (pod_name,)
        return names

    def change(self, name: str, **status: Any) -> None:
        self.pods[name] = {**self.pods[name], "status": status}
        self.changes.put_nowait(Seen(name=name, body=self.pods[name]))

    def waiting(self, name: str, worker_id: str, reason: str, message: str) -> None:
        state = {"waiting": {"reason": reason, "message": message}}
        self.change(name, containerStatuses=[{"name": worker_id, "state": state}])

    def terminated(self, name: str, worker_id: str, **end: Any) -> None:
        self.change(name, containerStatuses=[{"name": worker_id, "state": {"terminated": end}}])

    async def settle(self) -> None:
        """Waits until the launcher has processed all watched objects."""
        for _ in range(self.changes.qsize() + 3):
            await asyncio.sleep(0)


@dataclass
class Received:
    exits: list[WorkerExit] = field(default_factory=list)
    pending: list[tuple[str, str, str]] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def take_exit(self, exit_: WorkerExit) -> None:
        self.exits.append(exit_)
        self.ended.set()


def write_templates(
    folder: Path, topology: str = "separate", queue: str = "", job_sets: bool = False
) -> Path:
    if job_sets:
        (folder / "job-set.yaml").write_text(yaml.safe_dump(JOB_SET))
    (folder / "topology").write_text(topology)
    labels = {"slipstream.dev/worker": "true"}
    if queue:
        labels["kueue.x-k8s.io/queue-name"] = queue
    for role in ("trainer", "rollout"):
        pod = {
            "metadata": {"labels": labels, "annotations": {}},
            "spec": {
                "subdomain": "workers",
                "terminationGracePeriodSeconds": 0,
                "containers": [{"name": role, "image": role, "env": []}],
                "volumes": [{"name": "tmp"}],
            },
        }
        (folder / f"{role}.yaml").write_text(yaml.safe_dump(pod))
    return folder


@asynccontextmanager
async def launching(
    cluster: FakeCluster, templates: Path, *, pending_timeout_s: float = 60.0
) -> AsyncIterator[tuple[KubernetesLauncher, Received]]:
    received = Received()
    launcher = KubernetesLauncher(
        cluster,  # type: ignore[arg-type]
        templates,
        owner={"uid": "u1"},
        controller_address="controller:50051",
        on_exit=received.take_exit,
        on_pending=lambda *pending_event: received.pending.append(pending_event),
        pending_timeout_s=pending_timeout_s,
    )
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(launcher.watch(cluster.changes))
        yield launcher, received
        watching.cancel()


TRAINER, ROLLOUT = "run-01-trainer-0", "run-01-rollout-0"


async def test_a_pod_per_worker_is_created_and_stop_waits_until_all_are_gone(
    tmp_path: Path,
) -> None:
    cluster = FakeCluster()
    async with launching(cluster, write_templates(tmp_path)) as (launcher, received):
        await launcher.start(RUN, SPEC)
        assert set(cluster.pods) == {TRAINER, ROLLOUT}
        await launcher.stop(RUN)
        assert cluster.pods == {}
        assert received.exits == []


async def test_pods_have_the_labels_of_their_project_and_user(tmp_path: Path) -> None:
    async def labels(run_id: str) -> dict[str, str]:
        return accounting_labels(project="team-a", user=f"ann of {run_id}")

    cluster = FakeCluster()
    async with launching(cluster, write_templates(tmp_path)) as (launcher, _):
        launcher.labels_of = labels
        await launcher.start(RUN, SPEC)
        for pod in cluster.pods.values():
            pod_labels = pod["metadata"]["labels"]
            assert pod_labels["slipstream.dev/project"] == "team-a"
            assert pod_labels["slipstream.dev/user"] == f"ann-of-{RUN}"


async def test_pods_take_the_token_of_their_run_from_a_secret_that_goes_with_the_run(
    tmp_path: Path,
) -> None:
    cluster = FakeCluster()
    with acting_as(Identity(key=b"k" * 32)):
        async with launching(cluster, write_templates(tmp_path)) as (launcher, _):
            await launcher.start(RUN, SPEC)
            secret = cluster.secrets["run-01-identity"]
            token = secret["stringData"]["token"]
            assert bearer_of(b"k" * 32, token) == RUN
            assert secret["metadata"]["ownerReferences"] == [{"uid": "u1"}]
            for pod in cluster.pods.values():
                assert token not in json.dumps(pod)
                assert '{"name": "run-01-identity", "key": "token"}' in json.dumps(pod)
            await launcher.stop(RUN)
            assert cluster.secrets == {}


async def test_only_workers_of_the_same_run_reach_each_other(tmp_path: Path) -> None:
    cluster = FakeCluster()
    async with launching(cluster, write_templates(tmp_path)) as (launcher, _):
        await launcher.start(RUN, SPEC)
        (policy,) = cluster.policies.values()
        assert policy["metadata"]["ownerReferences"] == [{"uid": "u1"}]
        labels = policy["spec"]["podSelector"]["matchLabels"]
        assert labels["slipstream.dev/run"] == RUN
        assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
        for pod in cluster.pods.values():
            assert pod["metadata"]["labels"]["slipstream.dev/run"] == RUN
        await launcher.stop(RUN)
        assert cluster.policies == {}


async def test_secret_and_policy_of_a_run_without_a_controller_are_deleted_with_its_last_pod(
    tmp_path: Path,
) -> None:
    cluster, templates = FakeCluster(), write_templates(tmp_path)
    async with launching(cluster, templates) as (launcher, _):
        await launcher.start(RUN, SPEC)
    async with launching(cluster, templates):  # of a controller whose database lost the run
        cluster.terminated(TRAINER, "trainer-0", exitCode=1)
        await cluster.settle()
        assert cluster.secrets, "the other pod may still read it"
        cluster.terminated(ROLLOUT, "rollout-0", exitCode=1)
        await cluster.settle()
        assert (cluster.pods, cluster.secrets, cluster.policies) == ({}, {}, {})


async def test_bundled_workers_share_one_pod_and_differ_in_ports(tmp_path: Path) -> None:
    cluster = FakeCluster()
    async with launching(cluster, write_templates(tmp_path, "bundled")) as (launcher, _):
        await launcher.start(RUN, SPEC)
        (pod,) = cluster.pods.values()
        containers = pod["spec"]["containers"]
        assert [container["name"] for container in containers] == ["trainer-0", "rollout-0"]
        ports = [port["containerPort"] for c in containers for port in c["ports"]]
        assert len(set(ports)) == 4
        assert pod["spec"]["volumes"] == [{"name": "tmp"}]


async def test_rollouts_that_take_turns_with_the_trainer_are_in_its_pod_and_wait_for_its_gpus(
    tmp_path: Path,
) -> None:
    cluster, templates = FakeCluster(), write_templates(tmp_path)
    for role in ("trainer", "rollout"):
        pod = yaml.safe_load((tmp_path / f"{role}.yaml").read_text())
        pod["metadata"]["annotations"] = {"slipstream.dev/gpu-resource": "nvidia.com/gpu"}
        pod["spec"]["containers"][0]["resources"] = {}
        (tmp_path / f"{role}.yaml").write_text(yaml.safe_dump(pod))
    mixed = parse_spec(
        {
            **SPEC.model_dump(),
            "topology": {"placement": "mixed"},
            "rollout": {"replicas": 3, "rewards": [{"name": "exact_match"}]},
            "trainer": {"steps": 1, "prompts_per_step": 1, "world_size": 2},
        }
    )
    async with launching(cluster, templates) as (launcher, received):
        await launcher.start(RUN, mixed, later=["rollout-0", "rollout-1"])
        await launcher.start(RUN, mixed)
        assert set(cluster.pods) == {TRAINER, "run-01-rollout-2"}
        trainer, *in_turns = cluster.pods[TRAINER]["spec"]["containers"]
        assert [c["name"] for c in (trainer, *in_turns)] == ["trainer-0", "rollout-0", "rollout-1"]
        assert trainer["resources"]["limits"] == {"nvidia.com/gpu": "2"}
        ready = {"name": "SLIPSTREAM_TRAINER_READY_FILE", "value": "/tmp/trainer-0.ready"}
        assert ready in trainer["env"]
        for number, container in enumerate(in_turns):
            assert container["resources"] == {}
            assert container["command"][2:5] == [
                *("services.extras.kubernetes.colocated", "/tmp/trainer-0.ready", str(number))
            ]
            env = {variable["name"]: variable.get("value") for variable in container["env"]}
            assert env["SLIPSTREAM_ROLLOUT_GPU_NEIGHBOURS"] == '["trainer"]'
        (alone,) = cluster.pods["run-01-rollout-2"]["spec"]["containers"]
        assert "command" not in alone
        assert alone["resources"]["limits"] == {"nvidia.com/gpu": "1"}
        # If any of its containers is lost, the whole pod is created again, with trainer and rollouts.
        await launcher.end(RUN, "rollout-1")
        await launcher.start(RUN, mixed)
        assert len(cluster.pods[TRAINER]["spec"]["containers"]) == 3
        assert {exit_.worker_id for exit_ in received.exits} <= {"trainer-0", "rollout-0"}


async def test_a_trainer_of_several_nodes_takes_no_turns(tmp_path: Path) -> None:
    spread = parse_spec({**SPREAD, "topology": {"gpus_per_node": 1, "placement": "mixed"}, **MORE})
    async with launching(FakeCluster(), write_templates(tmp_path)) as (launcher, _):
        with pytest.raises(FailedPreconditionError, match=r"world_size .*gpus_per_node \(1\)"):
            await launcher.start(RUN, spread)


async def test_a_failed_container_is_reported_once_with_its_last_lines(tmp_path: Path) -> None:
    cluster = FakeCluster()
    async with launching(cluster, write_templates(tmp_path)) as (launcher, received):
        await launcher.start(RUN, SPEC)
        for _ in range(2):
            cluster.terminated(
                TRAINER, "trainer-0", exitCode=137, reason="OOMKilled", message="step 7\n"
            )
        await cluster.settle()
        (exit_,) = received.exits
        assert exit_.worker_id == "trainer-0"
        assert exit_.code == -9
        assert exit_.last_lines == "OOMKilled\nstep 7"
        await launcher.stop(RUN)


async def test_a_deleted_pod_ends_its_worker(tmp_path: Path) -> None:
    cluster = FakeCluster()
    async with launching(cluster, write_templates(tmp_path)) as (launcher, received):
        await launcher.start(RUN, SPEC)
        await cluster.delete(ROLLOUT)
        await cluster.settle()
        assert [(exit_.worker_id, exit_.code) for exit_ in received.exits] == [("rollout-0", -9)]
        await launcher.stop(RUN)


async def test_the_exit_of_a_deleted_pod_has_its_last_status(tmp_path: Path) -> None:
    cluster = FakeCluster()
    async with launching(cluster, write_templates(tmp_path)) as (launcher, received):
        await launcher.start(RUN, SPEC)
        ended = {"name": "rollout-0", "state": {"terminated": {"exitCode": 0}}}
        last = cluster.pods.pop(ROLLOUT) | {"status": {"containerStatuses": [ended]}}
        cluster.changes.put_nowait(Seen(name=ROLLOUT, body=None, last=last))
        await cluster.settle()
        assert [(exit_.worker_id, exit_.code) for exit_ in received.exits] == [("rollout-0", 0)]
        await launcher.stop(RUN)


async def test_a_preempted_pod_fails_before_its_containers_report_their_end(
    tmp_path: Path,
) -> None:
    cluster = FakeCluster()
    async with launching(cluster, write_templates(tmp_path)) as (launcher, received):
        await launcher.start(RUN, SPEC)
        cluster.pods[ROLLOUT]["metadata"]["deletionTimestamp"] = "2026-11-23T04:00:00Z"
        waiting = {"name": "rollout-0", "state": {"waiting": {"reason": "ContainerCreating"}}}
        cluster.change(ROLLOUT, phase="Failed", containerStatuses=[waiting])
        await cluster.settle()
        assert received.exits == []
        cluster.terminated(ROLLOUT, "rollout-0", exitCode=0, reason="Completed")
        await cluster.settle()
        assert [(exit_.worker_id, exit_.code) for exit_ in received.exits] == [("rollout-0", 0)]
        await launcher.stop(RUN)


async def test_pods_of_one_trainer_end_together_and_are_reported_once(tmp_path: Path) -> None:
    cluster, spread = FakeCluster(), parse_spec(SPREAD)
    first, second = TRAINER, f"{TRAINER}-node-1"
    async with launching(cluster, write_templates(tmp_path)) as (launcher, received):
        await launcher.start(RUN, spread)
        assert set(cluster.pods) == {first, second, ROLLOUT}
        cluster.terminated(second, "trainer-0", exitCode=1, message="out of memory")
        cluster.terminated(first, "trainer-0", exitCode=1, message="a peer is gone")
        await cluster.settle()
        (exit_,) = received.exits
        assert exit_.last_lines == "out of memory"
        await launcher.end(RUN, "trainer-0")
        assert set(cluster.pods) == {ROLLOUT}
        await launcher.start(RUN, spread)
        assert {cluster.pods[name]["status"]["phase"] for name in (first, second)} == {"Pending"}
        assert len(received.exits) == 1
        await launcher.stop(RUN)


async def test_a_trainer_that_lost_a_pod_unseen_is_started_as_a_whole(tmp_path: Path) -> None:
    cluster, spread = FakeCluster(), parse_spec(SPREAD)
    templates = write_templates(tmp_path)
    async with launching(cluster, templates) as (launcher, _):
        await launcher.start(RUN, spread)
    first_pod, lost = cluster.pods[TRAINER], f"{TRAINER}-node-1"
    cluster.pods[lost] = {**cluster.pods[lost], "status": {"phase": "Failed"}}
    async with launching(cluster, templates) as (launcher, received):
        await launcher.start(RUN, spread)
        assert cluster.pods[TRAINER] is not first_pod
        assert received.exits == []
        await launcher.stop(RUN)


async def test_pods_of_a_job_set_end_together_and_another_set_replaces_them(
    tmp_path: Path,
) -> None:
    cluster, spread = FakeCluster(), parse_spec(SPREAD)
    async with launching(cluster, write_templates(tmp_path, job_sets=True)) as (launcher, received):
        await launcher.start(RUN, spread)
        assert set(cluster.pods) == {ROLLOUT}
        assert set(cluster.job_sets) == {TRAINER}
        _, second = cluster.make_pods(TRAINER)
        cluster.terminated(second, "trainer-0", exitCode=1, message="out of memory")
        await cluster.settle()
        (exit_,) = received.exits
        assert (exit_.worker_id, exit_.last_lines) == ("trainer-0", "out of memory")
        await launcher.end(RUN, "trainer-0")
        assert set(cluster.pods) == {ROLLOUT}
        assert cluster.job_sets == {}
        await launcher.start(RUN, spread)
        first, second = cluster.make_pods(TRAINER)
        await cluster.settle()
        del cluster.pods[first]
        cluster.changes.put_nowait(Seen(name=first, body=None))
        await cluster.settle()
        assert [exit_.code for exit_ in received.exits] == [1, -9]
        await launcher.stop(RUN)
        assert (cluster.pods, cluster.job_sets) == ({}, {})


async def test_a_job_set_that_makes_no_pods_is_given_up(tmp_path: Path) -> None:
    cluster, spread = FakeCluster(), parse_spec(SPREAD)
    templates = write_templates(tmp_path, job_sets=True)
    async with launching(cluster, templates, pending_timeout_s=0.05) as (launcher, received):
        await launcher.start(RUN, spread)
        state = {"running": {"startedAt": "now"}}
        cluster.change(ROLLOUT, containerStatuses=[{"name": "rollout-0", "state": state}])
        await received.ended.wait()
        (exit_,) = received.exits
        assert f"could not start: JobSet {TRAINER}" in exit_.last_lines
        await launcher.stop(RUN)
        assert cluster.job_sets == {}


async def test_a_complete_job_set_of_an_earlier_controller_is_adopted(tmp_path: Path) -> None:
    cluster, spread = FakeCluster(), parse_spec(SPREAD)
    templates = write_templates(tmp_path, job_sets=True)
    async with launching(cluster, templates) as (launcher, _):
        await launcher.start(RUN, spread)
    whole = cluster.job_sets[TRAINER]
    _, second = cluster.make_pods(TRAINER)
    async with launching(cluster, templates) as (launcher, _):
        await launcher.start(RUN, spread)
        assert cluster.job_sets[TRAINER] is whole
    del cluster.pods[second]
    async with launching(cluster, templates) as (launcher, received):
        await launcher.start(RUN, spread)
        assert cluster.job_sets[TRAINER] is not whole
        assert set(cluster.pods) == {ROLLOUT}
        assert received.exits == []
        await launcher.stop(RUN)


def with_replicas(count: int) -> RunSpec:
    return SPEC.model_copy(update={"rollout": SPEC.rollout.model_copy(update={"replicas": count})})


def groups(cluster: FakeCluster) -> dict[str, tuple[str, str]]:
    """Returns the Kueue pod group and the size of that group, by pod."""
    result = {}
    for name, pod in cluster.pods.items():
        labels, annotations = pod["metadata"]["labels"], pod["metadata"]["annotations"]
        assert labels["kueue.x-k8s.io/queue-name"] == "gpus"
        assert annotations["kueue.x-k8s.io/pod-group-serving"] == "true"
        assert annotations["kueue.x-k8s.io/role-hash"] in name
        count = annotations["kueue.x-k8s.io/pod-group-total-count"]
        result[name] = (labels["kueue.x-k8s.io/pod-group-name"], count)
    return result


EXTRAS = ("run-01-rollout-1", "run-01-rollout-2")
GROUP = {TRAINER: ("run-01", "2"), ROLLOUT: ("run-01", "2")}
GROWN = GROUP | {name: (name, "1") for name in EXTRAS}


async def test_pods_beyond_the_group_that_a_queue_admitted_wait_for_their_quota_one_by_one(
    tmp_path: Path,
) -> None:
    cluster = FakeCluster()
    async with launching(cluster, write_templates(tmp_path, queue="gpus")) as (launcher, received):
        await launcher.start(RUN, SPEC)
        cluster.queue_is_full = True
        async with asyncio.timeout(30):
            await launcher.start(RUN, with_replicas(3))
        assert groups(cluster) == GROWN
        assert launcher.queued(RUN) == {"rollout-1", "rollout-2"}
        why = f"pod {EXTRAS[0]}: waiting for admission by the queue gpus"
        assert (RUN, "SchedulingGated", why) in received.pending

        waiting = asyncio.ensure_future(launcher.admitted(RUN, ["rollout-1", "rollout-2"]))
        await cluster.settle()
        assert not waiting.done()
        cluster.change(EXTRAS[1], phase="Pending")
        async with asyncio.timeout(30):
            assert await waiting == {"rollout-2"}
        await launcher.end(RUN, "rollout-1")
        assert groups(cluster) == GROUP | {EXTRAS[1]: (EXTRAS[1], "1")}
        assert received.exits == []
        await launcher.stop(RUN)
        assert cluster.pods == {}


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_lost_pod_joins_the_queue_as_before(tmp_path: Path, is_restarted: bool) -> None:
    cluster, templates = FakeCluster(), write_templates(tmp_path, queue="gpus")
    async with AsyncExitStack() as stack:
        launcher, _ = await stack.enter_async_context(launching(cluster, templates))
        await launcher.start(RUN, SPEC)
        await launcher.start(RUN, with_replicas(3))
        if is_restarted:
            await stack.aclose()
            launcher, _ = await stack.enter_async_context(launching(cluster, templates))
            await launcher.start(RUN, with_replicas(3))
        for lost in (["rollout-0"], ["rollout-1"], ["trainer-0", "rollout-2"]):
            for name in lost:
                await launcher.end(RUN, name)
            cluster.queue_is_full = lost == ["rollout-1"]
            async with asyncio.timeout(30):
                await launcher.start(RUN, with_replicas(3))
            assert groups(cluster) == GROWN
        await launcher.stop(RUN)


async def test_a_removed_pod_leaves_its_slot_to_the_next(tmp_path: Path) -> None:
    cluster = FakeCluster()
    async with launching(cluster, write_templates(tmp_path, queue="gpus")) as (launcher, _):
        await launcher.start(RUN, with_replicas(2))
        await launcher.end(RUN, "rollout-1")
        await launcher.start(RUN, with_replicas(1))
        await launcher.start(RUN, with_replicas(3))
        members = dict.fromkeys((TRAINER, ROLLOUT, EXTRAS[0]), ("run-01", "3"))
        assert groups(cluster) == members | {EXTRAS[1]: (EXTRAS[1], "1")}
        await launcher.stop(RUN)


@pytest.mark.parametrize("lost", [["rollout-0"], ["rollout-0", "rollout-1"]])
async def test_a_group_that_is_lost_as_a_whole_keeps_its_size(
    tmp_path: Path, lost: list[str]
) -> None:
    """The queue may still have the former group, and deletes pods that exceed its size."""
    cluster = FakeCluster()
    async with launching(cluster, write_templates(tmp_path, queue="gpus")) as (launcher, received):
        await launcher.start(RUN, SPEC)
        await launcher.start(RUN, with_replicas(3))
        for name in ("trainer-0", *lost):
            await launcher.end(RUN, name)
        # rollout-2 has not joined the run, and must not use the quota that the group waits for.
        await launcher.start(RUN, with_replicas(2))
        assert groups(cluster) == GROUP | {EXTRAS[0]: (EXTRAS[0], "1")}
        assert [exit_.worker_id for exit_ in received.exits] == ["rollout-2"]
        await launcher.stop(RUN)


async def test_a_run_is_cancelled_while_an_added_pod_waits_in_the_queue(tmp_path: Path) -> None:
    cluster, templates = FakeCluster(), write_templates(tmp_path, queue="gpus")
    async with launching(cluster, templates) as (launcher, received):
        await launcher.start(RUN, SPEC)
        cluster.queue_is_full = True
        await launcher.start(RUN, with_replicas(2))
        await launcher.stop(RUN)
        assert cluster.pods == {}
        assert received.exits == []


async def test_a_run_waits_for_its_queue_as_long_as_that_takes(tmp_path: Path) -> None:
    cluster = FakeCluster(queue_is_full=True)
    templates = write_templates(tmp_path, queue="gpus")
    async with launching(cluster, templates, pending_timeout_s=0.01) as (launcher, received):
        starting = asyncio.ensure_future(launcher.start(RUN, SPEC))
        while len(received.pending) < 2:  # noqa: ASYNC110  a thread reads the templates
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # longer than pending_timeout_s, which applies to admitted pods
        assert not starting.done()
        assert received.exits == []
        assert received.pending[0] == (
            RUN,
            "SchedulingGated",
            f"pod {TRAINER}: waiting for admission by the queue gpus",
        )
        for name in (TRAINER, ROLLOUT):
            cluster.change(name, phase="Pending")
        await starting
        async with asyncio.timeout(30):
            await received.ended.wait()
        assert "could not start" in received.exits[0].last_lines, (
            "what is admitted must start in time"
        )
        await launcher.stop(RUN)


async def test_a_pod_that_is_held_back_later_is_not_given_up_for_it(tmp_path: Path) -> None:
    cluster = FakeCluster()
    templates = write_templates(tmp_path, queue="gpus")
    async with launching(cluster, templates, pending_timeout_s=0.05) as (launcher, received):
        await launcher.start(RUN, SPEC)
        for name in (TRAINER, ROLLOUT):
            cluster.change(name, phase="Pending", conditions=[GATED])
        await asyncio.sleep(0.1)
        assert received.exits == []
        await launcher.stop(RUN)


async def test_a_pod_that_is_deleted_in_the_queue_ends_the_wait(tmp_path: Path) -> None:
    cluster = FakeCluster(queue_is_full=True)
    templates = write_templates(tmp_path, queue="gpus")
    async with launching(cluster, templates) as (launcher, received):
        starting = asyncio.ensure_future(launcher.start(RUN, SPEC))
        while len(cluster.pods) < 2:  # noqa: ASYNC110  a thread reads the templates
            await asyncio.sleep(0)
        await cluster.delete(ROLLOUT, is_queued=True)
        async with asyncio.timeout(30):
            await starting
        assert [exit_.worker_id for exit_ in received.exits] == ["rollout-0"]
        await launcher.stop(RUN)
        assert cluster.pods == {}


async def test_a_pod_that_its_queue_takes_back_before_it_has_a_node_is_let_go(
    tmp_path: Path,
) -> None:
    cluster = FakeCluster()
    async with launching(cluster, write_templates(tmp_path, queue="gpus")) as (launcher, received):
        await launcher.start(RUN, SPEC)
        metadata = {
            **cluster.pods[ROLLOUT]["metadata"],
            "deletionTimestamp": "2026-01-01T00:00:00Z",
        }
        cluster.pods[ROLLOUT] |= {"metadata": metadata}
        cluster.change(ROLLOUT, phase="Pending")
        await cluster.settle()
        assert set(cluster.pods) == {TRAINER}
        assert [exit_.worker_id for exit_ in received.exits] == ["rollout-0"]
        await launcher.stop(RUN)


async def test_an_evicted_pod_is_reported_as_evicted(tmp_path: Path) -> None:
    cluster = FakeCluster()
    async with launching(cluster, write_templates(tmp_path)) as (launcher, received):
        await launcher.start(RUN, SPEC)
        cluster.change(ROLLOUT, phase="Failed", reason="Evicted", message="low on memory")
        await cluster.settle()
        assert received.exits[0].last_lines == "Evicted: low on memory"
        assert received.exits[0].code is None
        await launcher.stop(RUN)


async def test_an_unschedulable_pod_is_shown_once_then_given_up(tmp_path: Path) -> None:
    cluster = FakeCluster()
    templates = write_templates(tmp_path)
    async with launching(cluster, templates, pending_timeout_s=0.05) as (launcher, received):
        await launcher.start(RUN, SPEC)
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu",
        }
        for _ in range(3):
            cluster.change(TRAINER, conditions=[condition])
        cluster.change(ROLLOUT, containerStatuses=[{"name": "rollout-0", "state": {"running": {}}}])
        await cluster.settle()
        assert [reason for _, reason, _ in received.pending] == ["Unschedulable"]
        assert "nvidia.com/gpu" in received.pending[0][2]
        async with asyncio.timeout(30):
            await received.ended.wait()
        (exit_,) = received.exits
        assert exit_.worker_id == "trainer-0"
        assert "Unschedulable" in exit_.last_lines
        await launcher.stop(RUN)


async def test_a_volume_that_is_not_there_is_shown_from_the_events_of_its_pod(
    tmp_path: Path,
) -> None:
    def warning(name: str, **values: Any) -> Seen:
        about = {"name": TRAINER, "uid": f"uid of {TRAINER}"}
        missing = {"reason": "FailedMount", "message": 'configmap "code" not found', "count": 3}
        return Seen(name=name, body={"involvedObject": about, **missing, **values})

    cluster, warnings = FakeCluster(), asyncio.Queue[Seen]()
    async with launching(cluster, write_templates(tmp_path)) as (launcher, received):
        await launcher.start(RUN, SPEC)
        cluster.waiting(TRAINER, "trainer-0", "ContainerCreating", "")
        await cluster.settle()
        warnings.put_nowait(warning("a delay", count=2))
        warnings.put_nowait(warning("else", reason="Unhealthy"))
        other = {"name": TRAINER, "uid": "that of an earlier pod"}
        warnings.put_nowait(warning("of another", involvedObject=other))
        for number in range(2):
            warnings.put_nowait(warning(f"it {number}"))
        taking = asyncio.ensure_future(launcher.watch_warnings(warnings))
        for _ in range(warnings.qsize() + 3):
            await asyncio.sleep(0)
        taking.cancel()
        pending_event = (RUN, "FailedMount", f'pod {TRAINER}: configmap "code" not found')
        assert received.pending == [pending_event]
        await launcher.stop(RUN)


@pytest.mark.parametrize("passing", ["ImagePullBackOff", "CreateContainerConfigError"])
async def test_only_what_can_never_start_ends_at_once(tmp_path: Path, passing: str) -> None:
    cluster = FakeCluster()
    async with launching(cluster, write_templates(tmp_path)) as (launcher, received):
        await launcher.start(RUN, SPEC)
        cluster.waiting(ROLLOUT, "rollout-0", passing, "timed out waiting for the condition")
        await cluster.settle()
        assert received.exits == []
        cluster.waiting(ROLLOUT, "rollout-0", "InvalidImageName", "cannot parse")
        await cluster.settle()
        assert [reason for _, reason, _ in received.pending] == [passing, "InvalidImageName"]
        assert "could not start: InvalidImageName" in received.exits[0].last_lines
        await launcher.stop(RUN)


async def test_a_refused_pod_fails_the_start_and_leaves_nothing(tmp_path: Path) -> None:
    cluster = FakeCluster(refuses="rollout-0")
    async with launching(cluster, write_templates(tmp_path)) as (launcher, _):
        with pytest.raises(FailedPreconditionError, match="exceeded quota"):
            await launcher.start(RUN, SPEC)
        await launcher.stop(RUN)
        assert cluster.pods == {}


async def test_a_pod_that_outlasts_its_grace_is_killed_and_its_node_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for deadline in ("_STOP_MARGIN_S", "_KILL_S"):
        monkeypatch.setattr(f"services.extras.kubernetes.launcher.{deadline}", 0.05)
    cluster = FakeCluster(ignores_deletion=True)
    async with launching(cluster, write_templates(tmp_path)) as (launcher, _):
        await launcher.start(RUN, SPEC)
        await launcher.stop(RUN)
        assert cluster.pods == {}
        assert [grace for name, grace in cluster.deletions if name == TRAINER] == [None, 1, 0]


async def test_only_the_lost_worker_is_replaced(tmp_path: Path) -> None:
    cluster = FakeCluster()
    async with launching(cluster, write_templates(tmp_path)) as (launcher, received):
        await launcher.start(RUN, SPEC)
        trainer_pod = cluster.pods[TRAINER]
        cluster.terminated(ROLLOUT, "rollout-0", exitCode=1)
        await cluster.settle()
        await launcher.end(RUN, "rollout-0")
        assert ROLLOUT not in cluster.pods
        await launcher.start(RUN, SPEC)
        assert cluster.pods[ROLLOUT]["status"] == {"phase": "Pending"}
        assert cluster.pods[TRAINER] is trainer_pod
        cluster.terminated(ROLLOUT, "rollout-0", exitCode=1)
        await cluster.settle()
        assert [exit_.worker_id for exit_ in received.exits] == ["rollout-0", "rollout-0"]
        await launcher.stop(RUN)


async def test_running_pods_of_an_earlier_controller_are_adopted_and_others_replaced(
    tmp_path: Path,
) -> None:
    cluster = FakeCluster()
    templates = write_templates(tmp_path)
    async with launching(cluster, templates) as (launcher, _):
        await launcher.start(RUN, SPEC)
    running = cluster.pods[TRAINER]
    cluster.pods[ROLLOUT] = {**cluster.pods[ROLLOUT], "status": {"phase": "Failed"}}
    async with launching(cluster, templates) as (launcher, received):
        await launcher.start(RUN, SPEC)
        assert cluster.pods[TRAINER] is running
        assert cluster.pods[ROLLOUT]["status"] == {"phase": "Pending"}
        await cluster.settle()
        # The launcher has replaced the worker already; a reported exit would replace it again.
        assert received.exits == []
        await launcher.stop(RUN)
        assert cluster.pods == {}


async def test_stop_finds_the_pods_of_a_run_that_an_earlier_controller_started(
    tmp_path: Path,
) -> None:
    cluster = FakeCluster()
    templates = write_templates(tmp_path)
    async with launching(cluster, templates) as (launcher, _):
        await launcher.start(RUN, SPEC)
    async with launching(cluster, templates) as (launcher, received):
        await launcher.stop(RUN)
        assert cluster.pods == {}
        assert received.exits == []


async def test_ended_pods_of_an_earlier_controller_are_removed(tmp_path: Path) -> None:
    cluster = FakeCluster()
    async with launching(cluster, write_templates(tmp_path)) as (_, received):
        for name, uid in (("old", "u1"), ("foreign", "u2")):
            cluster.pods[name] = {
                "metadata": {
                    "name": name,
                    "labels": {"slipstream.dev/run": "run_00"},
                    "ownerReferences": [{"uid": uid}],
                }
            }
            cluster.change(name, phase="Succeeded")
        await cluster.settle()
        assert set(cluster.pods) == {"foreign"}
        assert received.exits == []


async def test_ended_pods_of_an_earlier_controller_go_with_their_job_set(tmp_path: Path) -> None:
    cluster, spread = FakeCluster(), parse_spec(SPREAD)
    templates = write_templates(tmp_path, job_sets=True)
    async with launching(cluster, templates) as (launcher, _):
        await launcher.start(RUN, spread)
    pod_names = cluster.make_pods(TRAINER)
    async with launching(cluster, templates) as (_, received):
        for name in pod_names:
            cluster.change(name, phase="Succeeded")
        await cluster.settle()
        assert set(cluster.pods) == {ROLLOUT}
        assert cluster.job_sets == {}
        assert received.exits == []


@pytest.mark.parametrize("evicts", [True, False], ids=["evicted", "deleted by the launcher"])
async def test_a_released_pod_is_replaced_and_waits_for_a_node_without_a_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evicts: bool
) -> None:
    monkeypatch.setattr(drain, "EVICTION_S", 0.01)
    cluster = FakeCluster(evicts=evicts)
    settings = {"pending_timeout_s": 0.05}
    async with launching(cluster, write_templates(tmp_path), **settings) as (launcher, received):
        await launcher.start(RUN, SPEC)
        cluster.place(TRAINER, "node-1")
        cluster.place(ROLLOUT, "node-2")
        await cluster.settle()
        await launcher.release(RUN, {"trainer-0"})
        assert cluster.evictable == [TRAINER]
        assert set(cluster.pods) == {ROLLOUT}

        starting = asyncio.ensure_future(launcher.start(RUN, SPEC))
        while TRAINER not in cluster.pods:  # noqa: ASYNC110 -- the fake API is polled
            await asyncio.sleep(0)
        moved = cluster.pods[TRAINER]["metadata"]
        assert moved["annotations"]["slipstream.dev/moved-from"] == "node-1"
        cluster.has_no_room(TRAINER)
        await cluster.settle()
        ((_, reason, message),) = received.pending
        assert reason == "NoRoom"
        assert "uncordon node-1" in message and "0/1 nodes" in message
        assert ROLLOUT in cluster.pods
        assert "keep their GPUs" in message and "cancel the run" in message
        await asyncio.sleep(0.1)  # twice the limit of other pods
        assert (starting.done(), received.exits) == (False, [])
        cluster.place(TRAINER, "node-1")
        await starting
        assert received.exits == []


async def test_a_later_controller_waits_for_a_node_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "EVICTION_S", 0.01)
    cluster, templates = FakeCluster(), write_templates(tmp_path)
    async with launching(cluster, templates) as (launcher, _):
        await launcher.start(RUN, SPEC)
        cluster.place(TRAINER, "node-1")
        await cluster.settle()
        await launcher.release(RUN, {"trainer-0"})
        starting = asyncio.ensure_future(launcher.start(RUN, SPEC))
        while TRAINER not in cluster.pods:  # noqa: ASYNC110 -- the fake API is polled
            await asyncio.sleep(0)
        starting.cancel()
    async with launching(cluster, templates, pending_timeout_s=0.05) as (launcher, received):
        starting = asyncio.ensure_future(launcher.start(RUN, SPEC))
        await asyncio.sleep(0.1)
        assert not any(exit_.worker_id == "trainer-0" for exit_ in received.exits)
        assert not starting.done()
        cluster.place(TRAINER, "node-2")
        await starting


async def test_a_run_goes_on_without_a_moved_rollout_while_another_has_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "EVICTION_S", 0.01)
    cluster, spec = FakeCluster(), parse_spec({**SPEC.model_dump(), **MORE})
    async with launching(cluster, write_templates(tmp_path)) as (launcher, _):
        await launcher.start(RUN, spec)
        for name in list(cluster.pods):
            cluster.place(name, "node-1" if name == ROLLOUT else "node-2")
        await cluster.settle()
        await launcher.release(RUN, {"rollout-0"})
        async with asyncio.timeout(5):
            await launcher.start(RUN, spec)
        assert launcher.queued(RUN) == {"rollout-0"}
        waiting = asyncio.ensure_future(launcher.admitted(RUN, {"rollout-0"}))
        cluster.place(ROLLOUT, "node-3")
        assert await waiting == {"rollout-0"}


async def test_all_workers_of_a_pod_leave_with_it(tmp_path: Path) -> None:
    cluster = FakeCluster(evicts=True)
    async with launching(cluster, write_templates(tmp_path, "bundled")) as (launcher, received):
        await launcher.start(RUN, SPEC)
        cluster.place("run-01-bundle", "node-1")
        await cluster.settle()
        (placed,) = launcher.placed_pods()
        assert (placed.run_id, placed.node) == (RUN, "node-1")
        assert placed.workers == {"trainer-0", "rollout-0"}
        await launcher.release(RUN, placed.workers)
        assert (cluster.pods, received.exits) == ({}, [])


def test_what_a_run_may_not_choose_is_known_before_it_starts(tmp_path: Path) -> None:
    launcher = KubernetesLauncher(
        FakeCluster(),  # type: ignore[arg-type]
        write_templates(tmp_path),
        owner={"uid": "u1"},
        controller_address="controller:50051",
        on_exit=lambda exit_: None,
        on_pending=lambda *pending_event: None,
        pending_timeout_s=60.0,
    )
    chosen = {**SPEC.model_dump(), "pods": {"trainer": {"memory": "64Gi"}, "critic": {}}}
    problems = [*launcher.problems(parse_spec(chosen))]
    assert [problem.partition(":")[0] for problem in problems] == [
        "pods.critic",
        "pods.trainer.memory",
    ]
    (tmp_path / "overrides.yaml").write_text("max: {memory: 64Gi}")
    assert [
        *launcher.problems(parse_spec({**chosen, "pods": {"trainer": {"memory": "64Gi"}}}))
    ] == []
