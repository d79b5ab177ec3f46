"""Losses and advantages of the user's own: their errors name them, and they wait for no other rank."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from services.common.callables import bind_callable

_COLLECTIVES: Final = frozenset({"c10d", "_c10d_functional", "c10d_functional"})


class OwnFunction(TorchDispatchMode):
    """A function of one argument that a run names; it may run no collective but those that it is given.

    Each rank calls it for its own micro-batches and samples, of which it may have none: where others do not
    call it, a collective would wait for ever.

    Args:
        reference: ``module:function`` or ``file.py:function``.
        arguments: Its keyword arguments.
        key: Key of the specification.

    Raises:
        ValueError: If it does not load or does not take its arguments.
    """

    def __init__(self, reference: str, arguments: Mapping[str, Any], *, key: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._function = bind_callable(reference, arguments, key=key)
        self._name = f"{key} {reference!r}"
        self._may_wait = False

    def __call__(self, given: Any) -> Any:
        """Call it.

        Raises:
            ValueError: If it fails; the message names it.
        """
        try:
            with self:
                return self._function(given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ValueError(f"{self._name} failed: {type(error).__name__}: {error}") from error

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one of its operations, unless that waits for other ranks."""
        if operation.namespace in _COLLECTIVES and not self._may_wait:
            raise RuntimeError(
                f"it calls the collective {operation}, but other ranks may have nothing to call it for, and "
                "all would wait for ever; leave it out (an advantage has batch.whiten and batch.add_up)"
            )
        return operation(*args, **(kwargs or {}))

    def allowing(self, collective: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """The same collective, as the function may call it."""

        def allowed(value: Tensor) -> Tensor:
            self._may_wait = True
            try:
                return collective(value)
            finally:
                self._may_wait = False

        return allowed
