"""Encodes values of Python as data, so that two processes that do not trust each other can exchange them.

The receiver builds values of the types listed here and nothing else: no class of the sender runs in its
process. Lists, dictionaries and objects that occur twice or contain themselves keep that structure.
"""

import datetime
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

Nodes = list[list[Any]]
"""Encoded values; a value refers to another one by its index. The first one is the root."""

_SEQUENCES: Final[dict[type, str]] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    deque: "deque",
}
_WRITTEN: Final[dict[type, Callable[[Any], list[Any]]]] = {
    bytes: lambda value: [value.hex()],
    bytearray: lambda value: [value.hex()],
    complex: lambda value: [value.real, value.imag],
    range: lambda value: [value.start, value.stop, value.step],
    Decimal: lambda value: [str(value)],
    Fraction: lambda value: [value.numerator, value.denominator],
    datetime.datetime: lambda value: [value.isoformat()],
    datetime.date: lambda value: [value.isoformat()],
    datetime.time: lambda value: [value.isoformat()],
    datetime.timedelta: lambda value: [value.days, value.seconds, value.microseconds],
}
_READ: Final[dict[str, Callable[..., Any]]] = {
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": complex,
    "range": range,
    "Decimal": Decimal,
    "Fraction": Fraction,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": datetime.timedelta,
}
_BASES: Final = (bool, int, float, str, *_SEQUENCES, *_WRITTEN)


def encode(root: object, *, encode_other: Callable[[Any], list[Any] | Mapping[str, Any]]) -> Nodes:
    """Encodes a value.

    Args:
        encode_other: Encodes a value of another type: as a node, or as the attributes of an object
            whose class both sides have.
    """
    nodes: Nodes = []
    indexes: dict[int, int] = {}
    pending: list[tuple[int, Any]] = []
    # Keeps converted values alive, because their addresses identify them.
    alive: list[Any] = []

    def place_of(value: Any) -> int:
        if value is None or type(value) in (bool, int, float, str):
            nodes.append(["value", value])
            return len(nodes) - 1
        if id(value) not in indexes:
            nodes.append([])
            indexes[id(value)] = len(nodes) - 1
            pending.append((len(nodes) - 1, value))
            alive.append(value)
        return indexes[id(value)]

    place_of(root)
    while pending:
        index, value = pending.pop()
        nodes[index] = _node(value, place_of, encode_other)
    return nodes


def _node(
    value: Any, place_of: Callable[[Any], int], encode_other: Callable[[Any], Any]
) -> list[Any]:
    kind = next((base for base in _BASES if isinstance(value, base)), None)
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], [place_of(item) for item in value]]
    if kind in (bool, int, float, str):
        return ["value", kind(value)]
    if kind is not None:
        return [kind.__name__, *_WRITTEN[kind](value)]
    if isinstance(value, dict):
        name = "counter" if isinstance(value, Counter) else "dict"
        return [name, [[place_of(key), place_of(item)] for key, item in value.items()]]
    return _other_node(value, place_of, encode_other)


def _other_node(
    value: Any, place_of: Callable[[Any], int], encode_other: Callable[[Any], Any]
) -> list[Any]:
    if array := _array(value):
        return [array[0], place_of(array[1]), array[2]]
    node = encode_other(value)
    if isinstance(node, list):
        return node
    state = [[name, place_of(item)] for name, item in node.items()]
    return ["object", type(value).__name__, state]


def _array(value: Any) -> list[Any] | None:
    """Returns the node of an array or a scalar of numpy."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        kind = "array" if isinstance(value, numpy.ndarray) else "scalar"
        if value.dtype.kind in "biufU":
            return [kind, value.tolist(), value.dtype.str]
    return None


class Classes:
    """Classes whose objects both sides build from their attributes.

    Args:
        names: Names of this side's module, which may change.
        module: Name of that module, so that imported classes do not count.
    """

    def __init__(self, names: Mapping[str, Any], module: str) -> None:
        self._names = names
        self._module = module
        self.shared: set[str] = set()
        """Names of classes that both sides have."""

    def get(self, name: str) -> type | None:
        """Returns the class of a name; None if it is not shared."""
        value = self._names.get(name) if name in self.shared else None
        if not isinstance(value, type) or value.__module__ != self._module:
            return None
        return None if issubclass(value, BaseException) else value


class Decoder:
    """Builds the values that nodes describe.

    Args:
        other: Returns the value of a node of another kind.
    """

    def __init__(
        self, nodes: Nodes, *, decode_other: Callable[[list[Any]], Any], classes: Classes
    ) -> None:
        self._nodes = nodes
        self._other = decode_other
        self._classes = classes
        self._built: dict[int, Any] = {}
        self._unfilled: list[tuple[Any, list[Any]]] = []

    def root(self) -> Any:
        """Returns the value of the first node.

        Raises:
            ValueError: If the nodes describe no value.
        """
        try:
            root = self._value(0)
            while self._unfilled:
                self._fill(*self._unfilled.pop())
        except (AttributeError, IndexError, KeyError, TypeError, ArithmeticError) as error:
            raise ValueError(f"the encoded value is malformed: {error!r}") from error
        return root

    def _value(self, index: int) -> Any:
        node = self._nodes[index]
        if node[0] == "value":
            return node[1]
        if index not in self._built:
            self._built[index] = self._new(node)
        return self._built[index]

    def _new(self, node: list[Any]) -> Any:
        kind, *details = node
        empty = {"list": list, "set": set, "deque": deque, "dict": dict, "counter": Counter}
        value: Any
        if kind in empty:
            value = empty[kind]()
            self._unfilled.append((value, node))
        elif kind in ("tuple", "frozenset"):
            items = [self._value(item) for item in details[0]]
            value = tuple(items) if kind == "tuple" else frozenset(items)
        elif kind == "object":
            value_class: Any = self._classes.get(details[0])
            value = value_class.__new__(value_class)
            self._unfilled.append((value, node))
        elif kind in ("array", "scalar"):
            value = self._numpy(kind, *details)
        elif kind in _READ:
            value = _READ[kind](*details)
        else:
            value = self._other(node)
        return value

    def _numpy(self, kind: str, index: int, dtype: str) -> Any:
        import numpy  # most programs do not use it

        array = numpy.array(self._plain(index), dtype=numpy.dtype(str(dtype)))
        return array if kind == "array" else array[()]

    def _plain(self, index: int) -> Any:
        kind, value = self._nodes[index]
        return value if kind == "value" else [self._plain(item) for item in value]

    def _fill(self, value: Any, node: list[Any]) -> None:
        kind, *details = node
        if kind == "object":
            for name, item in details[1]:
                object.__setattr__(value, str(name), self._value(item))
        elif kind in ("dict", "counter"):
            for key, item in details[0]:
                value[self._value(key)] = self._value(item)
        elif kind == "set":
            value.update(self._value(item) for item in details[0])
        else:
            value.extend(self._value(item) for item in details[0])
