"""The fork server of tests; its forks have the imports of the modules that helpers name.

In workers of pytest-xdist it is the process that collected the tests (``tests.helpers.forked_workers``).
"""

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
modules: list[str] = []


def preload(*names: str) -> None:
    """Lets the fork server import modules, unless it runs already."""
    modules.extend(names)
    PROCESSES.set_forkserver_preload(modules)
