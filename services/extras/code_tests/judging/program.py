"""The process of a program under test: runs it, then answers the judge's calls."""

import sys
from types import ModuleType
from typing import Any

from services.extras.code_tests.judging.peer import Peer
from services.extras.code_tests.judging.source import MODULE


def serve(sources: list[str], *, reader: int, writer: int) -> None:
    """Runs a program and answers calls until the judge ends.

    Args:
        sources: Code that the prompt has, which may fail, and the program.

    Raises:
        BaseException: What the program raises.
    """
    sys.set_int_max_str_digits(0)
    module: Any = ModuleType(MODULE)
    sys.modules[MODULE] = module
    names = module.__dict__
    *modules, program = sources
    for source in modules:
        try:
            exec(compile(source, "prompt.py", "exec"), names)  # noqa: S102 -- the purpose of this process
        except Exception:  # noqa: BLE001, S112 -- the program may do without it
            continue
    exec(compile(program, "program.py", "exec"), names)  # noqa: S102
    Peer(reader, writer, names=names, module=MODULE, serves_all=True).serve()
