"""Unfinished samples as tensors, so that any replica can go on with them."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from services.common.fields import ROUTED_EXPERTS
from services.rollout.engines.base import FinishReason, RoutedExperts
from services.rollout.rewards.base import Score
from services.rollout.samples import row_of
from services.rollout.workflows.turns import Turn, routed_experts

_FINISH_CODES: dict[FinishReason | None, int] = {None: 0, "stop": 1, "length": 2, "aborted": 3}
_MOST_MS = 2**31 - 1
_FINISH_REASONS = {code: reason for reason, code in _FINISH_CODES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberProgress:
    """What one member of a group has so far."""

    num_failed_scores: int
    """Tries whose reward failed; the next seed follows from it."""
    turns: tuple[Turn, ...]
    """Turns of the current try; the last one may be cut."""
    score: Score | None = None
    """Of a member that is complete and was scored."""


GroupProgress = Mapping[int, MemberProgress]
"""Progress by member."""

PARTIAL_FIELDS: Final = (
    "response_ids", "rollout_logprobs", "version_runs", "turns", "scores", ROUTED_EXPERTS,
)  # fmt: skip
"""Fields of the ``partial`` partition, one row per member of a group.

``response_ids``, ``rollout_logprobs`` and ``version_runs`` are as for samples. ``turns`` int32 ``[T, 6]`` has
failed scores, tokens, version runs, finish code, milliseconds and tokens with known experts of each turn;
``scores`` uint8 ``[B]`` has the score, if there is one, as a JSON list of its value, terms and tokens;
``routed_experts`` uint8 ``[B]`` has the known experts, if there are any, as a file of numpy's.
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
            min(round(1000 * turn.seconds), _MOST_MS),
            0 if turn.routed_experts is None else len(turn.routed_experts),
        )
        for turn in turns
    ]
    score = progress.score
    stored = None if score is None else [score.value, dict(score.terms), score.tokens]
    scores = b"" if stored is None else json.dumps(stored).encode()
    return {
        "response_ids": row_of((turn.token_ids for turn in turns), np.int32),
        "rollout_logprobs": row_of((turn.logprobs for turn in turns), np.float32),
        "version_runs": torch.tensor(
            [run for turn in turns for run in turn.version_runs], dtype=torch.int32
        ).reshape(-1, 2),
        "turns": torch.tensor(table, dtype=torch.int32).reshape(-1, 6),
        "scores": torch.tensor(list(scores), dtype=torch.uint8),
        ROUTED_EXPERTS: _stored(routed_experts(turns)),
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
    scores = bytes(fields["scores"].tolist())
    experts = _read(fields[ROUTED_EXPERTS])
    turns: list[Turn] = []
    token, run, known = 0, 0, 0
    for _, num_tokens, num_runs, code, ms, num_known in table:
        turns.append(
            Turn(
                token_ids=tuple(tokens[token : token + num_tokens]),
                logprobs=tuple(logprobs[token : token + num_tokens]),
                version_runs=tuple(runs[run : run + num_runs]),
                finish_reason=_FINISH_REASONS[code],
                seconds=ms / 1000,
                routed_experts=experts[known : known + num_known] if num_known else None,
            )
        )
        token, run, known = token + num_tokens, run + num_runs, known + num_known
    return MemberProgress(
        num_failed_scores=table[0][0] if table else 0,
        turns=tuple(turns),
        score=_score(*json.loads(scores)) if scores else None,
    )


def _score(value: float, terms: Mapping[str, float], tokens: Sequence[float]) -> Score:
    return Score(value, terms, tuple(tokens))


def _stored(experts: RoutedExperts | None) -> Tensor:
    if experts is None:
        return torch.zeros(0, dtype=torch.uint8)
    file = io.BytesIO()
    np.save(file, experts, allow_pickle=False)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _read(stored: Tensor) -> RoutedExperts:
    if not len(stored):
        return np.zeros((0, 0, 0), np.uint8)
    found: RoutedExperts = np.load(io.BytesIO(stored.numpy().tobytes()), allow_pickle=False)
    return found
