"""Calls between a program and its judge, over a pair of pipes.

Values travel as data (:mod:`services.extras.code_tests.judging.values`). What cannot, a function, a class or
an object of the program's own class, stays where it is; the other side has a :class:`Remote` of it.
"""

import builtins
import json
import operator
import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from services.extras.code_tests.judging.values import Classes, Decoder, Nodes, encode

_MAX_MESSAGE_BYTES: Final = 64 << 20
_OPERATORS: Final = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_COMPARISONS: Final = ("lt", "le", "gt", "ge")
_QUESTIONS: Final = ("__str__", "__repr__", "__len__", "__next__", "__enter__", "__neg__")


class PeerEndedError(BaseException):
    """The other side ended, or did not answer in time. Not an ``Exception``, because tests catch those."""


class Remote:
    """Function, class or object of the other process.

    Only methods and operators that give the other side nothing to decide are forwarded. It never compares
    itself with a value of this side, so an object that claims to equal everything equals nothing.
    """

    __slots__ = ("_handle", "_peer")

    def __init__(self, peer: "Peer", handle: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_handle", handle)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._peer.call(self, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        return self._peer.request("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.request("set", self, name, value)

    def __iter__(self) -> Any:
        return self._peer.request("iterate", self)

    def __bool__(self) -> bool:
        return bool(self._peer.request("truth", self))

    def __getitem__(self, key: Any) -> Any:
        return self._peer.request("method", self, "__getitem__", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._peer.request("method", self, "__setitem__", key, value)

    def __delitem__(self, key: Any) -> None:
        self._peer.request("method", self, "__delitem__", key)

    def __contains__(self, item: Any) -> bool:
        return any(item == value for value in self)

    def __exit__(self, *_: object) -> None:
        self._peer.request("method", self, "__exit__", None, None, None)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and bool(
            self._peer.request("is_instance", instance, self)
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Remote):
            return False
        if self._handle == other._handle:
            return True
        return self._peer.request("operator", "eq", self, other) is True

    def __hash__(self) -> int:
        return hash(self._handle)


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._peer.request("method", self, name, *arguments)


def _forward_operator(name: str) -> Callable[[Any, Any], Any]:
    def forward(self: Any, operand: Any) -> Any:
        result = self._peer.request("operator", name, self, operand)
        # It saw the other operand, which may be the expected result.
        if isinstance(operand, Remote):
            return result
        if not isinstance(result, Remote):
            raise TypeError(f"{name} of an object of the program and a value gives no object")
        return _Opaque(self._peer, result._handle)  # noqa: SLF001

    return forward


def _forward_comparison(name: str) -> Callable[[Any, Any], Any]:
    def forward(self: Any, operand: Any) -> Any:
        if not isinstance(operand, Remote):
            return NotImplemented
        return self._peer.request("operator", name, self, operand)

    return forward


class _Opaque(Remote):
    """Object of the other process that saw a value of this one: it has no truth, length or items."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        raise TypeError("an object of the program that saw a value of the test has no length")

    def __iter__(self) -> Any:
        raise TypeError("an object of the program that saw a value of the test has no items")

    __getitem__ = __contains__ = __next__ = __iter__  # type: ignore[assignment]


for _name in _QUESTIONS:
    setattr(Remote, _name, _forward(_name))
for _name in _OPERATORS:
    setattr(Remote, f"__{_name}__", _forward_operator(_name))
for _name in _COMPARISONS:
    setattr(Remote, f"__{_name}__", _forward_comparison(_name))


class Peer:
    """This process's end of the connection.

    Args:
        reader: Descriptor of the pipe from the other side.
        writer: Descriptor of the pipe to the other side.
        names: Names of this process's module.
        module: Name of that module.
        serves_all: True to let the other side use all names, attributes and operators of this process; False
            to let it only call functions, and read public attributes of objects, that it was given.
    """

    def __init__(
        self,
        reader: int,
        writer: int,
        *,
        names: Mapping[str, Any],
        module: str,
        serves_all: bool = False,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._serves_all = serves_all
        self._names = names
        self._module = module
        self._buffer = bytearray()
        self._exported: dict[int, Any] = {}
        self._remotes: dict[int, Remote] = {}
        self._errors: dict[tuple[str, str], type[BaseException]] = {}
        self.classes = Classes(names, module)
        self.patience_s: float | None = None
        """Seconds for which further answers are awaited, all together; None for ever."""
        self.num_answers = 0
        """Requests that the other side answered."""

    def call(self, function: Remote, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Calls a function of the other side; changes that it makes to its arguments are made here, too."""
        result, values_after = self.request("call", function, arguments, keywords)
        with suppress(TypeError, ValueError):
            values = [*arguments, *keywords.values()]
            for before, after in zip(values, values_after, strict=True):
                _copy_changes(before, after)
        return result

    def request(self, action: str, *arguments: Any) -> Any:
        """Asks the other side and returns its answer.

        Raises:
            PeerEndedError: If no answer comes.
            Exception: What the other side raised.
        """
        self._send((action, *arguments))
        while True:
            kind, *details = self._receive()
            if kind == "result":
                self.num_answers += 1
                return details[0]
            if kind == "error":
                self.num_answers += 1
                raise self._error(*details)
            self._answer(kind, details)

    def serve(self) -> None:
        """Answers requests until the other side ends."""
        while True:
            try:
                kind, *details = self._receive()
            except PeerEndedError:
                return
            self._answer(kind, details)

    def _answer(self, kind: str, details: list[Any]) -> None:
        try:
            if not (self._serves_all or kind == "call" or self._is_public(kind, *details)):
                raise PermissionError(f"{kind} is not allowed")  # noqa: TRY301 -- goes to the other side
            result = _SERVED[kind](self, *details)
        except PeerEndedError:
            raise
        except BaseException as error:  # noqa: BLE001 -- the other side decides what an exception means
            self._send(("error", *_described(error)))
        else:
            self._send(("result", result))

    def _send(self, message: tuple[Any, ...]) -> None:
        content = json.dumps(encode(message, encode_other=self._export)).encode()
        content = len(content).to_bytes(8, "big") + content
        try:
            while content:
                content = content[os.write(self._writer, content) :]
        except OSError as error:
            raise PeerEndedError from error

    def _receive(self) -> tuple[Any, ...]:
        size = int.from_bytes(self._read(8), "big")
        if size > _MAX_MESSAGE_BYTES:
            raise PeerEndedError
        try:
            nodes: Nodes = json.loads(self._read(size))
            message = Decoder(nodes, decode_other=self._import, classes=self.classes).root()
        except (ValueError, RecursionError) as error:
            raise PeerEndedError from error
        if not (isinstance(message, tuple) and message and isinstance(message[0], str)):
            raise PeerEndedError
        return message

    def _read(self, count: int) -> bytes:
        while len(self._buffer) < count:
            start = time.monotonic()
            readable, _, _ = select.select([self._reader], [], [], self.patience_s)
            if self.patience_s is not None:
                self.patience_s = max(0.0, self.patience_s - (time.monotonic() - start))
            chunk = os.read(self._reader, 1 << 20) if readable else b""
            if not chunk:
                raise PeerEndedError
            self._buffer += chunk
        content = bytes(self._buffer[:count])
        del self._buffer[:count]
        return content

    def _export(self, value: Any) -> list[Any] | Mapping[str, Any]:
        if isinstance(value, Remote):
            return ["yours", value._handle]  # noqa: SLF001
        if self.classes.get(type(value).__name__) is type(value):
            return _state(value)
        if not (self._serves_all or callable(value) or type(value).__module__ == self._module):
            raise TypeError(f"an object of {type(value).__name__} cannot be passed to the program")
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["class", *_error_names(value)]
        self._exported[id(value)] = value
        return ["mine", id(value)]

    def _import(self, node: list[Any]) -> Any:
        if node[0] == "yours":
            return self._exported[node[1]]
        if node[0] == "class":
            return self._error_class(node[1])
        if node[0] != "mine":
            raise ValueError(f"unknown kind {node[0]!r}")
        handle = int(node[1])
        if handle not in self._remotes:
            self._remotes[handle] = Remote(self, handle)
        return self._remotes[handle]

    def _error(
        self, ancestors: Any, arguments: tuple[Any, ...], text: str, state: Any
    ) -> BaseException:
        error_class = self._error_class(ancestors)
        error = error_class.__new__(error_class)
        error.args = tuple(arguments)
        error.__dict__.update(state)
        error.__dict__["_program_text"] = text
        return error

    def _error_class(self, ancestors: Any) -> type[BaseException]:
        """Returns this side's class for an exception class of the other side, given its ancestors."""
        module, name = ancestors[0]
        if module == "builtins":
            builtin = getattr(builtins, name, None)
            if isinstance(builtin, type) and issubclass(builtin, BaseException):
                return builtin
        library = sys.modules.get(module) if module in sys.stdlib_module_names else None
        error_class = (
            self._names.get(name) if module == self._module else getattr(library, name, None)
        )
        if isinstance(error_class, type) and issubclass(error_class, BaseException):
            return error_class
        if (module, name) not in self._errors:
            parent = self._error_class(ancestors[1:]) if len(ancestors) > 1 else Exception
            members = {
                "__str__": lambda error: error.__dict__.get("_program_text", str(error.args)),
                "__module__": module,
            }
            self._errors[module, name] = type(name, (parent,), members)
        return self._errors[module, name]

    def _called(self, function: Any, arguments: Any, keywords: Any) -> tuple[Any, list[Any]]:
        result = function(*arguments, **keywords)
        return result, [*arguments, *keywords.values()]

    def _named(self, name: str) -> Any:
        if name not in self._names:
            raise NameError(f"name {name!r} is not defined")
        return self._names[name]

    def _is_public(self, kind: str, *details: Any) -> bool:
        return (
            kind == "attribute"
            and type(details[0]).__module__ == self._module
            and not str(details[1]).startswith("_")
        )

    def _share(self, names: list[str]) -> list[str]:
        self.classes.shared = set(names)
        self.classes.shared = {name for name in names if self.classes.get(name)}
        return sorted(self.classes.shared)

    def _public_names(self) -> list[str]:
        return [name for name in self._names if not name.startswith("_")]


def _method(_: Peer, value: Any, name: str, *arguments: Any) -> Any:
    if not hasattr(type(value), name):
        raise TypeError(f"an object of {type(value).__name__} has no {name}")
    return getattr(value, name)(*arguments)


_SERVED: Final[Mapping[str, Callable[..., Any]]] = {
    "call": Peer._called,  # noqa: SLF001
    "name": Peer._named,  # noqa: SLF001
    "names": Peer._public_names,  # noqa: SLF001
    "share": Peer._share,  # noqa: SLF001
    "attribute": lambda _, value, name: getattr(value, name),
    "set": lambda _, value, name, new: setattr(value, name, new),
    "iterate": lambda _, value: _Iterator(iter(value)),
    "truth": lambda _, value: bool(value),
    "method": _method,
    "operator": lambda _, name, left, right: getattr(operator, name)(left, right),
    "is_instance": lambda _, value, kind: isinstance(value, kind),
}


class _Iterator:
    """Iterator that is passed as an object, even one over a list."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> "_Iterator":
        return self

    def __next__(self) -> Any:
        return next(self._items)


def _copy_changes(before: Any, after: Any) -> None:
    if type(before) is not type(after) or isinstance(before, Remote):
        return
    if isinstance(before, dict | set):
        before.clear()
        before.update(after)
    elif isinstance(before, list | bytearray):
        before[:] = after
    elif hasattr(before, "__dict__"):
        before.__dict__.update(after.__dict__)


def _state(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    state = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**state, **getattr(value, "__dict__", {})}


def _error_names(kind: type) -> list[Any]:
    return [
        [[base.__module__, base.__qualname__] for base in kind.__mro__ if base is not object],
    ]


def _described(error: BaseException) -> tuple[Any, ...]:
    text = ""
    with suppress(Exception):
        text = str(error)
    (ancestors,) = _error_names(type(error))
    return ancestors, tuple(error.args), text, dict(error.__dict__)
