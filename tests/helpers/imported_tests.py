"""Imports the modules of the tests that a pytest is to run, when this module is imported.

Modules that fail are left to the workers, which report the failure.
"""

import json
import os
import sys

import pytest

from tests.helpers.forked_workers import ARGUMENTS

# Handlers of logs that imports make keep the real standard error, so pytest must not replace it.
_COLLECT = ("-n0", "--collect-only", "-qq", "--capture=no", "-p", "no:cacheprovider")


def _collect(arguments: list[str]) -> None:
    modules = set(sys.modules)
    nothing, streams = os.open(os.devnull, os.O_WRONLY), (1, 2)
    copies = [os.dup(stream) for stream in streams]
    for stream in streams:
        os.dup2(nothing, stream)
    status = pytest.main([*arguments, *_COLLECT])
    sys.stdout.flush()
    for stream, copy in zip(streams, copies, strict=True):
        os.dup2(copy, stream)
    for descriptor in (nothing, *copies):
        os.close(descriptor)
    if status != pytest.ExitCode.OK:
        for name in set(sys.modules) - modules:
            if name.startswith("tests."):
                del sys.modules[name]


_collect(json.loads(os.environ[ARGUMENTS]))
