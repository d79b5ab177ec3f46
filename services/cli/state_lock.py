"""One command at a time has a state directory: two would take the runs from each other."""

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FILE = "command.lock"


class StateInUseError(RuntimeError):
    """Another command has the state directory; the message says which, and what to do."""


@contextmanager
def sole_use(state_directory: Path) -> Iterator[None]:
    """Have a state directory until the block ends or this process does.

    Raises:
        StateInUseError: If another process has it.
    """
    state_directory.mkdir(parents=True, exist_ok=True)
    with (state_directory / _FILE).open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateInUseError(
                f"{state_directory} is in use by {_owner(state_directory / _FILE)}; end that first (Ctrl-C "
                "pauses its runs), take another --state-directory, or where that is 'slipstream up', give it "
                "the run with 'slipstream submit'"
            ) from None
        lock.truncate(0)
        lock.write(json.dumps({"pid": os.getpid(), "command": sys.argv[1:]}))
        lock.flush()
        yield


def _owner(file: Path) -> str:
    try:
        owner = json.loads(file.read_text(encoding="utf-8"))
        return f"process {owner['pid']} (slipstream {' '.join(owner['command'])})"
    except (OSError, ValueError, KeyError, TypeError):  # it is only writing it
        return "another process"
