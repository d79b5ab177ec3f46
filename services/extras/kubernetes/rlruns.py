"""RLRun objects, by which `kubectl` submits, changes, suspends and cancels runs.

object is created       -> a run of the project that is named like the namespace is submitted
its spec is edited      -> the run is changed as by PATCH, paused or resumed
object is deleted       -> the run is cancelled; the finalizer is removed when it has ended
its time to live ends   -> the object of an ended run is deleted
it names its run again  -> an ended or lost run is submitted again (annotation slipstream.dev/resubmit)
run changes             -> status and, for a new phase, an event of the object

The database is the source of truth: an edit applies the object's whole spec to the run once, and
changes through the API stay until the next edit.
"""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from functools import partial
from typing import Any, Final

from kubernetes import config
from kubernetes.client import CoreV1Api, CustomObjectsApi
from pydantic import ValidationError

from services.common.errors import (
    AbortedError,
    NotFoundError,
    ResourceExhaustedError,
    ServiceError,
    UnavailableError,
)
from services.common.runspec.aliases import without_aliases
from services.common.runspec.keys import flat, is_live, nested
from services.common.runspec.loader import SpecError, canonical_json, parse_spec
from services.common.runspec.run import RunSpec
from services.common.task_group import TaskGroup
from services.common.telemetry.logging import RareLog
from services.controller.manager.changes import merged
from services.controller.manager.runs import RunManager
from services.controller.rules.run_state import TERMINAL, RunState, desired_state
from services.controller.schemas import RunPatch
from services.controller.settings import ControllerSettings
from services.controller.store.records import Event, Run, RunFilter, Submission
from services.controller.store.runs import InvalidTransitionError, StaleRevisionError
from services.extras.kubernetes.pod_api import Seen, call_kubernetes, follow

logger = logging.getLogger(__name__)
_rare = RareLog(logger)

GROUP, VERSION, PLURAL, KIND = "slipstream.dev", "v1alpha1", "rlruns", "RLRun"
FINALIZER: Final = "slipstream.dev/run"
UID_LABEL: Final = "slipstream.dev/rlrun"
"""Label of a run with the unique id of its object, by which a later controller finds the run."""
RESUBMIT: Final = "slipstream.dev/resubmit"
"""Annotation whose value is the id of the run that a new one replaces."""
ACTOR: Final = "kubernetes"
"""User that events of runs name: Kubernetes does not report who changed an object."""

_MERGE = "application/merge-patch+json"
_TTL = "ttlSecondsAfterFinished"
_REQUEST_KEYS = ("suspend", "priority", "labels", _TTL)
"""Keys of ``spec`` that are not keys of a run specification."""
_ENDED = frozenset(state.value.capitalize() for state in TERMINAL)
_DELETED = "Deleted"
_LOST = "Lost"
_WARNINGS = frozenset({"Rejected", "Recovering", "Failed", _DELETED, _LOST})
_WARNED_OF = frozenset({"Rewound", "CheckpointsVolatile", "CheckpointFailed", "Draining"})
"""Events of a run that are also warning events of its object."""
_INVALID_SPEC = "INVALID_SPEC"
_MAX_MESSAGE = 4000
_MAX_BURST = 3
_MAX_WARNINGS = 8
_FIRST_EVENTS = 16
_WRITES_PER_S = 9 / 60
_RETRY_S = 1.0
_MAX_RETRY_S = 10.0
# Max seconds between two comparisons, so that a submission is repeated after its refusal has passed.
_COMPARE_S = 60.0

Json = Mapping[str, Any]


class NotEditableError(SpecError):
    """An edit changes keys that may not change after the submission."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason for which a spec, or an edit of it, has no effect."""

    reason: str
    """Stable code for programs: that of the API's error, ``INVALID_SPEC`` or ``NOT_EDITABLE``."""
    message: str


class Change(IntEnum):
    """Kind of a change of a status; its value is the number of writes that the budget must have left.

    Progress is written only when the budget is full, every 7 s, so it never delays a new phase.
    """

    PHASE = 1
    """A new phase, or an edit that was applied or refused."""
    CONDITION = 2
    PROGRESS = 3


class WriteBudget:
    """Limits the writes of one object's status: at most 12 in any minute, at most 3 at once."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._budget = float(_MAX_BURST)
        self._time = now()

    def take(self, change: Change) -> float:
        """Takes one write and returns 0, or returns the seconds after which to ask again."""
        now = self._now()
        self._budget = min(self._budget + (now - self._time) * _WRITES_PER_S, _MAX_BURST)
        self._time = now
        if self._budget < change:
            return (change - self._budget) / _WRITES_PER_S + 0.01
        self._budget -= 1
        return 0.0


class RLRuns:
    """Serves the RLRun objects of one namespace.

    Args:
        custom: Client of custom objects, with the rights of the controller's account.
    """

    def __init__(
        self, manager: RunManager, custom: CustomObjectsApi, core: CoreV1Api, namespace: str
    ) -> None:
        self._manager = manager
        self._api = RLRunApi(custom, core, namespace)
        self._listing = partial(
            custom.list_namespaced_custom_object, GROUP, VERSION, namespace, PLURAL
        )
        self._namespace = namespace
        self._mirrors: dict[str, _Mirror] = {}
        self._by_run: dict[str, _Mirror] = {}

    async def serve(self) -> None:
        """Mirrors objects and runs until cancelled."""
        subject = f"{PLURAL}.{GROUP} of namespace {self._namespace}"
        async with follow(self._listing, subject) as changes, TaskGroup() as tasks:
            tasks.create_task(self._watch_runs())
            while True:
                self._take(await changes.get(), tasks)

    def _take(self, change: Seen, tasks: asyncio.TaskGroup) -> None:
        mirror = self._mirrors.get(change.name)
        is_other = change.body is None or (
            mirror is not None and mirror.uid != change.body["metadata"]["uid"]
        )
        if mirror is not None and is_other:
            mirror.is_gone = True
            mirror.wake()
            del self._mirrors[change.name]
            mirror = None
        if change.body is None:
            return
        if mirror is not None:
            mirror.body = change.body
            mirror.wake()
        elif not _is_settled(change.body):
            mirror = self._mirrors[change.name] = _Mirror(
                self._manager,
                self._api,
                self._namespace,
                change.body,
                on_run=self._by_run.__setitem__,
            )
            tasks.create_task(self._serve(change.name, mirror))

    async def _serve(self, name: str, mirror: "_Mirror") -> None:
        try:
            await mirror.serve()
        finally:
            if self._mirrors.get(name) is mirror:
                del self._mirrors[name]
            if mirror.run_id and self._by_run.get(mirror.run_id) is mirror:
                del self._by_run[mirror.run_id]

    async def _watch_runs(self) -> None:
        """Wakes the mirrors of runs that change."""
        while True:
            try:
                async for events in self._manager.feed.watch_project(self._namespace, None):
                    for event in events:
                        if (mirror := self._by_run.get(event.run_id)) is not None:
                            mirror.process(event)
            except ResourceExhaustedError:  # too many events at once: any run may have changed
                for mirror in self._mirrors.values():
                    mirror.wake()


class _Mirror:
    """Keeps one object and its run equal, until both have ended or the object is gone."""

    def __init__(
        self,
        manager: RunManager,
        api: "RLRunApi",
        namespace: str,
        body: Json,
        *,
        on_run: Callable[[str, "_Mirror"], None],
    ) -> None:
        self._manager = manager
        self._api = api
        self._namespace = namespace
        self._on_run = on_run
        self.body = body
        self.uid: str = body["metadata"]["uid"]
        self.is_gone = False
        """True if the object no longer exists."""
        self.run_id = ""
        """The object's run; empty before it is submitted."""
        self._status: dict[str, Any] = dict(body.get("status", {}))
        self._observed: int = self._status.get("observedGeneration", 0)
        self._examined = 0
        self._refusal: Refusal | None = None
        # True once the finalizer was added: the watch reports the changed object only later.
        self._is_held = False
        self._is_examined = False
        """True if the database was searched for a run of an earlier controller or a failed submission."""
        self._budget = WriteBudget()
        self._changed = asyncio.Event()
        self._released = ""
        """Lost run whose workers were ended."""
        self._last_seq = 0
        """Number of the newest event of the run that was processed."""
        self._warnings = deque[tuple[str, str]](maxlen=_MAX_WARNINGS)
        """Warnings of the run, with their reasons, that are not yet events of the object."""

    def wake(self) -> None:
        """Compares object and run again."""
        self._changed.set()

    def process(self, event: Event) -> None:
        """Processes an event of the run."""
        if event.type in _WARNED_OF and event.seq > self._last_seq:
            self._warnings.append((event.type, event.message))
        self._last_seq = max(self._last_seq, event.seq)
        self.wake()

    async def serve(self) -> None:
        """Mirrors until nothing can change any more."""
        failures = 0
        while not self.is_gone:
            self._changed.clear()
            wait_s = _COMPARE_S
            try:
                if await self._compare():
                    return
                wait_s = await self._write_status() or self._wait_s()
                await self._write_warnings()
                failures = 0
                if _is_settled({**self.body, "status": self._status}):
                    return
            except Exception as error:  # an object must not end the controller
                if isinstance(error, ServiceError):
                    _rare.warning("cannot mirror an RLRun", rlrun=self._name, error=str(error))
                else:
                    logger.exception("cannot mirror an RLRun", extra={"rlrun": self._name})
                wait_s = min(_RETRY_S * 2**failures, _MAX_RETRY_S)
                failures += 1
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _wait_s(self) -> float:
        """Returns the seconds until object and run are compared again without a change."""
        finish = self._status.get("finishTime")
        ttl_s = self.body["spec"].get(_TTL)
        if finish is None or ttl_s is None:
            return _COMPARE_S
        end: float = datetime.fromisoformat(finish).timestamp() + ttl_s
        return min(_COMPARE_S, max(end - time.time(), 0.0) + 0.01)

    @property
    def _name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def _generation(self) -> int:
        return int(self.body["metadata"]["generation"])

    async def _compare(self) -> bool:
        """Applies the object's spec, or its deletion, to the run; returns True if mirroring may end."""
        run = await self._find_run()
        if "deletionTimestamp" in self.body["metadata"]:
            return await self._end(run)
        if run is None and self.run_id and not await self._manager.was_deleted(self.run_id):
            await self._release()
        if run is not None and run.is_terminal and _remaining_s(self.body, run) == 0:
            await self._api.delete(self.body)
            return False
        if self.run_id and (run is None or run.is_terminal) and _asks_again(self.body, self.run_id):
            self.run_id, self._examined, run = "", 0, None
        if FINALIZER not in self.body["metadata"].get("finalizers", ()) and not self._is_held:
            await self._api.set_finalizer(self.body, is_set=True)
            self._is_held = True
        if run is None and not self.run_id:
            await self._submit()
        elif run is not None and self._observed != self._generation:
            await self._edit(run)
        elif run is None:
            self._observed = self._generation
        return False

    async def _find_run(self) -> Run | None:
        """Returns the object's run; None if it is not submitted, or was deleted over the API."""
        if not self.run_id and not self._is_examined:
            only = RunFilter(project=self._namespace, label=(UID_LABEL, self.uid))
            runs = await self._manager.list_runs(limit=1, only=only)
            run_id = runs[0].run_id if runs else self._status.get("runId", "")
            self._is_examined = True
            if run_id:
                self._adopt(run_id)
        if not self.run_id:
            return None
        try:
            run = await self._manager.get(self.run_id)
        except NotFoundError:
            return None
        return run if run.project == self._namespace else None

    def _adopt(self, run_id: str) -> None:
        self.run_id = run_id
        self._on_run(run_id, self)

    async def _end(self, run: Run | None) -> bool:
        """Cancels the run of a deleted object; returns True after the object is released."""
        if run is not None and not run.is_terminal:
            if run.state is not RunState.CANCELLING:
                await self._manager.cancel(run.run_id, actor=ACTOR)
            return False
        if self._is_held or FINALIZER in self.body["metadata"].get("finalizers", ()):
            await self._api.set_finalizer(self.body, is_set=False)
        return True

    async def _release(self) -> None:
        """Ends the workers of a lost run, once."""
        if self._released != self.run_id:
            await self._manager.release(self.run_id)
            self._released = self.run_id

    async def _submit(self) -> None:
        """Submits the run of the object; only validates it if the object is suspended.

        After a refusal that may pass, such as that of a quota, each further call tries again.
        """
        body = self.body
        is_examined = self._examined == body["metadata"]["generation"]
        if is_examined and (self._refusal is None or self._refusal.reason == _INVALID_SPEC):
            return
        try:
            spec, patch = await asyncio.to_thread(_read_spec, body)
            if _is_suspended(body):
                await self._manager.validate(self._namespace, spec)
            else:
                labels = {**(patch.labels or {}), UID_LABEL: self.uid}
                submission = Submission(
                    spec=spec,
                    project=self._namespace,
                    priority=patch.priority or 0,
                    labels=labels,
                    actor=ACTOR,
                )
                # If this fails after the run was stored, the next attempt finds it by its label.
                self._is_examined = False
                run, _ = await self._manager.create(submission)
                self._adopt(run.run_id)
                # Events before the adoption did not reach this object.
                for event in await self._manager.feed.page(
                    run.run_id, after_seq=0, limit=_FIRST_EVENTS
                ):
                    self.process(event)
            self._refusal = None
        except (SpecError, ServiceError) as error:
            self._refusal = _refusal_of(error)
        self._observed = self._examined = body["metadata"]["generation"]

    async def _edit(self, run: Run) -> None:
        """Applies an edit of the object's spec to its run."""
        body = self.body
        is_applied = await self._set_paused(run, is_suspended=_is_suspended(body))
        try:
            spec, desired = await asyncio.to_thread(_read_spec, body)
            patch = changes_of(run, spec, desired, body)
            if patch is not None:
                await self._manager.patch(run.run_id, patch, revision=run.revision, actor=ACTOR)
            self._refusal = None
        except StaleRevisionError:  # the run has changed meanwhile; compares again at once
            self._changed.set()
            return
        except (SpecError, ServiceError) as error:
            self._refusal = _refusal_of(error)
        if is_applied:
            self._observed = body["metadata"]["generation"]

    async def _set_paused(self, run: Run, *, is_suspended: bool) -> bool:
        """Pauses or resumes a run; returns False if its state does not allow that yet."""
        if run.is_terminal or is_suspended == (desired_state(run.state) != "RUNNING"):
            return True
        try:
            if is_suspended:
                await self._manager.pause(run.run_id, actor=ACTOR)
            elif run.state is not RunState.CANCELLING:
                await self._manager.resume(run.run_id, actor=ACTOR)
        except (
            InvalidTransitionError
        ):  # starting, pausing or recovering: tried again with its next change
            return False
        return True

    async def _write_status(self) -> float:
        """Writes the status if it has changed; returns 0, or the seconds until the budget allows it."""
        run = await self._find_run()
        is_lost = run is None and bool(self.run_id)
        is_lost = is_lost and not await self._manager.was_deleted(self.run_id)
        status = self._new_status(run, is_lost=is_lost)
        if status == self._status:
            return 0.0
        if wait_s := self._budget.take(_change(self._status, status)):
            return wait_s
        try:
            await self._api.write_status(self._name, status, before=self._status)
        except NotFoundError:
            self.is_gone = True
            return 0.0
        before, self._status = self._status, status
        rejected, phase = _rejected(status), status["phase"]
        if rejected and rejected != _rejected(before):
            await self._api.record_event(self.body, "Rejected", rejected)
        elif phase != before.get("phase"):
            message = status.get("message") or f"the run is {phase}"
            await self._api.record_event(self.body, phase, message)
        return 0.0

    async def _write_warnings(self) -> None:
        """Creates events of the object for warnings of its run."""
        while self._warnings and not self.is_gone:
            reason, message = self._warnings[0]
            await self._api.record_event(self.body, reason, message)
            self._warnings.popleft()

    def _new_status(self, run: Run | None, *, is_lost: bool) -> dict[str, Any]:
        if run is not None:
            status = status_of(run)
        elif is_lost:
            status = self._lost_status()
        elif self.run_id:
            status = {
                **self._status,
                "phase": _DELETED,
                "message": "the run was deleted over the API",
            }
        else:
            status = {"phase": "Rejected" if self._refusal else "Suspended", "conditions": []}
            if self._refusal:
                status["message"] = self._refusal.message
        other_conditions = [
            condition for condition in status["conditions"] if condition["type"] != "SpecRejected"
        ]
        status["conditions"] = [*other_conditions, self._rejection()]
        status["observedGeneration"] = self._observed
        return status

    def _lost_status(self) -> dict[str, Any]:
        message = (
            f"the database has no run {self.run_id}: it was lost, or restored from before the run; restore a "
            f"newer copy, or submit the run again: kubectl annotate {PLURAL} {self._name} "
            f"{RESUBMIT}={self.run_id} --overwrite"
        )
        old_condition = _condition(self._status, "Failed")
        is_reported = old_condition.get("reason") == _LOST
        since = old_condition["lastTransitionTime"] if is_reported else _time(time.time())
        other_conditions = [
            condition
            for condition in self._status.get("conditions", ())
            if condition["type"] not in ("Complete", "Failed")
        ]
        failed = _outcome("Failed", _LOST, message, since)
        return {
            **self._status,
            "runId": self.run_id,
            "phase": _LOST,
            "message": message,
            "conditions": [*other_conditions, failed],
        }

    def _rejection(self) -> dict[str, Any]:
        refusal = self._refusal
        rejected = _condition(self._status, "SpecRejected")
        if refusal is None and rejected and rejected["observedGeneration"] == self._observed:
            return dict(rejected)  # an earlier controller judged this generation
        status = "True" if refusal else "False"
        is_same = rejected.get("status") == status
        return _without_empty(
            {
                "type": "SpecRejected",
                "status": status,
                "reason": refusal.reason if refusal else "Accepted",
                "message": refusal.message if refusal else "",
                "observedGeneration": self._observed,
                "lastTransitionTime": rejected["lastTransitionTime"]
                if is_same
                else _time(time.time()),
            }
        )


class RLRunApi:
    """Writes RLRun objects of a namespace. Raises the errors of :func:`call_kubernetes`."""

    def __init__(self, custom: CustomObjectsApi, core: CoreV1Api, namespace: str) -> None:
        self._custom = custom
        self._core = core
        self._namespace = namespace
        self._resource = (GROUP, VERSION, namespace, PLURAL)

    async def set_finalizer(self, body: Json, *, is_set: bool) -> Json:
        """Adds or removes the finalizer that keeps a deleted object until its run has ended.

        Returns:
            The object as changed.

        Raises:
            FailedPreconditionError: Also if the object was changed since it was read.
        """
        metadata = body["metadata"]
        other_finalizers = [name for name in metadata.get("finalizers", ()) if name != FINALIZER]
        finalizers = [*other_finalizers, FINALIZER] if is_set else other_finalizers
        patch = {"finalizers": finalizers, "resourceVersion": metadata["resourceVersion"]}
        updated: Json = await call_kubernetes(
            f"finalizer of {KIND} {metadata['name']}",
            self._custom.patch_namespaced_custom_object,
            *self._resource,
            metadata["name"],
            {"metadata": patch},
            _content_type=_MERGE,
        )
        return updated

    async def write_status(self, name: str, status: Json, *, before: Json) -> None:
        """Writes a status; removes the keys that only ``before`` has."""
        removals = dict.fromkeys(before.keys() - status.keys())
        await call_kubernetes(
            f"status of {KIND} {name}",
            self._custom.patch_namespaced_custom_object_status,
            *self._resource,
            name,
            {"status": {**removals, **status}},
            _content_type=_MERGE,
        )

    async def delete(self, body: Json) -> None:
        """Deletes an object, unless another one has its name now."""
        metadata = body["metadata"]
        with suppress(NotFoundError):
            await call_kubernetes(
                f"{KIND} {metadata['name']}",
                self._custom.delete_namespaced_custom_object,
                *self._resource,
                metadata["name"],
                body={"preconditions": {"uid": metadata["uid"]}},
            )

    async def record_event(self, body: Json, reason: str, message: str) -> None:
        """Creates an event of an object."""
        now, metadata = _time(time.time()), body["metadata"]
        await call_kubernetes(
            f"event of {KIND} {metadata['name']}",
            self._core.create_namespaced_event,
            self._namespace,
            {
                "metadata": {"generateName": f"{metadata['name']}."},
                "involvedObject": {
                    "apiVersion": f"{GROUP}/{VERSION}",
                    "kind": KIND,
                    "namespace": self._namespace,
                    **{key: metadata[key] for key in ("name", "uid", "resourceVersion")},
                },
                "reason": reason,
                "message": message[:1000],
                "type": "Warning" if reason in _WARNINGS | _WARNED_OF else "Normal",
                "source": {"component": "slipstream-controller"},
                "firstTimestamp": now,
                "lastTimestamp": now,
                "count": 1,
            },
        )


def status_of(run: Run) -> dict[str, Any]:
    """Returns the status that shows a run: its state, conditions and newest numbers."""
    summary = run.summary
    heldout, sync_ms = summary.get("heldout") or {}, summary.get("sync_ms", {}).get("p50")
    best = (summary.get("best") or {}).get("score")
    scores = {"greedy": heldout.get("greedy"), "sampled": heldout.get("sampled"), "best": best}
    status: dict[str, Any] = {
        "runId": run.run_id,
        "phase": run.state.value.capitalize(),
        "message": run.message[:_MAX_MESSAGE],
        "step": run.step,
        "targetSteps": run.target_steps,
        "weightVersion": run.weight_version,
        "staleness": summary.get("staleness"),
        "scores": {name: round(score, 4) for name, score in scores.items() if score is not None},
        "syncSeconds": None if sync_ms is None else round(sync_ms / 1000, 4),
        "startTime": None if run.start_time is None else _time(run.start_time),
        "finishTime": None if run.finish_time is None else _time(run.finish_time),
        "conditions": [
            _without_empty(
                {
                    "type": condition.type,
                    "status": condition.status,
                    "reason": condition.reason,
                    "message": condition.message[:_MAX_MESSAGE],
                    "lastTransitionTime": _time(condition.last_transition_time),
                }
            )
            for condition in run.conditions
        ],
    }
    if run.is_terminal:
        end = "Complete" if run.state is RunState.SUCCEEDED else "Failed"
        since = _time(run.finish_time or run.update_time)
        reason = run.state_reason or run.state.value.capitalize()
        status["conditions"].append(_outcome(end, reason, run.message, since))
    return _without_empty(status)


def _outcome(type_: str, reason: str, message: str, since: str) -> dict[str, Any]:
    """Returns the condition ``Complete`` or ``Failed`` of a run that has ended, as Jobs have it."""
    return _without_empty(
        {
            "type": type_,
            "status": "True",
            "reason": reason,
            "message": message[:_MAX_MESSAGE],
            "lastTransitionTime": since,
        }
    )


def changes_of(run: Run, spec: RunSpec, desired: RunPatch, body: Json) -> RunPatch | None:
    """Returns the patch that makes a run match its edited object; None if nothing differs.

    Raises:
        NotEditableError: With one line for each key that may not change.
    """
    old = dict(flat(json.loads(run.spec_json)))
    new = dict(flat(json.loads(canonical_json(spec))))
    # A key that the object does not set has another value only if another release stored the run.
    spec_keys = dict(flat(without_aliases(_document(body)).document))
    patch: dict[str, Any] = {}
    problems = []
    for key, value in new.items():
        if value == old.get(key):
            continue
        if is_live(key):
            patch["spec"] = merged(patch.get("spec", {}), nested(key, value))
        elif key in spec_keys:
            problems.append(
                f"{key}: cannot change after the submission; the run has {old.get(key)!r}, got {value!r}; "
                "restore it, or delete the object and apply another one"
            )
    if problems:
        raise NotEditableError(problems)
    labels = {key: value for key, value in run.labels.items() if key != UID_LABEL}
    if (desired.labels or {}) != labels:
        uid_label = {key: run.labels[key] for key in (UID_LABEL,) if key in run.labels}
        patch["labels"] = {**(desired.labels or {}), **uid_label}
    if (desired.priority or 0) != run.priority:
        patch["priority"] = desired.priority or 0
    return RunPatch(**patch) if patch else None


def _read_spec(body: Json) -> tuple[RunSpec, RunPatch]:
    """Reads an object's spec: the specification, and the labels and priority of its run.

    Raises:
        SpecError: With one line for each problem.
    """
    patch_fields = {key: body["spec"].get(key) for key in ("priority", "labels")}
    try:
        patch = RunPatch(**patch_fields)
    except ValidationError as error:
        raise SpecError(
            [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        ) from error
    return parse_spec(_document(body)), patch


def _document(body: Json) -> dict[str, Any]:
    spec = {key: value for key, value in body["spec"].items() if key not in _REQUEST_KEYS}
    return {"name": body["metadata"]["name"], **spec}


def _refusal_of(error: SpecError | ServiceError) -> Refusal:
    """Converts an error into a refusal; raises it again if it is temporary."""
    if isinstance(error, SpecError):
        reason = "NOT_EDITABLE" if isinstance(error, NotEditableError) else _INVALID_SPEC
        return Refusal(reason, "; ".join(error.problems)[:_MAX_MESSAGE])
    if isinstance(error, (AbortedError, UnavailableError)):
        raise error
    return Refusal(error.reason, error.message[:_MAX_MESSAGE])


def _is_suspended(body: Json) -> bool:
    return bool(body["spec"].get("suspend"))


def _asks_again(body: Json, run_id: str) -> bool:
    """Returns True if an object asks for a new run in place of its current one."""
    return bool(body["metadata"].get("annotations", {}).get(RESUBMIT) == run_id)


def _remaining_s(body: Json, run: Run) -> float | None:
    """Returns the seconds until the object of an ended run is deleted; None if it is kept."""
    ttl_s: float | None = body["spec"].get(_TTL)
    if ttl_s is None or run.finish_time is None:
        return None
    # At most the whole time: the clock may have been set back since.
    return min(max(run.finish_time + ttl_s - time.time(), 0.0), ttl_s)


def _is_settled(body: Json) -> bool:
    """Returns True if nothing about an object can change without an edit."""
    status, metadata = body.get("status", {}), body["metadata"]
    if body["spec"].get(_TTL) is not None or _asks_again(body, status.get("runId", "")):
        return False
    return (
        status.get("phase") in (*_ENDED, _DELETED)
        and status.get("observedGeneration") == metadata["generation"]
        and "deletionTimestamp" not in metadata
    )


def _change(old: Json, new: Json) -> Change:
    if any(old.get(key) != new[key] for key in ("phase", "observedGeneration")):
        return Change.PHASE
    is_progress = old.get("conditions") == new["conditions"]
    return Change.PROGRESS if is_progress else Change.CONDITION


def _condition(status: Json, type_: str) -> Json:
    matches = (
        condition for condition in status.get("conditions", ()) if condition["type"] == type_
    )
    return next(matches, {})


def _rejected(status: Json) -> str:
    """Returns the message of a status whose spec was rejected; empty if it was accepted."""
    return str(_condition(status, "SpecRejected").get("message", ""))


def _without_empty(values: Json) -> dict[str, Any]:
    """Returns a mapping without its empty values: Kubernetes 1.20 turns an empty string in a list to null."""
    return {key: value for key, value in values.items() if value not in (None, "", {})}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@asynccontextmanager
async def serve_rlruns(settings: ControllerSettings, manager: RunManager) -> AsyncIterator[None]:
    """Mirrors the RLRun objects of the settings' namespaces until the block ends."""
    config.load_incluster_config()
    async with TaskGroup() as tasks:
        loops = [
            tasks.create_task(RLRuns(manager, CustomObjectsApi(), CoreV1Api(), namespace).serve())
            for namespace in settings.rlrun_namespaces
        ]
        try:
            yield
        finally:
            for loop in loops:
                loop.cancel()
