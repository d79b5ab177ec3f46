"""User-defined losses and advantages. Errors name the function; differences between ranks cannot deadlock."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from services.common.callables import bind_callable
from services.trainer.batch.columns import declared_columns

logger = logging.getLogger(__name__)

_COLLECTIVES: Final = frozenset({"c10d", "_c10d_functional", "c10d_functional"})


class OwnFunctionError(ValueError):
    """Failure of a user's function, or a function that acts differently on different ranks."""


class OwnFunction(TorchDispatchMode):
    """A user's function of one argument. It must not run collectives except those that it is given.

    Each rank calls the function for its own micro-batches and samples. A rank without samples does not call
    it, and a collective on the other ranks would wait for that rank forever.

    Args:
        reference: ``module:function`` or ``file.py:function``.

    Raises:
        ValueError: If the function does not load or does not accept its arguments.
    """

    def __init__(self, reference: str, arguments: Mapping[str, Any], *, key: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._function = bind_callable(reference, arguments, key=key)
        self._name = f"{key} {reference!r}"
        self._may_wait = False
        self._sum_over_ranks: Callable[[Tensor], Tensor] | None = None
        self._num_ranks = 1
        self._mismatch: OwnFunctionError | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the function declares; see :func:`columns.uses_columns`."""
        return declared_columns(getattr(self._function, "func", self._function))

    def __call__(self, batch: Any) -> Any:
        """Calls the function.

        Raises:
            OwnFunctionError: If the function fails on any rank, or if ranks call their sums differently; the
                message names the function.
        """
        failure: Exception | None = None
        try:
            with self:
                result = self._function(batch)
        except Exception as error:  # noqa: BLE001 -- a user's code; other ranks are notified first
            failure = error
        if self._mismatch is not None:  # even if the function caught the error
            raise self._mismatch
        self._agree(has_failed=failure is not None)
        if isinstance(failure, torch.OutOfMemoryError):
            raise failure
        if failure is not None:
            logger.error("%s failed", self._name, exc_info=failure)
            problem = f"{self._name} failed: {type(failure).__name__}: {failure}"
            raise OwnFunctionError(problem) from failure
        return result

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Executes an operation of the function, unless it is a collective."""
        if operation.namespace in _COLLECTIVES and not self._may_wait:
            raise RuntimeError(
                f"it calls the collective {operation}, which deadlocks if another rank has no samples; "
                "remove the call (an advantage can use batch.whiten and batch.sum_over_ranks)"
            )
        return operation(*args, **(kwargs or {}))

    def checked_sum(
        self, sum_over_ranks: Callable[[Tensor], Tensor], *, num_ranks: int
    ) -> Callable[[Tensor], Tensor]:
        """Returns a sum over all ranks that the function may call.

        The ranks first check that all of them sum the same count of numbers. All ranks must call the
        function.
        """
        self._sum_over_ranks, self._num_ranks = sum_over_ranks, num_ranks

        def summed(value: Tensor) -> Tensor:
            self._may_wait = True
            try:
                self._agree(numbers=value.numel())
                return sum_over_ranks(value)
            finally:
                self._may_wait = False

        return summed

    def _agree(self, *, numbers: int | None = None, has_failed: bool = False) -> None:
        """Compares the function's next action on all ranks; returns only if it is the same.

        Args:
            numbers: Count of numbers that the function sums on this rank; None if it has returned.

        Raises:
            OwnFunctionError: If the ranks differ. All ranks raise it, so none waits.
        """
        if self._sum_over_ranks is None:
            return
        count = numbers or 0
        counts = torch.tensor([numbers is not None, has_failed, count, count * count])
        adding, failed, total, squares = self._sum_over_ranks(counts).tolist()
        if failed and not has_failed:
            self._raise_mismatch("failed on another rank; see that rank's log")
        if not failed and adding not in (0, self._num_ranks):
            self._raise_mismatch(
                f"calls batch.whiten or batch.sum_over_ranks on {adding} of {self._num_ranks} ranks, which "
                "would deadlock; call it equally often on every rank, including ranks without tokens"
            )
        if not failed and total * total != self._num_ranks * squares:
            self._raise_mismatch(
                f"calls batch.sum_over_ranks with {count} numbers on this rank and a different count on "
                "others; pass the same count on every rank"
            )

    def _raise_mismatch(self, problem: str) -> None:
        self._mismatch = OwnFunctionError(f"{self._name} {problem}")
        raise self._mismatch
