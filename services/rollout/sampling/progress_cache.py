"""Stores the progress of unfinished samples as tensors, so that any replica can resume them."""

import asyncio
import io
import json
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.common.errors import AlreadyExistsError, ServiceError
from services.common.fields import ROUTED_EXPERTS, SAMPLER_TOP_K, SAMPLING_MASK, TURN_INPUTS
from services.rollout.data.images import Picture
from services.rollout.engines.base import FinishReason, TopLogprobs
from services.rollout.failures import GroupError
from services.rollout.rewards.base import Score
from services.rollout.sampling.sample import row_of
from services.rollout.workflows.turns import Turn, routed_experts
from services.wire.batch import KVBatchMeta
from services.wire.data.client import DataClient
from services.wire.data.model_inputs import decode_bundles, encode_bundles
from services.wire.transferqueue.client import TransferQueueClient

_FINISH_CODES: dict[FinishReason | None, int] = {None: 0, "stop": 1, "length": 2, "aborted": 3}
_MAX_MS = 2**31 - 1
_FINISH_REASONS = {code: reason for reason, code in _FINISH_CODES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberProgress:
    """Progress of one member of a group."""

    num_failed_scores: int
    """Number of tries whose reward failed; it determines the next seed."""
    turns: tuple[Turn, ...]
    """Turns of the current try; the last one may be incomplete."""
    score: Score | None = None
    """Score, if the member is complete."""


GroupProgress = Mapping[int, MemberProgress]

PARTIAL_FIELDS: Final = (
    "response_ids", "rollout_logprobs", "version_runs", "turns", "scores", ROUTED_EXPERTS,
    SAMPLING_MASK, SAMPLER_TOP_K, TURN_INPUTS, "pictures",
)  # fmt: skip
"""Fields of the ``partial`` partition, which has one row per member of a group.

``response_ids``, ``rollout_logprobs``, ``version_runs`` and ``sampling_mask`` are as for samples. ``turns``,
int32 ``[T, 8]``, has for each turn the number of failed scores, tokens and version runs, the finish code, the
milliseconds, and the number of tokens with known experts, of entries of the sampling mask and of tokens with
reported most likely tokens. ``scores``, uint8 ``[B]``, has the score, if there is one, as a JSON list of its
value, terms and tokens. ``routed_experts`` and ``sampler_topk``, uint8 ``[B]``, have the known experts and
the most likely tokens, if there are any, in NumPy's file format. ``turn_inputs`` has the model inputs of
observed turns by the index of the turn, and ``pictures``, uint8 ``[B]``, their images for people as JSON.
"""


def encode_progress(progress: MemberProgress) -> dict[str, Tensor]:
    turns = progress.turns
    table = [
        (
            progress.num_failed_scores,
            len(turn.token_ids),
            len(turn.version_runs),
            _FINISH_CODES[turn.finish_reason],
            min(round(1000 * turn.seconds), _MAX_MS),
            0 if turn.routed_experts is None else len(turn.routed_experts),
            0 if turn.sampling_mask is None else len(turn.sampling_mask),
            0 if turn.top_logprobs is None else len(turn.top_logprobs),
        )
        for turn in turns
    ]
    masks = [turn.sampling_mask for turn in turns if turn.sampling_mask is not None]
    top = [turn.top_logprobs for turn in turns if turn.top_logprobs is not None]
    score = progress.score
    scores = None if score is None else [score.value, dict(score.terms), score.tokens]
    return {
        "response_ids": row_of((turn.token_ids for turn in turns), np.int32),
        "rollout_logprobs": row_of((turn.logprobs for turn in turns), np.float32),
        "version_runs": torch.tensor(
            [run for turn in turns for run in turn.version_runs], dtype=torch.int32
        ).reshape(-1, 2),
        "turns": torch.tensor(table, dtype=torch.int32).reshape(-1, 8),
        "scores": _json_bytes(scores),
        ROUTED_EXPERTS: _stored(routed_experts(turns)),
        SAMPLING_MASK: torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *masks])),
        SAMPLER_TOP_K: _stored(np.concatenate(top) if top else None),
        TURN_INPUTS: encode_bundles(
            {n: turn.model_inputs for n, turn in enumerate(turns) if turn.model_inputs is not None}
        ),
        "pictures": _json_bytes(
            {n: list(map(asdict, turn.pictures)) for n, turn in enumerate(turns) if turn.pictures}
        ),
    }


def decode_progress(fields: Mapping[str, Tensor]) -> MemberProgress:
    """Decodes the tensors of :func:`encode_progress`.

    Raises:
        ValueError: If the tensors are inconsistent.
    """
    table = fields["turns"].tolist()
    tokens, logprobs = fields["response_ids"].tolist(), fields["rollout_logprobs"].tolist()
    runs = [(version, count) for version, count in fields["version_runs"].tolist()]
    if sum(row[1] for row in table) != len(tokens) or sum(row[2] for row in table) != len(runs):
        raise ValueError(
            "the turns of a cached sample do not cover its tokens; the sample is generated again"
        )
    scores = bytes(fields["scores"].tolist())
    experts = _read(fields[ROUTED_EXPERTS])
    turns: list[Turn] = []
    masks = fields[SAMPLING_MASK].numpy()
    top: TopLogprobs = _read(fields[SAMPLER_TOP_K])
    token, run, expert, masked, top_start = 0, 0, 0, 0, 0
    inputs = decode_bundles(fields[TURN_INPUTS])
    pictures = json.loads(fields["pictures"].numpy().tobytes() or b"{}")
    for number, row in enumerate(table):
        _, num_tokens, num_runs, code, ms, num_known, num_masked, num_top = row
        turns.append(
            Turn(
                token_ids=tuple(tokens[token : token + num_tokens]),
                logprobs=tuple(logprobs[token : token + num_tokens]),
                version_runs=tuple(runs[run : run + num_runs]),
                finish_reason=_FINISH_REASONS[code],
                seconds=ms / 1000,
                routed_experts=experts[expert : expert + num_known] if num_known else None,
                sampling_mask=masks[masked : masked + num_masked] if num_masked else None,
                top_logprobs=top[top_start : top_start + num_top] if num_top else None,
                model_inputs=inputs.get(number),
                pictures=tuple(
                    Picture(**{**picture, "size": tuple(picture["size"])})
                    for picture in pictures.get(str(number), ())
                ),
            )
        )
        masked, top_start = masked + num_masked, top_start + num_top
        token, run, expert = token + num_tokens, run + num_runs, expert + num_known
    return MemberProgress(
        num_failed_scores=table[0][0] if table else 0,
        turns=tuple(turns),
        score=_score(*json.loads(scores)) if scores else None,
    )


def _json_bytes(value: Any) -> Tensor:
    """Returns a value as JSON, ``[B]`` uint8; no bytes for an empty value."""
    data = bytearray(json.dumps(value).encode()) if value else bytearray()
    return torch.from_numpy(np.frombuffer(data, np.uint8))


def _score(value: float, terms: Mapping[str, float], tokens: Sequence[float]) -> Score:
    return Score(value, terms, tuple(tokens))


def _stored(values: NDArray[Any] | None) -> Tensor:
    if values is None:
        return torch.zeros(0, dtype=torch.uint8)
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _read(tensor: Tensor) -> NDArray[Any]:
    if not len(tensor):
        return np.zeros((0, 0, 0), np.uint8)
    array: NDArray[Any] = np.load(io.BytesIO(tensor.numpy().tobytes()), allow_pickle=False)
    return array


logger = logging.getLogger(__name__)
_SLOTS = (0, 1)
_Member = tuple[str, int]


class TransferQueueCache:
    """Stores one row per member of a group in the run's ``partial`` partition.

    A member has two keys, used alternately: the new row is stored before the old one is deleted, so
    that a crash at any moment leaves one complete row. The tag ``serial`` orders the two. The tag ``attempt``
    fences a row: an attempt that starts over never resumes rows of earlier attempts, however late they are
    stored or restored. Replicas that work on different members of a group write different rows.
    """

    def __init__(
        self, partition_id: str, *, data: DataClient, metadata: TransferQueueClient
    ) -> None:
        self._partition_id = partition_id
        self._data = data
        self._metadata = metadata
        self._serials: dict[str, dict[int, int]] = defaultdict(dict)

    async def load(self, first_attempts: Mapping[str, int]) -> Mapping[str, GroupProgress]:
        try:
            meta = await self._metadata.get_batch(self._partition_id)
            if meta.num_keys == 0:
                return {}
            serials = meta.tag("serial")
            for row, (group_id, member) in enumerate(_members(meta)):
                if group_id in first_attempts:
                    member_serials = self._serials[group_id]
                    member_serials[member] = max(int(serials[row]), member_serials.get(member, 0))
            newest = _newest(meta, first_attempts)
            if newest.num_keys == 0:
                return {}
            rows = await self._data.get(newest, PARTIAL_FIELDS)
        except (ServiceError, ValueError) as error:
            logger.warning("ignoring unusable cached progress", extra={"why": str(error)})
            return {}
        columns = {name: rows[name].unbind() for name in PARTIAL_FIELDS}
        groups: dict[str, dict[int, MemberProgress]] = defaultdict(dict)
        for index, (group_id, member) in enumerate(_members(newest)):
            try:
                groups[group_id][member] = decode_progress(
                    {name: column[index] for name, column in columns.items()}
                )
            except ValueError as error:
                logger.warning("ignoring unusable cached progress", extra={"why": str(error)})
        return groups

    async def save(
        self, groups: Mapping[str, GroupProgress], attempts: Mapping[str, int], *, is_last: bool
    ) -> None:
        """Replaces the stored progress of members.

        Args:
            is_last: True if this replica stops working on the groups after this call.

        Raises:
            GroupError: If the transferqueue rejects the rows or cannot be reached.
        """
        members = [(group_id, member) for group_id in groups for member in groups[group_id]]
        serials = [self._serials[name].get(member, 0) + 1 for name, member in members]
        rows = []
        for group_id, member in members:
            rows.append(encode_progress(groups[group_id][member]))
            # Yield after each row: encoding all rows takes longer than messages may wait for the
            # event loop. A thread would hold the GIL for milliseconds at each of its calls.
            await asyncio.sleep(0)
        keys = [_key(*who, serial % 2) for who, serial in zip(members, serials, strict=True)]
        old = [_key(*who, 1 - serial % 2) for who, serial in zip(members, serials, strict=True)]
        try:
            fields = {name: [row[name] for row in rows] for name in PARTIAL_FIELDS}
            tags: dict[str, Sequence[int] | Sequence[float] | Sequence[str]] = {
                "group_id": [group_id for group_id, _ in members],
                "member": [member for _, member in members],
                "serial": serials,
                "attempt": [attempts[group_id] for group_id, _ in members],
            }
            try:
                await self._data.put(self._partition_id, keys, fields, tags=tags)
            except AlreadyExistsError:
                # A row that a crash left under this key is older than the one that replaces it.
                await self._release(keys)
                await self._data.put(self._partition_id, keys, fields, tags=tags)
            await self._release(old)
        except ServiceError as error:
            raise GroupError("cache_failed", error.message, retryable=True) from error
        for (group_id, member), serial in zip(members, serials, strict=True):
            if is_last:
                self._serials.pop(group_id, None)
            else:
                self._serials[group_id][member] = serial

    async def delete_progress(self, group_id: str, members: Collection[int]) -> None:
        serials = self._serials.pop(group_id, {})
        keys = [_key(group_id, m, slot) for m in members if m in serials for slot in _SLOTS]
        if not keys:
            return
        try:
            await self._release(keys)
        except ServiceError as error:
            logger.warning("deleting cached progress failed", extra={"why": str(error)})

    async def _release(self, keys: Iterable[str]) -> None:
        await self._metadata.release(self._partition_id, list(keys))


def _key(group_id: str, member: int, slot: int) -> str:
    return f"{group_id}.{member}.{slot}"


def _members(meta: KVBatchMeta) -> list[_Member]:
    names, members = meta.tag("group_id"), meta.tag("member")
    return [(str(names[row]), int(members[row])) for row in range(meta.num_keys)]


def _newest(meta: KVBatchMeta, first_attempts: Mapping[str, int]) -> KVBatchMeta:
    """Selects, for each member whose progress may be resumed, the row with the highest serial."""
    newest_rows: dict[_Member, int] = {}
    serials, attempts = meta.tag("serial"), meta.tag("attempt")
    for row, who in enumerate(_members(meta)):
        first = first_attempts.get(who[0])
        if first is None or int(attempts[row]) < first:
            continue
        if who not in newest_rows or int(serials[row]) > int(serials[newest_rows[who]]):
            newest_rows[who] = row
    return meta.select(list(newest_rows.values()))
