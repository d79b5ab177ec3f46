"""Workers that the fork server starts."""

import asyncio
import os
import signal

import psutil
import pytest

from services.controller.launch import fork_client
from services.controller.launch.fork_client import open_fork_server
from tests.helpers.processes import below

WAITING = "import signal; print('up', flush=True); signal.pause()"


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """Returns environment variables with which Python finds the test's programs."""
    return {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}"}


@pytest.fixture
def log(tmp_path):
    return tmp_path / "worker.log"


async def until(condition) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def servers() -> list[psutil.Process]:
    return [
        process
        for process, arguments in below(psutil.Process(), recursive=False)
        if "services.common.fork_server" in arguments
    ]


async def test_statuses_are_those_of_the_processes(environment, tmp_path, log):
    (tmp_path / "leaving.py").write_text("import os; raise SystemExit(int(os.environ['CODE']))")
    (tmp_path / "waiting.py").write_text(WAITING)
    async with open_fork_server(environment, ()) as forks:
        started = [
            await forks.start("leaving", {"CODE": code}, tmp_path / f"{code}.log") for code in "042"
        ]
        waiting = await forks.start("waiting", {}, log)
        assert [await process.wait() for process in started] == [0, 4, 2]
        waiting.send_signal(signal.SIGTERM)
        # Several concurrent calls of wait() on one process get its status.
        assert await asyncio.gather(waiting.wait(), waiting.wait()) == [-signal.SIGTERM] * 2
        assert await waiting.wait() == -signal.SIGTERM
        waiting.send_signal(signal.SIGTERM)
        assert len(servers()) == 1


async def test_imports_in_progress_are_those_of_the_first_server(environment, log):
    fork_client.begin_imports(environment, ())
    (begun,) = servers()
    async with open_fork_server(environment, ()) as forks:
        assert servers() == [begun]
        assert await (await forks.start("this", {}, log)).wait() == 0
        begun.kill()
        begun.wait()
        assert await (await forks.start("this", {}, log)).wait() == 0


async def test_workers_live_on_without_their_server_and_the_next_one_has_another(
    environment, tmp_path, log
):
    (tmp_path / "waiting.py").write_text(WAITING)
    async with open_fork_server(environment, ()) as forks:
        first = await forks.start("waiting", {}, log)
        (server,) = servers()
        server.kill()
        await until(lambda: not servers())
        second = await forks.start("waiting", {}, log)
        assert servers() not in ([], [server])
        assert psutil.pid_exists(first.pid)
        for process in (first, second):
            process.send_signal(signal.SIGKILL)
        assert await first.wait() is None
        assert await second.wait() == -signal.SIGKILL


async def test_workers_live_on_when_the_launcher_ends(environment, tmp_path, log):
    (tmp_path / "waiting.py").write_text(WAITING)
    async with open_fork_server(environment, ()) as forks:
        worker = await forks.start("waiting", {}, log)
    assert servers() == []
    assert psutil.pid_exists(worker.pid)
    worker.send_signal(signal.SIGKILL)
    assert await worker.wait() is None


async def test_a_server_that_does_not_answer_is_given_up(environment, tmp_path, log, caplog):
    (tmp_path / "endless.py").write_text(WAITING)
    async with open_fork_server(environment, ["endless"], start_timeout_s=0.1) as forks:
        assert await forks.start("waiting", {}, log) is None
        await until(lambda: not servers())
        assert await forks.start("waiting", {}, log) is None
        assert servers() == []
    assert "no answer within" in caplog.records[0].why
    assert len(caplog.records) == 1
    assert not log.exists()


async def test_a_server_that_cannot_start_is_given_up(environment, tmp_path, log, caplog):
    (tmp_path / "failing.py").write_text("raise RuntimeError")
    async with open_fork_server(environment, ["failing"]) as forks:
        assert await forks.start("waiting", {}, log) is None
        assert await forks.start("waiting", {}, log) is None
    assert [record.why for record in caplog.records] == ["the fork server ended"]


async def test_a_missing_program_is_reported_without_a_server(environment, log, monkeypatch):
    monkeypatch.setattr(fork_client, "module_command", lambda *_: ["/nowhere/python"])
    async with open_fork_server(environment, ()) as forks:
        assert await forks.start("waiting", {}, log) is None


async def test_what_the_server_cannot_start_others_start(environment, tmp_path, log, caplog):
    (tmp_path / "leaving.py").write_text("")
    async with open_fork_server(environment, ()) as forks:
        assert await forks.start("leaving", {}, tmp_path / "no" / "log") is None
        process = await forks.start("leaving", {}, log)
        assert await process.wait() == 0
    assert "No such file" in caplog.records[0].why


async def test_a_start_that_is_called_off_leaves_no_worker(environment, tmp_path, log):
    (tmp_path / "waiting.py").write_text(WAITING)
    go = tmp_path / "go"
    (tmp_path / "slow.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"
    )
    async with open_fork_server(environment, ["slow"]) as forks:
        called_off = asyncio.ensure_future(forks.start("waiting", {}, log))
        await asyncio.sleep(0)
        starting = asyncio.ensure_future(forks.start("waiting", {}, log))
        await asyncio.sleep(0.05)
        called_off.cancel()
        await asyncio.wait([called_off])
        go.touch()
        worker = await starting
        (server,) = servers()
        await until(lambda: [child.pid for child in server.children()] == [worker.pid])
        worker.send_signal(signal.SIGKILL)
        assert await worker.wait() == -signal.SIGKILL
