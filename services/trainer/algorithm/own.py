"""User-defined losses and advantages: errors name the function, and no rank waits forever for another."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from services.common.callables import bind_callable

logger = logging.getLogger(__name__)

_COLLECTIVES: Final = frozenset({"c10d", "_c10d_functional", "c10d_functional"})


class OwnFunctionError(ValueError):
    """Failure of a user's function, or a function that acts differently on different ranks."""


class OwnFunction(TorchDispatchMode):
    """A user's function of one argument, which may run no collectives except those that it is given.

    Each rank calls it for its own micro-batches and samples, of which it may have none: if other ranks do
    not call it, a collective would wait forever.

    Args:
        reference: ``module:function`` or ``file.py:function``.
        arguments: Keyword arguments of the function.
        key: Key of the specification that names the function.

    Raises:
        ValueError: If the function does not load or does not accept its arguments.
    """

    def __init__(self, reference: str, arguments: Mapping[str, Any], *, key: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._function = bind_callable(reference, arguments, key=key)
        self._name = f"{key} {reference!r}"
        self._may_wait = False
        self._add_up: Callable[[Tensor], Tensor] | None = None
        self._num_ranks = 1
        self._parted: OwnFunctionError | None = None

    def __call__(self, given: Any) -> Any:
        """Calls the function.

        Raises:
            OwnFunctionError: If it fails on this rank or another, or if ranks sum differently; the message
                names it.
        """
        failure: Exception | None = None
        try:
            with self:
                found = self._function(given)
        except Exception as error:  # noqa: BLE001 -- a user's code; other ranks are notified first
            failure = error
        if self._parted is not None:  # even if the function caught the error
            raise self._parted
        self._agree(has_failed=failure is not None)
        if isinstance(failure, torch.OutOfMemoryError):
            raise failure
        if failure is not None:
            logger.error("%s failed", self._name, exc_info=failure)
            told = f"{self._name} failed: {type(failure).__name__}: {failure}"
            raise OwnFunctionError(told) from failure
        return found

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Executes an operation of the function, unless it is a collective."""
        if operation.namespace in _COLLECTIVES and not self._may_wait:
            raise RuntimeError(
                f"it calls the collective {operation}, but other ranks may have nothing to call it for, and "
                "all would wait for ever; leave it out (an advantage has batch.whiten and batch.add_up)"
            )
        return operation(*args, **(kwargs or {}))

    def adding_up(
        self, add_up: Callable[[Tensor], Tensor], *, num_ranks: int
    ) -> Callable[[Tensor], Tensor]:
        """Returns a sum over all ranks that the function may call.

        The ranks first agree that all of them sum the same count of numbers. All ranks must then call the
        function.

        Args:
            add_up: Sums a small tensor over the ranks.
            num_ranks: Number of ranks.
        """
        self._add_up, self._num_ranks = add_up, num_ranks

        def added_up(value: Tensor) -> Tensor:
            self._may_wait = True
            try:
                self._agree(numbers=value.numel())
                return add_up(value)
            finally:
                self._may_wait = False

        return added_up

    def _agree(self, *, numbers: int | None = None, has_failed: bool = False) -> None:
        """Exchanges what the function does on all ranks, and returns only if it is the same.

        Args:
            numbers: Count of numbers that it sums on this rank; None if it has ended.
            has_failed: True if it has failed.

        Raises:
            OwnFunctionError: If it does something else on another rank. All ranks raise, and none waits.
        """
        if self._add_up is None:
            return
        count = numbers or 0
        mine = torch.tensor([numbers is not None, has_failed, count, count * count])
        adding, failed, total, squares = self._add_up(mine).tolist()
        if failed and not has_failed:
            self._part("failed on another rank, which says why")
        if not failed and adding not in (0, self._num_ranks):
            self._part(
                f"calls batch.whiten or batch.add_up on {adding} of {self._num_ranks} ranks, which would "
                "wait for the others for ever; call it equally often on each, also on one without tokens"
            )
        if not failed and total * total != self._num_ranks * squares:
            self._part(
                f"calls batch.add_up with {count} numbers on this rank, and not as many on others; give it "
                "as many on each"
            )

    def _part(self, told: str) -> None:
        self._parted = OwnFunctionError(f"{self._name} {told}")
        raise self._parted
