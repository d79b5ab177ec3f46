"""Tests of forks that import a program before they receive its environment."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems start new processes")

_PROGRAM = """
import os, stat, sys
if __name__ == "__main__":
    print(*sys.argv[1:], os.environ.get("NAME"), os.environ.get("PYTHONPATH"), sys.stdin.read())
    pipes = [name for name in range(3, 64) if os.path.exists(f"/proc/self/fd/{name}")]
    print(oct(os.umask(0)), os.getsid(0) == os.getpid(), {"", os.getcwd()} & {*sys.path}, pipes)
    print(open("/proc/self/cmdline").read().replace("\\0", " ").strip())
    sys.exit(7)
"""
_NO_CLOSE_RANGE = """
import os

def closerange(low, high):
    for number in range(low, high):
        try:
            os.close(number)
        except OSError:
            pass

sysconf, os.closerange = os.sysconf, closerange
os.sysconf = lambda name: 2 ** 30 if name == "SC_OPEN_MAX" else sysconf(name)
"""
"""A Python that was compiled for an old system, on one whose limit of open files is as containerd sets it."""
_STARTER = """
import asyncio, os, sys
from pathlib import Path
from services.cli.prepared import PreparedProcess

async def run(process, log):
    process.run({"NAME": "new"}, log)
    os.write(process._input, b"rest")
    os.close(process._input)
    print(await process.wait(), process.returncode)

first, second = (PreparedProcess("program", umask=0o077) for _ in range(2))
asyncio.run(run(first, Path(sys.argv[1])))
second.kill()
print(second.returncode)
third = PreparedProcess("program", umask=0o077, before=lambda: os._exit(5))
while third.returncode is None:
    pass
try:
    asyncio.run(run(third, Path(sys.argv[1])))
except OSError:
    print("ended")
"""


@pytest.mark.parametrize("python", ["", _NO_CLOSE_RANGE], ids=["", "without close_range"])
def test_it_runs_as_a_program_of_its_own_and_keeps_the_rest_of_its_input(
    tmp_path: Path, python: str
) -> None:
    log, program = tmp_path / "log", tmp_path / "packages" / "program"
    program.mkdir(parents=True)
    (program / "__init__.py").touch()
    (program / "__main__.py").write_text(_PROGRAM, encoding="utf-8")
    path = ":".join([str(program.parent), *filter(None, sys.path)])
    # The arguments leave room for the new command line.
    starter = subprocess.run(
        [sys.executable, "-c", python + _STARTER, str(log)],
        cwd=tmp_path,
        env={"PYTHONPATH": path, "NAME": "old"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert starter.stdout.split() == ["7", "7", "-9", "ended"], starter.stderr
    command = f"{sys.executable} -P -m program"
    assert log.read_text(encoding="utf-8").splitlines() == [
        "new None rest",
        "0o77 True set() []",
        command,
    ]


def test_the_command_registers_no_metrics_that_its_services_would_export() -> None:
    program = "import sys, services.cli.commands.local; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    assert [name for name in modules if name.startswith("services.") and "metrics" in name] == []
