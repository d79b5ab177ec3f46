"""Loads user code by reference: ``module:function`` or ``file.py:function``."""

import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

logger = logging.getLogger(__name__)
USER_CODE_BEGINS, USER_CODE_ENDED = "user code begins", "user code has ended"
"""Messages of log records, whose field ``reference`` names the code."""
_LOADING = threading.RLock()
"""Held while a user's file is executed: another thread must not see a partly initialized module."""
_MAX_ERROR_CHARACTERS = 2000
_SERVICES = str(Path(__file__).parents[1]) + os.sep
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


class _NotFoundError(ValueError):
    """A reference names no module."""


def real_path(path: str | os.PathLike[str]) -> str:
    """Returns an absolute path with links resolved, as far as this process can.

    Unlike ``Path.resolve``, it accepts circular links, names that are too long, and links that this
    process may not read.

    Raises:
        ValueError: If the path has a zero byte.
    """
    try:
        return os.path.realpath(path)
    except OSError:
        return os.path.abspath(path)  # noqa: PTH100


@dataclass(frozen=True, slots=True)
class Reference:
    """Location and name of a callable, as the gate judges it and the loader imports it."""

    location: str
    """Path of a Python file, as written, or the dotted name of a module."""
    name: str
    """Attribute of the module."""

    @property
    def is_file(self) -> bool:
        """True for a file, False for a module."""
        return self.location.endswith(".py")

    @property
    def file(self) -> Path | None:
        """Path of the file with links resolved; None for a module.

        Raises:
            ValueError: If its links form a circle.
        """
        if not self.is_file:
            return None
        try:
            return Path(self.location).resolve()
        except (OSError, RuntimeError) as error:
            raise ValueError(f"path {self.location!r} cannot be resolved: {error}") from error

    def __str__(self) -> str:
        return f"{self.location}:{self.name}"


def parse_reference(text: str) -> Reference:
    """Parses ``package.module:name`` or ``path/to/file.py:name``.

    All other forms are rejected, so that gate and loader always interpret a text the same way.

    Raises:
        ValueError: If the text has another form.
    """
    location, _, name = text.rpartition(":")
    is_file = location.endswith(".py") and location.isprintable() and "://" not in location
    if name.isidentifier() and (is_file or all(map(str.isidentifier, location.split(".")))):
        return Reference(location, name)
    raise ValueError(
        f"{text!r} is not an import path; expected 'module:function' or 'file.py:function'"
    )


def is_reference(text: str) -> bool:
    """Returns True if a text has the form of a reference."""
    try:
        parse_reference(text)
    except ValueError:
        return False
    return True


def load_callable(reference: str) -> Callable[..., Any]:
    """Imports the callable that a specification names.

    ImportErrors of modules pass through unchanged.

    Args:
        reference: ``package.module:name`` or ``path/to/file.py:name``.

    Raises:
        ValueError: If the reference has another form, names no callable, or its module cannot be
            executed; the message has the reference, the finding, and the fix.
    """
    parsed = parse_reference(reference)
    file, name = parsed.file, parsed.name
    is_loaded = parsed.location in sys.modules or parsed.location.startswith("services.")
    try:
        with nullcontext() if is_loaded else announced(reference):
            module = _load(parsed) if file is None else _load_file(file, reference)
    except _NotFoundError:
        raise
    except (Exception, SystemExit) as error:  # of the module
        if file is None and isinstance(error, ImportError):
            raise
        fix = "correct the module"
        if file is not None and isinstance(error, ModuleNotFoundError):
            fix = _where_to_find(error.name or "", file)
        raise ValueError(
            f"{reference!r}: importing {parsed.location} raised {describe_error(error)}; {fix}"
        ) from error
    target = getattr(module, name, None)
    if target is None:
        public = sorted(key for key in vars(module) if not key.startswith("_"))
        raise ValueError(
            f"{reference!r}: {parsed.location} has no {name!r}; it defines {', '.join(public) or 'nothing'}"
        )
    if not callable(target):
        raise ValueError(  # noqa: TRY004 -- the reference is wrong, not an argument's type
            f"{reference!r}: expected a function or a class, got {name} of type {type(target).__name__}"
        )
    return target  # type: ignore[no-any-return]


def _where_to_find(module: str, file: Path) -> str:
    """Returns the fix for a module that a user's file imports and Python does not find."""
    top = file.parent / module.partition(".")[0]
    if top.is_dir() or top.with_suffix(".py").is_file():
        return (
            f"it is next to {file.name}, but their folder is not on the import path: set "
            f"PYTHONPATH={file.parent}"
        )
    return "install it"


def bind_callable(
    reference: str, arguments: Mapping[str, Any], *, key: str
) -> Callable[[Any], Any]:
    """Imports a function of one positional argument and binds its keyword arguments.

    Args:
        reference: A reference as for :func:`load_callable`.
        key: Key of the specification, for messages.

    Raises:
        ValueError: If there is no such function, or it does not accept the arguments.
    """
    try:
        function = load_callable(reference)
        inspect.signature(function).bind(None, **arguments)
    except ImportError as error:
        raise ValueError(f"{key}: {reference!r} cannot be imported: {error}") from error
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    except TypeError as error:
        raise ValueError(
            f"{key}: {reference!r} does not accept one argument and the keyword arguments "
            f"{sorted(arguments)}: {error}; change the function, or {key}_arguments"
        ) from error
    return partial(function, **arguments)


@contextmanager
def announced(reference: str) -> Iterator[None]:
    """Logs that user code runs in the block, so that the log of a process that it ends names it."""
    logger.info(USER_CODE_BEGINS, extra={"reference": reference})
    try:
        yield
    finally:
        logger.info(USER_CODE_ENDED, extra={"reference": reference})


def call_problems(
    reference: str,
    positional: str = "",
    arguments: Mapping[str, Any] = MappingProxyType({}),
    *,
    key: str,
) -> Iterator[str]:
    """Yields problems that prevent a function from being imported or called.

    Args:
        positional: Positional arguments by meaning, such as ``row, history``; empty checks the import only.
        key: Key of the specification, for messages.
    """
    try:
        function = load_callable(reference)
    except (ValueError, ImportError) as error:
        yield f"{key}: {error}"
        return
    if not positional:
        return
    try:
        inspect.signature(function).bind(*positional.split(", "), **arguments)
    except TypeError as error:
        form = ", ".join([positional, *(f"{name}=..." for name in sorted(arguments))])
        yield (
            f"{key}: {reference!r} cannot be called with ({form}): {error}; change the function, or its "
            "arguments in the specification"
        )
    except ValueError:
        return  # a function in C has no signature


def source_digest(reference: str) -> str:
    """Returns the SHA-256 of the source file that defines a callable, in hex.

    Raises:
        ValueError: As :func:`load_callable`, or if the callable has no source file.
    """
    module = sys.modules.get(load_callable(reference).__module__)
    file = getattr(module, "__file__", None)
    if file is None:
        raise ValueError(
            f"{reference!r} has no source file; use a function that is defined in Python"
        )
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def describe_error(error: BaseException) -> str:
    """Formats an exception of user code for its caller: class, beginning of the text, file and line."""
    try:
        text = str(error)
    except Exception as format_error:  # noqa: BLE001 -- user code formats it
        text = f"its text cannot be formatted ({type(format_error).__name__})"
    name = type(error).__name__
    return (f"{name}: {text}" if text else name)[:_MAX_ERROR_CHARACTERS] + _place_of(error)


def _place_of(error: BaseException) -> str:
    """Returns the line of the user's file at which an exception left it; empty if none was called.

    Libraries that the file calls are not named, because their lines do not show the mistake.
    """
    lines: dict[str, int] = {}
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        is_standard = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
        if not (is_standard or file.startswith((_SERVICES, "<"))):
            lines[file] = line
    file = next(iter(lines), "")
    return f" ({Path(file).name}, line {lines[file]})" if file else ""


def _load(reference: Reference) -> ModuleType:
    location = reference.location
    try:
        return importlib.import_module(location)
    except ModuleNotFoundError as error:
        parents = location.split(".")
        if error.name not in [".".join(parents[: i + 1]) for i in range(len(parents))]:
            raise
        raise _NotFoundError(
            f"{str(reference)!r}: module {error.name!r} not found; install it, or give the path of a "
            "Python file as 'file.py:function'"
        ) from error


def _load_file(path: Path, reference: str) -> ModuleType:
    if path.suffix != ".py" or not path.is_file():
        raise _NotFoundError(f"{reference!r}: Python file {path} not found; check the path")
    with _LOADING:
        return _loaded_once(path)


def _loaded_once(path: Path) -> ModuleType:
    """Loads a file as one module, even if several references name it, so that its state exists once."""
    module_name = (
        f"slipstream_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    )
    if module_name in sys.modules:
        return sys.modules[module_name]
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
