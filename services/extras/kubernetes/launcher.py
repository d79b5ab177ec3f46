"""Launcher that runs workers as pods, through the Kubernetes API.

start   builds pods from the chart's templates   -> API server
        waits until their queue, if any, admits their group
release waits until they are evicted, or deletes them; the next start creates them on other nodes
watch   sees them pend, run, end and vanish      -> conditions and exits of the run
stop    deletes them and waits until they are gone
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.common.errors import FailedPreconditionError, NotFoundError, ServiceError
from services.common.host import Clock
from services.common.runspec.run import RunSpec
from services.common.runspec.workers import WORKERS
from services.common.security.credentials import current_identity
from services.common.security.tls import Certificate
from services.common.task_group import TaskGroup
from services.controller.launch.launcher import ExitHandler, LauncherDefaults, WorkerExit
from services.extras.kubernetes import drain, gang, job_set, pod_state
from services.extras.kubernetes.drain import PlacedPod
from services.extras.kubernetes.pod_api import PodApi, Seen
from services.extras.kubernetes.pod_rules import installed_pod_problems
from services.extras.kubernetes.pod_state import PodRecord, check_growth
from services.extras.kubernetes.pod_templates import Overrides
from services.extras.kubernetes.scale import RolloutScales
from services.extras.kubernetes.worker_pods import (
    RUN_LABEL,
    RUNS_FOLDER,
    TLS_FILES,
    TOKEN_KEY,
    Pod,
    WorkerTemplates,
    build_pods,
    load_templates,
    policy_name,
    run_metadata,
    run_policy,
    secret_name,
    used_ports,
    why_volatile,
)

logger = logging.getLogger(__name__)
_RENEWAL_CHECK_S = 10.0

# Seconds that Kubernetes needs in addition to the pods' own time.
_STOP_MARGIN_S = 20.0
# A node that has not killed a pod within this time counts as gone.
_KILL_S = 10.0

PendingHandler = Callable[[str, str, str], None]
"""Called with run, reason and message when a pod of the run cannot start."""


class KubernetesLauncher(LauncherDefaults):
    """Starts each run's workers as pods.

    Args:
        templates: Folder of the mounted worker templates, read at each start of a run.
        controller_address: ``host:port`` at which pods reach the controller.
        on_exit: Called for workers that ended by themselves.
        on_pending: Called for pods that cannot start.
        pending_timeout_s: Seconds after which a pod that cannot start ends its workers.
        scales: Shows each run's rollouts to autoscalers; None without autoscaling.
    """

    def __init__(
        self,
        api: PodApi,
        templates: Path,
        *,
        owner: Mapping[str, str],
        controller_address: str,
        on_exit: ExitHandler,
        on_pending: PendingHandler,
        pending_timeout_s: float,
        scales: RolloutScales | None = None,
    ) -> None:
        self.labels_of: Callable[[str], Awaitable[Mapping[str, str]]] | None = None
        """Returns further labels of a run's pods; None for none."""
        self.project_of: Callable[[str], Awaitable[str]] | None = None
        """Returns the project of a run, empty if it is unknown; None without projects."""
        self.on_placed: Callable[[str], None] = lambda node: None
        """Called with the node of each pod that is observed."""
        self.neighbours: Sequence[PodApi] = ()
        """Other namespaces with pods of runs, which may share the network of a node with pods of this one."""
        self._api = api
        self._templates = templates
        self._owner = owner
        self._controller_address = controller_address
        self._on_exit = on_exit
        self._on_pending = on_pending
        self._pending_timeout_s = pending_timeout_s
        self._scales = scales
        # Drained node of each released pod, by run and place, until the pod is created again.
        self._released: dict[str, dict[str, str]] = {}
        self._runs: dict[str, dict[str, PodRecord]] = {}
        # Sizes stay known while all pods of a run are replaced: a queue may still hold the former group.
        self._group_sizes: dict[str, int] = {}
        self._changed = asyncio.Condition()
        self.secrets = RunSecrets(api, owner=owner)
        # A run that starts must not lose what is deleted for its earlier pods.
        self._creating = asyncio.Lock()

    def problems(self, spec: RunSpec) -> Iterable[str]:
        """Yields reasons why no node has room for a pod of a run, and what it may not choose."""
        yield from installed_pod_problems(self._templates, spec)
        with suppress(OSError):  # the start of the run reports it
            yield from Overrides.read(self._templates).problems(spec)

    async def why_volatile(self, run_id: str, folder: str | None) -> str:
        """Returns why files in a folder of a trainer are lost with its pod; empty if they are not."""
        try:
            templates = await self._load_templates(run_id)
            return why_volatile(templates.pods[WORKERS["trainer"].program], folder or RUNS_FOLDER)
        except FailedPreconditionError:  # the start of the run reports it
            return ""

    async def start(self, run_id: str, spec: RunSpec, *, later: Collection[str] = ()) -> None:
        """Creates the missing pods of a run; an earlier controller may have created some.

        The rollouts in ``later`` are containers of the trainer's pod, and wait there.

        If the pods are in a queue, returns after the queue has admitted the run's group, or after one
        of the pods is lost. Pods for which the group has no slot may still wait. Pods that left drained
        nodes are awaited until they have another node, except rollouts while another one has.

        Raises:
            FailedPreconditionError: If Kubernetes refuses an object; the message has its explanation.
        """
        templates = await self._load_templates(run_id)
        pods_of_others = await self._node_network_pods() if templates.is_on_node_network else ()
        bodies = build_pods(
            templates,
            run_id,
            spec,
            controller_address=self._controller_address,
            owner=self._owner,
            ports_in_use=used_ports(pods_of_others),
            labels=None if self.labels_of is None else await self.labels_of(run_id),
        )
        pods = await self._remove_leftovers(run_id, bodies)
        check_growth(bodies, pods)
        await self._join_group(run_id, bodies)
        async with self._creating:
            await self._api.put_policy(run_policy(run_id, owner=self._owner))
        if templates.pod_group is not None:
            await self._api.put_pod_group(
                gang.build_pod_group(
                    templates.pod_group, run_id, num_pods=len(bodies), owner=self._owner
                )
            )
        if pods:  # existing pods have a secret, and one that starts may be reading it
            self.secrets.take_over(run_id)
        else:
            await self.secrets.put(run_id)
        self._mark_moved(bodies, self._released.pop(run_id, {}))
        for body in bodies:
            if body["metadata"]["name"] not in pods:
                await self._create(run_id, body, bodies, templates)
        if self._scales is not None:
            await self._scales.write_replicas(run_id, spec.rollout.replicas)
        names = {body["metadata"]["name"] for body in bodies}
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    names - pods.keys()
                    or not any(self._is_awaited(pod, pods) for pod in pods.values())
                )
            )

    async def _node_network_pods(self) -> list[Pod]:
        """Returns the pods of all runs, whose ports on a node's network a new pod may not use.

        A namespace that refuses the controller, as after its deletion, holds up its own project only.
        """
        pods = list(await self._api.list(RUN_LABEL))
        for api in self.neighbours:
            try:
                pods += await api.list(RUN_LABEL)
            except (FailedPreconditionError, NotFoundError) as error:
                logger.warning("cannot look for ports in use", extra={"error": error.message})
        return pods

    async def has_pods(self, run_id: str) -> bool:
        return bool(await self._api.list(f"{RUN_LABEL}={run_id}"))

    async def _load_templates(self, run_id: str) -> WorkerTemplates:
        project = "" if self.project_of is None else await self.project_of(run_id)
        return await asyncio.to_thread(load_templates, self._templates, project)

    def queued(self, run_id: str) -> set[str]:
        """Returns the workers that wait for a queue or a node, and without which the run goes on."""
        pods = self._runs.get(run_id, {})
        waiting = (pod for pod in pods.values() if pod.is_gated or pod.is_homeless)
        return {name for pod in waiting if not self._is_awaited(pod, pods) for name in pod.workers}

    def _is_awaited(self, pod: PodRecord, pods: Mapping[str, PodRecord]) -> bool:
        """Returns True if a run cannot go on without a pod that waits for a queue or a node."""
        if pod.is_gated:
            return not pod.is_extra
        has_others = any(pod_of_run.has_rollout and pod_of_run.node for pod_of_run in pods.values())
        return pod.is_homeless and not (pod.has_only_rollouts and has_others)

    async def admitted(self, run_id: str, worker_ids: Collection[str]) -> set[str]:
        """Waits until one of the workers is no longer in a queue; returns all that are in none."""
        names = set(worker_ids)
        async with self._changed:
            await self._changed.wait_for(lambda: names - self.queued(run_id))
        return names - self.queued(run_id)

    async def end(self, run_id: str, worker_id: str) -> None:
        """Removes a worker's pod at once; returns when it is gone."""
        pods = self._runs.get(run_id, {})
        async with TaskGroup() as tasks:
            for name in [name for name, pod in pods.items() if worker_id in pod.workers]:
                pods[name].reported.add(worker_id)
                tasks.create_task(self._remove(run_id, name))

    async def release(self, run_id: str, worker_ids: Collection[str]) -> None:
        """Ends the pods of workers within their grace period; returns when they are gone.

        Evictions are let through at first, because ``kubectl drain`` would take a new pod of the same name
        for the one that it has to evict.
        """
        pods, names = self._runs.get(run_id, {}), set(worker_ids)
        leaving = {name: pod for name, pod in pods.items() if not names.isdisjoint(pod.workers)}
        for name, pod in leaving.items():
            pod.stop_timer()
            pod.reported.update(pod.workers)
            self._released.setdefault(run_id, {})[name] = pod.node
        async with TaskGroup() as tasks:
            for name, pod in leaving.items():
                tasks.create_task(self._release(run_id, name, pod))

    async def _release(self, run_id: str, name: str, pod: PodRecord) -> None:
        if pod.name:
            with suppress(NotFoundError):
                await self._api.allow_eviction(pod.name)
        with suppress(TimeoutError):
            await self._until(
                lambda: pod.is_ending or pod.is_over or self._is_gone(run_id, name),
                drain.EVICTION_S,
            )
        await self._delete(run_id, name)
        with suppress(TimeoutError):
            await self._until(
                lambda: pod.is_over or self._is_gone(run_id, name),
                pod.own_grace_s + _STOP_MARGIN_S,
            )
        await self._remove(run_id, name)

    def placed_pods(self) -> list[PlacedPod]:
        """Returns the pods of all runs that are on nodes and have not ended."""
        return [
            PlacedPod(
                run_id=run_id,
                node=pod.node,
                workers=self._ending_with(run_id, pod),
                tolerations=pod.tolerations,
            )
            for run_id, _, pod in self._pods()
            if pod.node and not pod.is_over
        ]

    def _ending_with(self, run_id: str, pod: PodRecord) -> frozenset[str]:
        """Returns the workers that end with a pod: those with a container in a pod of one of its workers."""
        pods = self._runs[run_id].values()
        fellows = (
            member.workers for member in pods if not {*pod.workers}.isdisjoint(member.workers)
        )
        return frozenset().union(*fellows)

    def gpus_for(self, run_id: str) -> None:
        """Returns None: nodes come and go, and only the Kubernetes scheduler knows the free GPUs."""

    async def stop(self, run_id: str) -> None:
        """Ends all pods of a run; returns when their containers have ended.

        Pods that exceed their grace period are killed.
        """
        pods = await self._find(run_id)
        for name, pod in list(pods.items()):
            pod.stop_timer()
            pod.reported.update(pod.workers)
            await self._delete(run_id, name)
        grace_s = _STOP_MARGIN_S + max((pod.own_grace_s for pod in pods.values()), default=0.0)
        try:
            await self._until(lambda: all(pod.is_over for pod in pods.values()), grace_s)
        except TimeoutError:
            for name in [name for name, pod in pods.items() if not pod.is_over]:
                logger.warning("pod did not stop in time; killing it", extra={"pod": name})
                await self._remove(run_id, name)
        finally:
            self._runs.pop(run_id, None)
            self._group_sizes.pop(run_id, None)
            self._released.pop(run_id, None)
        await self.secrets.remove(run_id)
        await self._api.delete_policy(policy_name(run_id))
        template = (await self._load_templates(run_id)).pod_group
        if template is not None:
            group = gang.build_pod_group(template, run_id, num_pods=0, owner=self._owner)
            await self._api.delete_pod_group(group)
        if self._scales is not None:
            await self._scales.remove(run_id)

    async def watch(self, changes: "asyncio.Queue[Seen]") -> None:
        """Processes observed changes of pods until cancelled."""
        while True:
            await self._process_change(await changes.get())

    async def watch_warnings(self, changes: "asyncio.Queue[Seen]") -> None:
        """Processes the warning events of pods until cancelled."""
        while True:
            event = (await changes.get()).body
            failure = None if event is None else pod_state.warning(event)
            if event is None or failure is None:
                continue
            for run_id, name, pod in self._pods():
                if pod.uid == event["involvedObject"]["uid"] and not pod.is_running:
                    self._record_obstacle(run_id, name, failure)

    def _pods(self) -> list[tuple[str, str, PodRecord]]:
        return [(run, name, pod) for run, pods in self._runs.items() for name, pod in pods.items()]

    async def _remove_leftovers(self, run_id: str, bodies: Sequence[Pod]) -> dict[str, PodRecord]:
        """Removes pods of a run that cannot serve its workers, and returns the others."""
        watched = frozenset(self._runs.get(run_id, ()))
        pods = await self._find(run_id)
        ended_workers = [pod.workers for pod in pods.values() if pod.is_over or pod.is_ending]
        # A JobSet does not create a missing pod again, so the whole worker is replaced.
        ended_workers += [
            pod_state.workers(body)
            for body in bodies
            if job_set.name_of(body) and body["metadata"]["name"] not in pods
        ]
        lost_workers = set().union(*ended_workers)
        leftovers = [name for name, pod in pods.items() if lost_workers.intersection(pod.workers)]
        # Suppresses the reports of their ends, which would replace the workers again.
        for name in set(leftovers) - watched:
            pods[name].reported.update(pods[name].workers)
        for name in leftovers:
            await self._remove(run_id, name)
        return pods

    async def _join_group(self, run_id: str, bodies: Sequence[Pod]) -> None:
        """Assigns the missing pods to slots of the group that a queue admitted, or to other groups."""
        pods, names = self._runs[run_id], {body["metadata"]["name"] for body in bodies}
        members = [pod for pod in pods.values() if pod.group_size and not pod.is_extra]
        missing_pods = [body for body in bodies if body["metadata"]["name"] not in pods]
        if not members:
            # Rollouts that have not joined the run must not occupy the quota that the group needs.
            for name in [name for name, pod in pods.items() if pod.is_extra and name not in names]:
                await self._remove(run_id, name)
        sizes = (pod.group_size for pod in members)
        size = max(sizes, default=self._group_sizes.get(run_id, len(missing_pods)))
        size = gang.join_kueue_slots(missing_pods, size=size, num_members=len(members))
        if size:
            self._group_sizes[run_id] = size

    async def _find(self, run_id: str) -> dict[str, PodRecord]:
        """Finds the pods of a run, including those of an earlier controller process."""
        pods = self._runs.setdefault(run_id, {})
        for body in await self._api.list(f"{RUN_LABEL}={run_id}"):
            name = job_set.place_of(body)
            if name not in pods:
                self._record_pod(run_id, body)
            pods[name].is_ending |= "deletionTimestamp" in body["metadata"]
            pods[name].is_over |= pod_state.is_over(body)
        return pods

    @staticmethod
    def _mark_moved(bodies: Sequence[Pod], released: Mapping[str, str]) -> None:
        """Annotates pods that replace released ones, so that later controllers know it, too."""
        for body in bodies:
            if node := released.get(body["metadata"]["name"]):
                body["metadata"]["annotations"][pod_state.MOVED_ANNOTATION] = node

    async def _create(
        self, run_id: str, body: Pod, bodies: list[Pod], templates: WorkerTemplates
    ) -> None:
        """Creates a pod, or the JobSet that creates it together with others."""
        name = job_set.name_of(body)
        if not name or templates.job_set is None:
            self._record_pod(run_id, await self._api.create(body))
            return
        fellows = [bundled for bundled in bodies if job_set.name_of(bundled) == name]
        await self._api.create_job_set(job_set.build_job_set(templates.job_set, fellows))
        for fellow in fellows:
            self._register(run_id, fellow)

    def _record_pod(self, run_id: str, body: Mapping[str, Any]) -> None:
        self._register(run_id, body)
        self._note_start(run_id, job_set.place_of(body), body)

    def _register(self, run_id: str, body: Mapping[str, Any]) -> None:
        """Registers a pod and starts the timer that fails it if it does not run in time."""
        name = job_set.place_of(body)
        self._runs[run_id][name] = PodRecord.from_manifest(body)
        self._start_timer(run_id, name)

    async def _process_change(self, change: Seen) -> None:
        run_id, name = self._place_of(change)
        pod = self._runs.get(run_id, {}).get(name)
        if pod is None:
            await self._remove_stray(change)
            return
        state = change.body or change.last
        for end in pod_state.ended(state) if state else ():
            self._report(run_id, end.worker_id, end.code, end.message)
        if change.body is None:
            self._unregister(run_id, name, code=-9, message="the pod was deleted")
        else:
            self._note_start(run_id, name, change.body)
            self.on_placed(pod.node)
            if pod.group_size and pod_state.is_deleted_unplaced(change.body):
                await self._clear(change.body)
        async with self._changed:
            self._changed.notify_all()

    def _place_of(self, change: Seen) -> tuple[str, str]:
        """Returns the run and the place of a pod; a deleted pod is known only by its name."""
        if change.body is not None:
            return change.body["metadata"]["labels"][RUN_LABEL], job_set.place_of(change.body)
        matches = (
            (run_id, place_name)
            for run_id, place_name, pod in self._pods()
            if pod.name == change.name
        )
        return next(matches, ("", ""))

    async def _remove_stray(self, change: Seen) -> None:
        """Removes an ended pod of a run that is no longer driven."""
        if change.body is None or not pod_state.is_over(change.body):
            return
        owners = [owner["uid"] for owner in change.body["metadata"].get("ownerReferences", [])]
        if self._owner["uid"] not in (*owners, job_set.owner_of(change.body)):
            return
        await self._clear(change.body)
        await self._forget(change.body["metadata"]["labels"][RUN_LABEL])

    async def _forget(self, run_id: str) -> None:
        """Deletes secret and policy of a run that no controller drives, once its last pod has ended."""
        try:
            async with self._creating:
                pods = await self._api.list(f"{RUN_LABEL}={run_id}")
                if run_id in self._runs or not all(map(pod_state.is_over, pods)):
                    return
                await self.secrets.remove(run_id)
                await self._api.delete_policy(policy_name(run_id))
        except ServiceError as error:
            logger.warning("cannot delete", extra={"run": run_id, "error": str(error)})

    async def _clear(self, body: Mapping[str, Any]) -> None:
        """Deletes the remains of a pod."""
        name, its_set = body["metadata"]["name"], job_set.name_of(body)
        try:
            if its_set:
                await self._api.delete_job_set(its_set)
            await self._api.delete(name, is_queued=gang.kueue_group_size(body) > 0)
        except ServiceError as error:  # it is seen again with the next list
            logger.warning("cannot delete pod", extra={"pod": name, "error": str(error)})

    def _note_start(self, run_id: str, name: str, body: Mapping[str, Any]) -> None:
        pod = self._runs[run_id][name]
        pod.update(body)
        if pod.is_gated or pod.is_homeless:
            pod.stop_timer()
            pod.timer = None
        elif pod.timer is None:
            self._start_timer(run_id, name)
        if pod.is_running:
            pod.obstacle = None
            pod.stop_timer()
        elif failure := pod.obstacle_of(body):
            self._record_obstacle(run_id, name, failure)

    def _start_timer(self, run_id: str, name: str) -> None:
        loop = asyncio.get_running_loop()
        pod = self._runs[run_id][name]
        pod.timer = loop.call_later(self._pending_timeout_s, self._give_up, run_id, name)

    def _record_obstacle(self, run_id: str, name: str, failure: pod_state.StartFailure) -> None:
        """Records the obstacle of a pod; reports each reason once."""
        pod = self._runs[run_id][name]
        before, pod.obstacle = pod.obstacle, failure
        if before is None or before.reason != failure.reason:
            self._on_pending(run_id, failure.reason, f"pod {name}: {failure.message}")
        if failure.reason in pod_state.HOPELESS:
            self._give_up(run_id, name)

    def _give_up(self, run_id: str, name: str) -> None:
        pod = self._runs.get(run_id, {}).get(name)
        if pod is None:
            return
        for worker_id in pod.workers:
            self._report(run_id, worker_id, 1, f"pod {name} could not start: {pod.why_not()}")

    def _report(self, run_id: str, worker_id: str, code: int | None, message: str) -> None:
        """Reports the end of a worker once, when the first of its pods ends."""
        pods = [pod for pod in self._runs[run_id].values() if worker_id in pod.workers]
        if not any(worker_id in pod.reported for pod in pods):
            self._on_exit(
                WorkerExit(run_id=run_id, worker_id=worker_id, code=code, last_lines=message)
            )
        for pod in pods:
            pod.reported.add(worker_id)

    def _unregister(self, run_id: str, name: str, *, code: int, message: str) -> None:
        pod = self._runs[run_id][name]
        pod.stop_timer()
        for worker_id in pod.workers:
            self._report(run_id, worker_id, code, message)
        del self._runs[run_id][name]

    async def _remove(self, run_id: str, name: str) -> None:
        """Kills a pod and waits until it is gone."""
        pod = self._runs[run_id].get(name)
        if pod is not None and not pod.is_over:
            # With a grace period of 0, the API server removes a pod while its processes still run, and
            # their replacements would run next to them.
            await self._delete(run_id, name, grace_s=1)
            try:
                await self._until(lambda: pod.is_over or self._is_gone(run_id, name), _KILL_S)
            except TimeoutError:
                logger.warning("node of a pod does not answer", extra={"pod": name})
        await self._delete(run_id, name, grace_s=0)
        await self._until(lambda: self._is_gone(run_id, name), _STOP_MARGIN_S)

    def _is_gone(self, run_id: str, name: str) -> bool:
        return name not in self._runs[run_id]

    async def _delete(self, run_id: str, name: str, *, grace_s: int | None = None) -> None:
        pod = self._runs[run_id].get(name)
        if pod is None:
            return
        if pod.job_set:
            await self._api.delete_job_set(pod.job_set)
        is_there = pod.name != "" and await self._api.delete(
            pod.name, grace_s=grace_s, is_queued=pod.group_size > 0
        )
        # The watch may have seen its deletion meanwhile.
        if not is_there and not self._is_gone(run_id, name):
            self._unregister(run_id, name, code=-9, message="the pod was deleted")

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(condition)


class RunSecrets:
    """Writes, renews and deletes the secret of each run that has pods: the run's token and a certificate.

    After half of a certificate's lifetime it writes a new one; kubelets then update the files in the pods.

    Args:
        api: Writes and deletes secrets, without permission to read them.
    """

    def __init__(self, api: PodApi, *, owner: Mapping[str, str], clock: Clock = time) -> None:
        self._api = api
        self._owner = owner
        self._clock = clock
        self._renew_at: dict[str, float] = {}
        # Concurrent writes of one secret would conflict, and a renewal could restore a deleted secret.
        self._writing = asyncio.Lock()

    async def put(self, run_id: str) -> None:
        """Writes a run's secret and replaces an existing one.

        Raises:
            FailedPreconditionError: If Kubernetes refuses it.
            UnavailableError: If Kubernetes does not answer.
        """
        async with self._writing:
            await self._put(run_id)

    def take_over(self, run_id: str) -> None:
        """Schedules a renewal of a secret that an earlier controller wrote at an unknown time."""
        if current_identity().issue is not None:
            self._renew_at.setdefault(run_id, 0.0)

    async def remove(self, run_id: str) -> None:
        """Deletes the secret of a run that has ended. Raises the errors of :meth:`put`."""
        async with self._writing:
            self._renew_at.pop(run_id, None)
            await self._api.delete_secret(secret_name(run_id))

    async def keep_renewed(self) -> None:
        """Renews certificates until cancelled."""
        while True:
            await asyncio.sleep(_RENEWAL_CHECK_S)
            await self.renew()

    async def renew(self) -> None:
        """Renews the certificates that are due; failed ones are retried at the next call."""
        now = self._clock.time()
        for run_id in [run_id for run_id, at in self._renew_at.items() if at <= now]:
            try:
                async with self._writing:
                    if run_id in self._renew_at:
                        await self._put(run_id)
            except ServiceError as error:
                why = {"run": run_id, "error": str(error)}
                logger.warning("cannot renew the certificate", extra=why)

    async def _put(self, run_id: str) -> None:
        identity = current_identity()
        certificate = await asyncio.to_thread(identity.certificate_for, run_id)
        token = identity.token_for(run_id)
        await self._api.put_secret(run_secret(run_id, token, certificate, owner=self._owner))
        if certificate is not None:
            self._renew_at[run_id] = certificate.renew_at


def run_secret(
    run_id: str, token: str, certificate: Certificate | None, *, owner: Mapping[str, str]
) -> dict[str, Any]:
    """Builds the secret from which the pods of a run read its token and its certificate."""
    data = {TOKEN_KEY: token}
    if certificate is not None:
        files = (certificate.chain, certificate.key, certificate.authority)
        data |= {name: file.decode() for name, file in zip(TLS_FILES, files, strict=True)}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": run_metadata(run_id, secret_name(run_id), owner=owner),
        "type": "Opaque",
        "stringData": data,
    }
