"""Unfinished samples as tensors, so that any replica can go on with them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from services.rollout.engines.base import FinishReason
from services.rollout.workflows.turns import Turn

_FINISH_CODES: dict[FinishReason | None, int] = {None: 0, "stop": 1, "length": 2, "aborted": 3}
_FINISH_REASONS = {code: reason for reason, code in _FINISH_CODES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberProgress:
    """What one member of a group has so far."""

    num_failed_scores: int
    """Tries whose reward failed; the next seed follows from it."""
    turns: tuple[Turn, ...]
    """Turns of the current try; the last one may be cut."""
    reward: float | None = None
    """Score, if the member is complete and was scored."""


GroupProgress = Mapping[int, MemberProgress]
"""Progress by member."""

PARTIAL_FIELDS: Final = ("response_ids", "rollout_logprobs", "version_runs", "turns", "scores")
"""Fields of the ``partial`` partition, one row per member of a group.

``response_ids``, ``rollout_logprobs`` and ``version_runs`` are as for samples. ``turns`` int32 ``[T, 4]`` has
failed scores, tokens, version runs and finish code of each turn; ``scores`` float64 ``[S]`` has the reward if
there is one.
"""


def encode_progress(progress: MemberProgress) -> dict[str, Tensor]:
    """Tensors of a member by field."""
    turns = progress.turns
    table = [
        (
            progress.num_failed_scores,
            len(turn.token_ids),
            len(turn.version_runs),
            _FINISH_CODES[turn.finish_reason],
        )
        for turn in turns
    ]
    scores = [] if progress.reward is None else [progress.reward]
    return {
        "response_ids": torch.tensor([t for u in turns for t in u.token_ids], dtype=torch.int32),
        "rollout_logprobs": torch.tensor(
            [p for u in turns for p in u.logprobs], dtype=torch.float32
        ),
        "version_runs": torch.tensor(
            [run for turn in turns for run in turn.version_runs], dtype=torch.int32
        ).reshape(-1, 2),
        "turns": torch.tensor(table, dtype=torch.int32).reshape(-1, 4),
        "scores": torch.tensor(scores, dtype=torch.float64),
    }


def decode_progress(fields: Mapping[str, Tensor]) -> MemberProgress:
    """The member that :func:`encode_progress` made tensors of.

    Raises:
        ValueError: If the tensors do not fit together.
    """
    table = fields["turns"].tolist()
    tokens, logprobs = fields["response_ids"].tolist(), fields["rollout_logprobs"].tolist()
    runs = [(version, count) for version, count in fields["version_runs"].tolist()]
    if sum(row[1] for row in table) != len(tokens) or sum(row[2] for row in table) != len(runs):
        raise ValueError("the turns of a cached sample do not cover its tokens; generate it again")
    turns: list[Turn] = []
    token, run = 0, 0
    for _, num_tokens, num_runs, code in table:
        turns.append(
            Turn(
                token_ids=tuple(tokens[token : token + num_tokens]),
                logprobs=tuple(logprobs[token : token + num_tokens]),
                version_runs=tuple(runs[run : run + num_runs]),
                finish_reason=_FINISH_REASONS[code],
            )
        )
        token, run = token + num_tokens, run + num_runs
    return MemberProgress(
        num_failed_scores=table[0][0] if table else 0,
        turns=tuple(turns),
        reward=next(iter(fields["scores"].tolist()), None),
    )
