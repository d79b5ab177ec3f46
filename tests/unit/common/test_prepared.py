"""Tests of programs that are imported before they receive their environment."""

import json
import subprocess
import sys
from pathlib import Path

_SOURCE = """
import os, sys
print(__name__, *sys.argv[1:], os.environ.get("NAME"), os.environ.get("PYTHONPATH"), sys.stdin.read())
"""


def _start(folder: Path) -> subprocess.Popen[bytes]:
    program = folder / "program"
    program.mkdir()
    (program / "__init__.py").touch()
    (program / "__main__.py").write_text(
        f"import sys\ndef prepare(): sys.argv.append('prepared')\n"
        f"if __name__ == '__main__':\n    exec({_SOURCE!r})\n",
        encoding="utf-8",
    )
    return subprocess.Popen(
        [sys.executable, "-m", "services.common.prepared", "program"],
        env={"PYTHONPATH": str(folder), "NAME": "old"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def test_it_runs_with_the_given_environment_alone_and_keeps_the_rest_of_its_input(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    command = {"environment": {"NAME": "new"}, "log": str(log)}
    output, _ = _start(tmp_path).communicate(json.dumps(command).encode() + b"\nrest", timeout=30)
    assert output == b""
    assert log.read_text(encoding="utf-8").split() == [
        "__main__",
        "prepared",
        "new",
        "None",
        "rest",
    ]


def test_it_ends_with_its_input(tmp_path: Path) -> None:
    process = _start(tmp_path)
    assert process.communicate(timeout=30) == (b"", None)
    assert process.returncode == 0
