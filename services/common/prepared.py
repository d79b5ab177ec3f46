"""Runs a program that is imported first and gets its environment later.

``python -m services.common.prepared services.controller`` imports the program, calls its function
``prepare`` if there is one, and waits for a line with a JSON object on standard input. It then runs the
program with exactly that environment, and appends its output to the file:

    {"environment": {...}, "log": "controller.log"}

Standard input stays open for the program. If it ends before the line, this process ends too.
"""

import importlib
import json
import os
import runpy
import sys
from pathlib import Path

from services.common.fork_server import set_command_line


def main() -> None:
    """Runs the module that the first argument names."""
    module = sys.argv[1]
    program = importlib.import_module(f"{module}.__main__")
    if (prepare := getattr(program, "prepare", None)) is not None:
        prepare()
    del sys.modules[f"{module}.__main__"]  # it runs once more, as the main program
    line = _read_line(sys.stdin.fileno())
    if not line:
        return
    command = json.loads(line)
    with Path(command["log"]).open("ab") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(command["environment"])
    del sys.argv[0]
    set_command_line(sys.executable, "-P", "-m", module)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _read_line(descriptor: int) -> bytes:
    """Reads a line and no byte after it; returns nothing if the input ends before."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(descriptor, 1)):
            return b""
        line += byte
    return line


if __name__ == "__main__":
    main()
