"""Columns: one number, or one row of numbers, for each response token. The one table that lists them.

A column that travels is a field of the data dictionary with one entry per response token
(``services/common/fields.py``); it needs no entry here unless it differs from the defaults. The trainer
computes the others. A user's own loss or advantage declares further columns with :func:`uses_columns`; a
reward with the key ``column`` fills them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from services.common.fields import FIELDS, SAMPLER_TOP_K, TEACHER_TOP_K, TOKEN_REWARDS

TEACHER_STATES: Final = "teacher_states"
"""Column ``[R, H]`` with a teacher's final hidden states, which only the trainer computes."""
_DECLARED: Final = "slipstream_columns"
_DICTIONARY: Final = frozenset(field.name for field in FIELDS)
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Properties of a column."""

    name: str
    writer: str
    """Role that writes it: ``rollout``, ``logp``, ``ref_logp``, ``critic`` or, if it does not travel,
    ``trainer``."""
    needed_by: str = ""
    """Readers of the column, in words."""
    dtype: torch.dtype = torch.float32
    """Dtype in the trainer."""
    travels: bool = False
    """True if it is a field of a stored sample."""
    is_scored: bool = False
    """True if a model may compute it in the trainer; sequences that do not fit into memory get 0."""
    must_be_finite: bool = False
    """True if a value that is not finite at a sampled token skips the step."""
    neutral: float | bool | None = 0.0
    """Value at the idle token of a rank without work; None if the column is missing there."""


def _table() -> dict[str, Column]:
    travelling = [
        Column(
            name=field.name,
            writer=field.producer,
            dtype=torch.bool if field.dtype == "bool" else torch.float32,
            travels=True,
        )
        for field in FIELDS
        if field.shape.startswith("[R") and field.dtype in ("bool", "float32")
    ]
    table = {column.name: column for column in (*travelling, *_COMPUTED)}
    for name, properties in _DIFFERENT.items():
        table[name] = replace(table[name], **properties)
    return table


_COMPUTED: Final = (
    Column(name="loss_mask", writer="trainer", dtype=torch.bool, neutral=False, needed_by="losses"),
    Column(name="advantages", writer="trainer", needed_by="losses"),
    Column(name="returns", writer="trainer", needed_by="the critic's loss"),
    Column(name="staleness", writer="trainer", needed_by="metrics"),
    Column(name="age", writer="trainer", needed_by="algorithm.proximal: interpolated"),
    Column(
        name="token_versions",
        writer="trainer",
        dtype=torch.int64,
        neutral=None,
        needed_by="the staleness bound",
    ),
    Column(
        name="counted",
        writer="trainer",
        dtype=torch.bool,
        neutral=None,
        needed_by="algorithm.rejection_denominator: kept",
    ),
    Column(
        name=TEACHER_STATES,
        writer="trainer",
        is_scored=True,
        neutral=None,
        needed_by="algorithm.loss: distill",
    ),
)
_DIFFERENT: Final[Mapping[str, Mapping[str, Any]]] = {
    "response_mask": {"neutral": False, "needed_by": "the loss mask"},
    "rollout_logprobs": {"must_be_finite": True, "needed_by": "corrections"},
    TOKEN_REWARDS: {"neutral": None, "needed_by": "advantages of level token"},
    TEACHER_TOP_K: {"is_scored": True, "neutral": None, "needed_by": "algorithm.loss: distill"},
    SAMPLER_TOP_K: {"neutral": None, "needed_by": "algorithm.score_centering"},
    "ref_logprobs": {"is_scored": True, "must_be_finite": True, "needed_by": "KL penalties, dpo"},
    "proximal_logprobs": {
        "is_scored": True,
        "must_be_finite": True,
        "needed_by": "correction: decoupled",
    },
    "values": {"is_scored": True, "must_be_finite": True, "needed_by": "advantage: gae"},
}
COLUMNS: Final[Mapping[str, Column]] = _table()
"""Built-in columns by name."""

FETCHED: Final = tuple(c.name for c in COLUMNS.values() if c.travels and c.dtype.is_floating_point)
"""Columns of numbers that travel with samples."""
SCORED: Final = tuple(column.name for column in COLUMNS.values() if column.is_scored)
"""Columns that a model computes."""
ADDED: Final = tuple(
    column.name
    for column in COLUMNS.values()
    if column.travels and column.writer not in ("rollout", "trainer")
)
"""Columns that workers besides the rollouts add to stored samples."""


def fetched_columns(fields: Iterable[str]) -> list[str]:
    """Returns the columns of numbers among fetched fields: built-in ones, then a user's own."""
    names = [*fields]
    return [name for name in FETCHED if name in names] + [n for n in names if n not in _DICTIONARY]


def is_checked(name: str) -> bool:
    """Returns True if a column must be finite; a user's own columns must."""
    return name not in COLUMNS or COLUMNS[name].must_be_finite


def idle_columns() -> dict[str, Tensor]:
    """Returns the columns of one idle token."""
    return {
        column.name: torch.full((1,), column.neutral, dtype=column.dtype)
        for column in COLUMNS.values()
        if column.neutral is not None
    }


def uses_columns(*names: str) -> Callable[[_Function], _Function]:
    """Declares the columns that a user's own loss or advantage reads as ``columns[NAME]``.

    They are built-in columns, or columns that a reward of the run fills (``rollout.rewards.N.column``).
    """

    def declare(function: _Function) -> _Function:
        setattr(function, _DECLARED, names)
        return function

    return declare


def declared_columns(function: object) -> tuple[str, ...]:
    """Returns the columns that a function declares."""
    return tuple(getattr(function, _DECLARED, ()))


def select(columns: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Returns declared columns; one that is missing, as on a rank without work, is 0 everywhere."""
    loss_mask = columns["loss_mask"]
    nothing = torch.zeros(len(loss_mask), device=loss_mask.device)
    return {name: columns.get(name, nothing) for name in names}


def check_columns(declared: Mapping[str, Sequence[str]], filled: Sequence[str]) -> None:
    """Checks that every declared column exists.

    Args:
        declared: Columns by the key of the function that declares them.
        filled: Columns that rewards of the run fill.

    Raises:
        ValueError: With the key and the column.
    """
    for key, names in declared.items():
        if missing_columns := [
            name for name in names if name not in COLUMNS and name not in filled
        ]:
            raise ValueError(
                f"{key} uses the columns {', '.join(missing_columns)}, but no reward fills them; set "
                f"rollout.rewards.N.column to {missing_columns[0]!r} for the reward that does"
            )
