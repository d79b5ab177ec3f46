"""The fork server imports modules once, and forks are unaffected by them."""

import json
import os
import subprocess
import sys

from services.controller.launch.fork_client import PRELOADED
from tests.helpers.cli import command, environment, slipstream

LOOK = f"""
import json, os, sys
from services.common.fork_server import serve
serve({PRELOADED!r})
imported = set(sys.modules)
from prometheus_client import REGISTRY
metrics = [name for names in REGISTRY._collector_to_names.values() for name in names]
threads = len(os.listdir("/proc/self/task"))
import services.rollout.worker, services.trainer.__main__
late = {{name.partition(".")[0] for name in set(sys.modules) - imported}}
print(json.dumps({{"threads": threads, "metrics": metrics, "late": sorted(late)}}), file=sys.stderr)
"""


def test_what_is_imported_beforehand_can_be_forked_and_is_all_that_takes_long():
    process = subprocess.run(
        [sys.executable, "-c", LOOK],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(process.stderr.splitlines()[-1])
    assert "cannot import" not in process.stderr
    assert report["threads"] == 1
    assert not [
        name
        for name in report["metrics"]
        if name.startswith(("slipstream_rollout", "slipstream_t"))
    ]
    heavy = {"torch", "transformers", "sympy", "grpc", "pydantic", "zmq", "httpx", "uvicorn"}
    assert not heavy & set(report["late"])


def test_a_forked_command_ends_like_one_with_its_own_imports(tmp_path):
    arguments = ("validate", "missing.yaml")
    forked = slipstream(*arguments, folder=tmp_path)
    process = subprocess.run(
        command(*arguments), capture_output=True, text=True, cwd=tmp_path, env=environment()
    )
    assert (forked.code, forked.out, forked.err) == (
        process.returncode,
        process.stdout,
        process.stderr,
    )
    assert forked.code != 0
