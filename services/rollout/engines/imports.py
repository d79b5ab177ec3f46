"""Imports engines, which takes tens of seconds, in this process and in the fork server of the engine's."""

from importlib import import_module
from importlib.util import find_spec
from multiprocessing import forkserver, set_forkserver_preload

from services.common.runspec.engines import EngineKind
from services.common.settings import set_defaults


def begin_imports(kind: EngineKind, *, is_cpu: bool, is_invariant: bool = False) -> None:
    """Imports the engine in this process, and for a GPU at the same time in the fork server.

    Does nothing if the engine is not installed, which ``services.rollout.engines.build`` reports.
    """
    if not kind.is_installed:
        return
    if is_cpu:
        prepare_environment(kind, is_cpu=True, is_invariant=is_invariant)
    else:
        begin_process_imports(kind, is_invariant=is_invariant)
    import_module(kind.adapter.partition(":")[0])


def begin_process_imports(kind: EngineKind, *, is_invariant: bool = False) -> None:
    """Starts the fork server of the engine's process on a GPU, and the import of the engine there.

    Does nothing if the fork server runs already, or the engine is not installed.
    """
    if not kind.is_installed:
        return
    prepare_environment(kind, is_cpu=False, is_invariant=is_invariant)
    if kind.process_modules:
        set_forkserver_preload([*kind.process_modules])
        forkserver.ensure_running()


def prepare_environment(kind: EngineKind, *, is_cpu: bool, is_invariant: bool = False) -> None:
    """Sets environment variables that the engine reads at import, unless they are set already."""
    if is_invariant:
        set_defaults(kind.invariant_environment or {})
    set_defaults(kind.environment)
    for package, environment in kind.environment_without.items():
        if find_spec(package) is None:
            set_defaults(environment)
    if is_cpu:
        set_defaults(kind.cpu_environment)
