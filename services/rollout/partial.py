"""Unfinished groups as tensors, so that any replica can go on with them."""

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
"""Fields of the ``partial`` partition, one row per group.

``response_ids``, ``rollout_logprobs`` and ``version_runs`` are as for samples, those of all members one after
the other. ``turns`` int32 ``[T, 5]`` has member, failed scores, tokens, version runs and finish code of each
turn; ``scores`` float64 ``[S, 2]`` has member and reward of those that were scored.
"""


def encode_progress(progress: GroupProgress) -> dict[str, Tensor]:
    """Tensors of a group by field."""
    tokens: list[int] = []
    logprobs: list[float] = []
    runs: list[tuple[int, int]] = []
    table: list[tuple[int, int, int, int, int]] = []
    scores = [(member, part.reward) for member, part in progress.items() if part.reward is not None]
    for member, part in progress.items():
        for turn in part.turns:
            tokens += turn.token_ids
            logprobs += turn.logprobs
            runs += turn.version_runs
            counts = (len(turn.token_ids), len(turn.version_runs))
            code = _FINISH_CODES[turn.finish_reason]
            table.append((member, part.num_failed_scores, *counts, code))
    return {
        "response_ids": torch.tensor(tokens, dtype=torch.int32),
        "rollout_logprobs": torch.tensor(logprobs, dtype=torch.float32),
        "version_runs": torch.tensor(runs, dtype=torch.int32).reshape(-1, 2),
        "turns": torch.tensor(table, dtype=torch.int32).reshape(-1, 5),
        "scores": torch.tensor(scores, dtype=torch.float64).reshape(-1, 2),
    }


def decode_progress(fields: Mapping[str, Tensor]) -> dict[int, MemberProgress]:
    """The group that :func:`encode_progress` made tensors of.

    Raises:
        ValueError: If the tensors do not fit together.
    """
    table = fields["turns"].tolist()
    tokens, logprobs = fields["response_ids"].tolist(), fields["rollout_logprobs"].tolist()
    runs = [(version, count) for version, count in fields["version_runs"].tolist()]
    if sum(row[2] for row in table) != len(tokens) or sum(row[3] for row in table) != len(runs):
        raise ValueError("the turns of a cached group do not cover its tokens; generate it again")
    scores = {int(member): reward for member, reward in fields["scores"].tolist()}
    progress: dict[int, MemberProgress] = {}
    token, run = 0, 0
    for member, num_failed_scores, num_tokens, num_runs, code in table:
        turn = Turn(
            token_ids=tuple(tokens[token : token + num_tokens]),
            logprobs=tuple(logprobs[token : token + num_tokens]),
            version_runs=tuple(runs[run : run + num_runs]),
            finish_reason=_FINISH_REASONS[code],
        )
        earlier = progress[member].turns if member in progress else ()
        progress[member] = MemberProgress(
            num_failed_scores=num_failed_scores,
            turns=(*earlier, turn),
            reward=scores.get(member),
        )
        token, run = token + num_tokens, run + num_runs
    return progress
