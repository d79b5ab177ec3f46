"""Collects the tests that a pytest is to run, when this module is imported; workers are forks that run them.

If the collection ends with an exception, the workers collect themselves and report it.
"""

import json
import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import _prepareconfig

from tests.helpers import forks
from tests.helpers.forked_workers import COLLECTION

# Handlers of logs that imports make keep the real standard error, so pytest must not replace it.
_UNCAPTURED = "--capture=no"


class _Collection:
    """A pytest of a worker before it runs tests, with the modules that could not be collected."""

    def __init__(self, arguments: list[str], num_workers: int, sys_path: list[str]) -> None:
        sys.path[:] = sys_path
        os.environ["PYTEST_XDIST_WORKER_COUNT"] = str(num_workers)
        self._failures: list[pytest.CollectReport] = []
        config = self._config = _prepareconfig([*arguments, _UNCAPTURED], None)
        # Imported here, because pytest rewrites plugins when it loads them.
        from xdist import remote  # type: ignore[import-untyped]

        self._remote = remote
        self._capture = config._parser.parse_known_args(arguments).capture
        remote.setup_config(config, None)
        # Plugins recognize a worker by this attribute when they are configured.
        config.workerinput = {"workerid": "", "testrunuid": ""}  # type: ignore[attr-defined]
        config.workeroutput = {}  # type: ignore[attr-defined]
        config.pluginmanager.register(self)
        config._do_configure()
        self._session = pytest.Session.from_config(config)
        self._session.exitstatus = pytest.ExitCode.OK
        config.hook.pytest_sessionstart(session=self._session)
        config.hook.pytest_collection(session=self._session)
        config.pluginmanager.unregister(self)
        # Forks of other helpers come from this process too.
        for name in forks.modules:
            with suppress(ImportError):
                import_module(name)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._failures.append(report)

    def run(self, channel: Any) -> None:
        """Does in a fork what ``xdist.remote`` does in a worker, but for the collection."""
        workerinput, _, options, _ = channel.receive()
        config, session, remote = self._config, self._session, self._remote
        os.environ["PYTEST_XDIST_TESTRUNUID"] = workerinput["testrunuid"]
        os.environ["PYTEST_XDIST_WORKER"] = workerinput["workerid"]
        config.workerinput.update(workerinput)  # type: ignore[attr-defined]
        config._parser.prog = Path(workerinput["mainargv"][0]).name
        config.option.basetemp = options["basetemp"]
        config._tmp_path_factory._given_basetemp = Path(options["basetemp"])  # type: ignore[attr-defined]
        config.option.capture = self._capture
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture._method = self._capture
        capture.start_global_capturing()
        worker = remote.WorkerInteractor(config, channel)
        remote.interactor = worker  # which its pytest_internalerror uses
        worker.pytest_sessionstart(session)
        worker.pytest_collection()
        for report in self._failures:
            worker.pytest_collectreport(report)
        worker.pytest_collection_modifyitems(config, session.items)
        worker.pytest_collection_finish(session)
        try:
            config.hook.pytest_runtestloop(session=session)
            if session.testsfailed:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        except KeyboardInterrupt:
            session.exitstatus = pytest.ExitCode.INTERRUPTED
        except BaseException:  # noqa: BLE001 -- is reported
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
            config.notify_exception(pytest.ExceptionInfo.from_current(), config.option)
        finally:
            os.chdir(session.startpath)
            config.hook.pytest_sessionfinish(session=session, exitstatus=session.exitstatus)
            config._ensure_unconfigure()


def _collect() -> _Collection | None:
    modules = set(sys.modules)
    nothing, streams = os.open(os.devnull, os.O_WRONLY), (1, 2)
    copies = [os.dup(stream) for stream in streams]
    for stream in streams:
        os.dup2(nothing, stream)
    try:
        return _Collection(**json.loads(os.environ[COLLECTION]))
    except (Exception, pytest.exit.Exception):  # noqa: BLE001 -- the workers report it
        for name in set(sys.modules) - modules:
            if name.startswith("tests."):
                del sys.modules[name]
        return None
    finally:
        sys.stdout.flush()
        for stream, copy in zip(streams, copies, strict=True):
            os.dup2(copy, stream)
        for descriptor in (nothing, *copies):
            os.close(descriptor)


collection = _collect()
