"""Regenerates recorded responses with the engine torch, under the weights of a replay."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from services.common.errors import FailedPreconditionError, InvalidArgumentError
from services.common.fields import group_of
from services.common.models.loading import build_model, load_config, stored_tensors
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import RunSpec
from services.extras.replay import files
from services.rollout.engines.base import GenerationRequest
from services.rollout.engines.torch.decoding import DecodeBatch
from services.rollout.engines.torch.engine import use_decoding_kernels


@dataclass(slots=True)
class Response:
    """A recorded response, and the progress of its regeneration."""

    key: str
    step: int
    seed: int
    is_greedy: bool
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    runs: list[tuple[int, int]]
    """Weight version and number of tokens of the parts that are not regenerated yet."""
    num_done: int = 0
    difference: str = ""
    """First difference from the record; empty if there is none."""

    def compare(self, tokens: Sequence[int], logprobs: Sequence[float], *, version: int) -> None:
        """Compares the next tokens with the recorded ones."""
        for index, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), self.num_done):
            if self.difference:
                break
            where = f"token {index} (version {version})"
            if token != self.tokens[index]:
                self.difference = f"{where} is {token}, but was {self.tokens[index]}"
            elif logprob != self.logprobs[index]:
                change = abs(logprob - self.logprobs[index])
                self.difference = f"{where} has another logprob, by {change:.3g}"
        self.num_done += len(tokens)


@dataclass(slots=True)
class Regeneration:
    """Responses to regenerate, version by version in ascending order."""

    spec: RunSpec
    responses: list[Response]
    device: str = "cpu"
    """Device of the run's engines."""
    _batch: DecodeBatch | None = field(default=None, init=False)
    _weights: dict[str, Tensor] = field(default_factory=dict, init=False)

    @property
    def versions(self) -> tuple[int, ...]:
        """All weight versions that sampled the responses, in ascending order."""
        return tuple(
            sorted({version for response in self.responses for version, _ in response.runs})
        )

    @torch.no_grad()
    def decode(self, version: int, file: Path) -> None:
        """Regenerates all parts that a version sampled, with its weights."""
        if self._batch is None:
            config = load_config(self.spec.model, load_tokenizer(self.spec.model))
            dtype = getattr(torch, self.spec.trainer.dtype)
            model = build_model(config, dtype=dtype, device=self.device)
            use_decoding_kernels(model, is_invariant=True)
            self._weights, self._batch = (
                stored_tensors(model),
                DecodeBatch(model, is_invariant=True),
            )
        for name, value in load_file(file).items():
            self._weights[name].copy_(value)
        waiting = {
            response.key: response
            for response in self.responses
            if response.runs[:1] and response.runs[0][0] == version
        }
        batch = self._batch
        batch.admit([self._request(response) for response in waiting.values()])
        while len(batch):
            for key, result in batch.step(version):
                response = waiting[key]
                response.compare(result.token_ids, result.logprobs, version=version)
                del response.runs[0]

    def _request(self, response: Response) -> GenerationRequest:
        sampling = self.spec.rollout.sampling
        return GenerationRequest(
            request_id=response.key,
            context_ids=response.prompt + response.tokens[: response.num_done],
            max_tokens=response.runs[0][1],
            seed=response.seed,
            draw_offset=response.num_done,
            temperature=0.0 if response.is_greedy else sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            returns_mask=sampling.is_truncated,
        )


def wanted_responses(folder: Path, spec: RunSpec, names: Sequence[str]) -> Regeneration:
    """Reads recorded responses.

    Args:
        names: ``STEP/GROUP``, or ``STEP`` for all groups that the step trained.

    Raises:
        InvalidArgumentError: If there is no such group, or a sample has tokens that no policy sampled.
        FailedPreconditionError: If the responses of the run are not reproducible.
        DataLossError: If the record of the step is damaged.
    """
    if spec.rollout.engine != "torch" or spec.rollout.reproducible != "batch_invariant":
        raise FailedPreconditionError(
            "responses can be regenerated only if they did not depend on others: the run needs "
            "rollout.reproducible: batch_invariant and rollout.engine: torch, but has "
            f"{str(spec.rollout.reproducible).lower()} and {spec.rollout.engine}"
        )
    responses = [response for name in names for response in _responses(folder, spec, name)]
    if spec.rollout.kv_policy == "keep" and any(len(response.runs) > 1 for response in responses):
        raise FailedPreconditionError(
            "rollout.kv_policy is keep: tokens depend on keys of earlier weights; use recompute to "
            "regenerate responses of several versions"
        )
    return Regeneration(spec, responses)


def _responses(folder: Path, spec: RunSpec, name: str) -> Iterator[Response]:
    number, _, group = name.partition("/")
    if not number.isdigit():
        raise InvalidArgumentError(
            f"--sample {name}: expected STEP or STEP/GROUP, such as 12/g00000007"
        )
    step = files.read_step(folder, int(number), num_ranks=spec.trainer.world_size)
    keys = [key for key in step.meta.keys if group in ("", group_of(key))]
    if not keys:
        groups = ", ".join(dict.fromkeys(map(group_of, step.meta.keys)))
        raise InvalidArgumentError(f"step {number} trained no group {group}; it trained {groups}")
    meta = step.meta.select(keys)
    names = ("prompt_ids", "response_ids", "rollout_logprobs", "version_runs")
    fields = {n: column.unbind() for n, column in step.fetch(meta, names).items()}
    for row, key in enumerate(keys):
        values: dict[str, Any] = {n: column[row].tolist() for n, column in fields.items()}
        if any(version < 0 for version, _ in values["version_runs"]):
            raise InvalidArgumentError(
                f"sample {key} has tokens that no policy sampled; choose responses of one turn"
            )
        yield Response(
            key=f"{number}/{key}",
            step=int(number),
            seed=int(meta.tag("seed")[row]),
            is_greedy=bool(meta.tag("greedy")[row]),
            prompt=tuple(values["prompt_ids"]),
            tokens=tuple(values["response_ids"]),
            logprobs=tuple(values["rollout_logprobs"]),
            runs=[(version, count) for version, count in values["version_runs"]],
        )
