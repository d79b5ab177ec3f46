"""Tests of the files that store the logs of worker pods after the pods are deleted."""

import asyncio
import os
import threading

import pytest
from urllib3.exceptions import ReadTimeoutError

from services.controller.launch.launcher import WorkerExit
from services.controller.manager.logs import RunLogs
from services.extras.kubernetes import cluster
from services.extras.kubernetes.cluster import PodLogs
from services.extras.kubernetes.pod_api import Seen


class FakeCore:
    """Fake Kubernetes API that answers each log request with the next of the given texts."""

    def __init__(self, *texts):
        self._texts = list(texts)
        self.requests = []

    def read_namespaced_pod_log(self, name, namespace, *, container, **options):
        self.requests.append((name, container, options.get("since_seconds")))
        text = self._texts.pop(0)
        if isinstance(text, Exception):
            raise text

        class Answer:
            def stream(self):
                yield from (line.encode() for line in text.splitlines(keepends=True))

        return Answer()


def pod(*containers, name="run-01-rollout-0", uid="1", **state):
    statuses = [{"name": c, "state": state or {"running": {}}} for c in containers]
    body = {
        "metadata": {"name": name, "uid": uid, "labels": {"slipstream.dev/run": "run_01"}},
        "spec": {"containers": [{"name": c} for c in containers]},
        "status": {"containerStatuses": statuses},
    }
    return Seen(name=name, body=body)


async def keep(logs, *changes):
    """Watches the given pods and returns when their logs are copied."""
    queue = asyncio.Queue()
    for change in changes:
        queue.put_nowait(change)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(logs.watch(queue))
        for _ in range(len(changes) + 2):
            await asyncio.sleep(0)
        watching.cancel()
    for thread in threading.enumerate():
        if thread.name.startswith("log of"):
            await asyncio.to_thread(thread.join, 10)


async def lines(folder):
    async def is_ended(run_id):
        return True

    tail = RunLogs(folder, is_ended).tail("run_01", "", 100)
    return [(line.component, line.line) async for lines in tail for line in lines]


async def test_the_api_shows_what_pods_wrote(tmp_path):
    core = FakeCore("one\ntwo\n")
    await keep(PodLogs(core, "train", tmp_path), pod("rollout-0"), pod("rollout-0"))
    assert await lines(tmp_path) == [("rollout-0", "one"), ("rollout-0", "two")]
    assert core.requests == [("run-01-rollout-0", "rollout-0", None)]


async def test_a_container_that_waits_has_no_log(tmp_path):
    core = FakeCore()
    await keep(PodLogs(core, "train", tmp_path), pod("rollout-0", waiting={}))
    assert core.requests == []


async def test_containers_of_one_pod_and_pods_of_one_worker_have_files_of_their_own(tmp_path):
    core = FakeCore("a\n", "b\n", "c\n", "d\n")
    logs = PodLogs(core, "train", tmp_path)
    await keep(logs, pod("trainer-0", name="run-01-bundle"))
    await keep(logs, pod("rollout-0", name="run-01-bundle"))
    await keep(logs, pod("trainer-1", name="run-01-trainer-1"))
    await keep(logs, pod("trainer-1", name="run-01-trainer-1-node-1"))
    names = {name for name, _ in await lines(tmp_path)}
    assert names == {"rollout-0", "trainer-0", "trainer-1", "trainer-1-node-1"}


async def test_an_interrupted_log_continues_after_its_last_line(tmp_path):
    core = FakeCore(ReadTimeoutError(None, "", "silent"), "one\n", "two\n")
    logs = PodLogs(core, "train", tmp_path)
    await keep(logs, pod("rollout-0"))
    await keep(logs, pod("rollout-0"))
    file = tmp_path / "run_01" / "logs" / "rollout-0.log"
    os.utime(file, (file.stat().st_mtime - 60, file.stat().st_mtime - 60))
    await keep(logs, Seen(name="run-01-rollout-0", body=None), pod("rollout-0"))
    assert await lines(tmp_path) == [("rollout-0", "one"), ("rollout-0", "two")]
    first, second, third = (since for _, _, since in core.requests)
    assert (first, second) == (None, None)
    assert 60 <= third <= 70


async def test_the_nodes_message_about_a_removed_container_is_not_a_log_line(tmp_path):
    gone = 'rpc error: code = NotFound desc = an error occurred when try to find container "1f": not found'
    core = FakeCore(f"KeyError: NotFound\nlast words\n{gone}")
    await keep(PodLogs(core, "train", tmp_path), pod("rollout-0"))
    assert await lines(tmp_path) == [
        ("rollout-0", "KeyError: NotFound"),
        ("rollout-0", "last words"),
    ]


async def test_no_log_fills_the_volume(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "MAX_LOG_BYTES", 10)
    core = FakeCore("".join(f"{n}123456789\n" for n in range(3)))
    await keep(PodLogs(core, "train", tmp_path), pod("rollout-0"))
    folder = tmp_path / "run_01" / "logs"
    logs = {file.name: file.read_text() for file in folder.iterdir()}
    assert logs == {"rollout-0.log": "2123456789\n", "rollout-0.log.1": "1123456789\n"}


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("log of")]


def test_the_exit_of_a_pod_is_reported_with_its_copied_log(tmp_path):
    log = tmp_path / "run_01" / "logs" / "rollout-0.log"
    log.parent.mkdir(parents=True)
    log.write_text(
        "Traceback (most recent call last):\n  File\nValueError: no memory\nafterwards\n"
    )
    exit_ = WorkerExit(run_id="run_01", worker_id="rollout-0", code=1, last_lines="Error\nxxx")
    logs = PodLogs(FakeCore(), "train", tmp_path)
    assert "ValueError: no memory" in logs.with_copied_log(exit_).report()
    logs = PodLogs(FakeCore(), "train", tmp_path / "none")
    assert logs.with_copied_log(exit_).last_lines == "Error\nxxx"


@pytest.mark.parametrize("output", ["", "OSError: no device\n"])
async def test_lines_of_an_earlier_pod_do_not_explain_why_a_pod_ended(tmp_path, output):
    core = FakeCore("Traceback (most recent call last):\n  File\nValueError: no memory\n", output)
    logs = PodLogs(core, "train", tmp_path)
    await keep(logs, pod("rollout-0", waiting={}), pod("rollout-0"))
    gone = Seen(name="run-01-rollout-0", body=None)
    second = [pod("rollout-0", uid="2", waiting={}), pod("rollout-0", uid="2")]
    await keep(logs, gone, *(second if output else second[:1]))
    message = "pod run-01-rollout-0 could not start: ErrImagePull"
    exit_ = WorkerExit(run_id="run_01", worker_id="rollout-0", code=1, last_lines=message)
    assert logs.with_copied_log(exit_).last_lines == output + message
