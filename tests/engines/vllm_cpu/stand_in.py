"""Stand-ins for packages that engines import but do not use with torch's attention and sampler on a CPU.

The registry has only CUDA builds of these packages. Every name can be imported; calling one raises an error.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class Missing:
    """Stand-in for any attribute of a package."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = self.__dict__["__name__"] = name

    def __getattr__(self, key: str) -> "Missing":
        return _attribute(self._name, key)

    def __call__(self, *_: object, **__: object) -> Any:
        raise NotImplementedError(f"{self._name} is a stand-in and cannot be called")

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Missing) and other._name == self._name


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes every module of a package importable."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.startswith(self._prefix):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = []
        module.__dict__["__getattr__"] = attributes(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing."""


def stand_in(package: str) -> Callable[[str], Missing]:
    """Makes a package's modules importable; returns its ``__getattr__``."""
    sys.meta_path.append(_Finder(package))
    return attributes(package)


def attributes(name: str) -> Callable[[str], Missing]:
    """Returns the ``__getattr__`` of a module."""
    return lambda key: _attribute(name, key)


def _attribute(name: str, key: str) -> Missing:
    if key.startswith("__"):
        raise AttributeError(key)
    return Missing(f"{name}.{key}")
