"""A request that is decoded in parts, for engines that cannot continue one under new weights."""

import asyncio
import hashlib
import json
from typing import Any

from services.rollout.engines.base import (
    GenerationRequest,
    GenerationResult,
    VersionRun,
    append_version,
)


class Progress:
    """What a request has so far."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.version_runs: list[VersionRun] = []
        self.part_id = ""
        self.is_aborted = False
        self.ended = asyncio.Event()

    def extend(self, part: Any, version: int) -> None:
        """Take in the tokens of one output of vLLM."""
        self.token_ids += part.token_ids
        self.logprobs += [
            position[token].logprob
            for position, token in zip(part.logprobs or (), part.token_ids, strict=True)
        ]
        append_version(self.version_runs, version, len(part.token_ids))

    def result(self, reason: Any) -> GenerationResult:
        """The result as it is now."""
        return GenerationResult(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            version_runs=tuple(self.version_runs),
            finish_reason=reason,
        )


def part_seed(seed: int, draw_offset: int) -> int:
    """A seed for what follows an offset: vLLM's random streams cannot be entered in their middle."""
    if draw_offset == 0:
        return seed
    digest = hashlib.sha256(json.dumps([seed, draw_offset]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
