"""What every engine offers: token ids in; token ids, logprobs and weight versions out."""

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from services.weightsync.endpoints import Place
    from services.weightsync.plan import TensorSpec, WeightPlan

FinishReason = Literal["stop", "length", "aborted"]
RoutedExperts = NDArray[np.integer[Any]]
"""``[tokens, layers, K]`` uint8 or int16; see :class:`~services.common.models.routers.RoutingShape`."""
VersionRun = tuple[int, int]
"""``(weight_version, num_tokens)``: that many tokens in a row, sampled by that version."""
OnTokens = Callable[[Sequence[int], Sequence[float]], None]
"""Hears of new tokens and their logprobs, in the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Asks for the tokens that follow a context."""

    request_id: str
    """Unique among the requests in flight."""
    context_ids: tuple[int, ...]
    """Prompt and everything that was generated before; at least one token."""
    max_tokens: int
    """Most new tokens."""
    seed: int
    """Seed of this sample. The same seed, weights and context draw the same tokens."""
    draw_offset: int = 0
    """Tokens drawn under this seed before; a resumed sample goes on with its random stream."""
    oldest_version: int | None = None
    """Oldest weight version in the context's response; None if nothing was sampled. Requests that wait
    are admitted oldest version first, so that what is about to become stale is finished first."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy, and then logprobs are those at temperature 1."""
    top_p: float = 1.0
    """Draws from the fewest tokens that have this much probability together."""
    top_k: int = 0
    """Draws from this many of the likeliest tokens; 0 is all."""
    min_p: float = 0.0
    """Draws from tokens with at least this part of the likeliest one's probability."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the response; the ending token belongs to it."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end the response; the token that completes one belongs to it."""
    turn_tokens: int = 0
    """Tokens at the end of the context that earlier requests sampled of the same turn. A stop text may begin
    in them."""
    experts_from: int = 0
    """First token of the context whose experts are asked for, if the engine tells them."""
    on_tokens: OnTokens | None = field(default=None, compare=False, repr=False)
    """Hears of tokens as they are made; what it did not hear of when the result is there, it never does."""

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens are never drawn.

        Logprobs stay those of all tokens, so training must not use such responses: a run that asks for it
        is refused.
        """
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """The new tokens of one request."""

    token_ids: tuple[int, ...]
    """Sampled tokens."""
    logprobs: tuple[float, ...]
    """Float32 log-probability of each token: ``log_softmax(logits / temperature)``."""
    version_runs: tuple[VersionRun, ...]
    """Weight version of each token, run-length coded; the counts sum to the number of tokens."""
    finish_reason: FinishReason
    """``aborted`` keeps the tokens so far, so that the sample can be resumed anywhere."""
    routed_experts: RoutedExperts | None = field(default=None, compare=False)
    """Chosen experts of each token from ``experts_from`` to the last but one, new ones included; None without
    a new token, or from an engine that does not tell them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do; a run that needs more is refused with the reason."""

    name: str
    """Engine name as in ``rollout.engine``."""
    kv_policies: frozenset[str]
    """Supported values of ``rollout.kv_policy``."""
    stop_texts: bool
    """Whether texts, not only tokens, can end a response."""
    truncation: bool
    """Whether ``top_p``, ``top_k`` and ``min_p`` work, with logprobs of the whole distribution."""
    seeds: bool
    """Whether the same seed draws the same tokens."""
    routed_experts: bool = False
    """Whether it tells which experts it chose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges of an engine, for admission, heartbeats and metrics."""

    num_running: int
    """Requests that are being decoded."""
    num_waiting: int
    """Requests that wait for a place."""
    tokens_total: int
    """Tokens sampled since the start."""
    kv_used_fraction: float
    """Part of the KV cache in use, 0 to 1."""
    idle_seconds: float
    """Seconds since the start in which nothing was decoded."""
    weight_version: int
    """Version of the live weights; -1 before the first adoption."""
    prompt_tokens_total: int = 0
    """Tokens of contexts since the start, of those included that went on after an update."""
    cached_tokens_total: int = 0
    """Those of them that were found in a prefix cache, or shared with another request."""
    recomputed_tokens_total: int = 0
    """Tokens of responses computed once more since the start: under new weights, or to go on with one."""
    is_asleep: bool = False
    """Whether it has given its memory up, or has no weights since."""


class Engine(Protocol):
    """Generates. One instance per rollout process; all methods belong to one event loop."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """What this engine can do."""
        ...

    @property
    def max_tokens(self) -> int:
        """Longest context with its response."""
        ...

    async def run(self) -> None:
        """Serve until cancelled. Requests made earlier wait. Raises if the engine dies."""
        ...

    async def wait_ready(self) -> None:
        """Return when the engine, whose :meth:`run` was started, can serve."""
        ...

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Decode one request.

        Raises:
            ValueError: If the request can never be decoded, for example because it is empty, longer
                than the model allows or holds unknown tokens.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probability of every token but the first, given those before it, at temperature 1.

        Reads no cached prefix: what comes back is what the live weights say. May wait until a paused
        engine goes on.

        Args:
            token_ids: At least two tokens.

        Returns:
            Float32 values, one fewer than there are tokens.

        Raises:
            ValueError: If the tokens can never be scored.
        """
        ...

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End requests (None: all) between two steps; their results keep the tokens so far."""
        ...

    async def peek(self) -> "dict[str, GenerationResult]":
        """What the running requests have so far, by request, all at one moment between two steps."""
        ...

    async def pause(self, *, drain: bool = False) -> None:
        """Stop between two steps and keep all requests; with ``drain``, finish running ones first."""
        ...

    async def resume(self) -> None:
        """Go on after a pause; one that slept goes on once weights are adopted."""
        ...

    async def sleep(self) -> None:
        """Pause, and give up the device's memory: the KV cache, and what the weights hold. Safe to repeat.

        Requests keep their place and their tokens.
        """
        ...

    async def wake(self) -> None:
        """Take the memory back. Safe to repeat.

        Nothing is decoded before the next adoption, under whose weights all requests go on with a cache that
        is computed anew.
        """
        ...

    def weight_specs(self) -> "list[TensorSpec]":
        """Tensors that an adoption must bring, by their checkpoint names; tied weights once."""
        ...

    async def adopt_weights(self, version: int, tensors: "Mapping[str, Tensor]") -> float:
        """Copy verified tensors into the live model between two steps; running requests go on.

        Later tokens carry ``version``, and their KV prefix is recomputed unless the policy keeps it.

        Args:
            version: Version of the new weights.
            tensors: Every tensor of :meth:`weight_specs`.

        Returns:
            Seconds in which no token was produced.

        Raises:
            ValueError: If a tensor is missing, unknown or of another shape; nothing was changed.
        """
        ...

    def stats(self) -> EngineStats:
        """Gauges, without waiting for the engine."""
        ...


@runtime_checkable
class OpenEngine(Engine, Protocol):
    """An engine whose live weights can be received in place."""

    async def open_weights(
        self, plan: "WeightPlan", slots: "Sequence[Sequence[Tensor]]"
    ) -> "Place":
        """Stop between two steps and keep all requests, until :meth:`adopt_placed` or :meth:`close_weights`.

        May come again after buckets were placed of a version that was not adopted.

        Args:
            plan: The layout of what is received.
            slots: Where it lies before it is placed; see
                :meth:`~services.weightsync.endpoints.WeightSink.open_weights`.

        Raises:
            ValueError: If the live weights cannot be written so.
        """
        ...

    async def adopt_placed(self, version: int) -> None:
        """Take what was placed for a version; what runs goes on with the next :meth:`Engine.resume`."""
        ...

    async def close_weights(self) -> None:
        """Go on under the old weights: nothing was placed."""
        ...


def append_version(runs: list[VersionRun], version: int, num_tokens: int) -> None:
    """Add tokens to run-length coded versions, in place."""
    if num_tokens == 0:
        return
    if runs and runs[-1][0] == version:
        runs[-1] = (version, runs[-1][1] + num_tokens)
    else:
        runs.append((version, num_tokens))


def check_request(request: GenerationRequest, *, vocab_size: int, max_model_tokens: int) -> None:
    """Refuse a request that can never be decoded.

    Raises:
        ValueError: With what was expected, what came and what to do.
    """
    length = len(request.context_ids)
    if length == 0:
        raise ValueError("the context has no tokens; give at least one prompt token")
    if request.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, but is {request.max_tokens}")
    if length + request.max_tokens > max_model_tokens:
        raise ValueError(
            f"the context has {length} tokens and {request.max_tokens} more are asked for, but the "
            f"model holds {max_model_tokens}; shorten the prompt or lower max_response_tokens"
        )
    _check_ids(request.context_ids, vocab_size)


def check_scorable(token_ids: Sequence[int], *, vocab_size: int, max_model_tokens: int) -> None:
    """Refuse tokens that can never be scored.

    Raises:
        ValueError: With what was expected, what came and what to do.
    """
    # Engines that score by a request of their own draw a token after it.
    if not 2 <= len(token_ids) < max_model_tokens:
        raise ValueError(
            f"scoring takes 2 to {max_model_tokens - 1} tokens, but {len(token_ids)} came"
        )
    _check_ids(token_ids, vocab_size)


def check_supported(request: GenerationRequest, can: EngineCapabilities) -> None:
    """Refuse a request that needs what the engine cannot do.

    Raises:
        ValueError: With the engine's name and what it lacks.
    """
    if request.stop_texts and not can.stop_texts:
        raise ValueError(f"engine {can.name!r} ends responses at tokens only, not at stop texts")
    if request.is_truncated and not can.truncation:
        raise ValueError(
            f"engine {can.name!r} cannot draw with top_p, top_k or min_p and report logprobs of the "
            "whole distribution; leave them out or choose another engine"
        )


def check_tensors(expected: Mapping[str, Sequence[int]], tensors: "Mapping[str, Tensor]") -> None:
    """Refuse weights that do not fit, before anything is changed.

    Args:
        expected: Shape of every tensor by name.
        tensors: The tensors that came.

    Raises:
        ValueError: If a tensor is missing, unknown or of another shape.
    """
    if expected.keys() != tensors.keys():
        missing = _some(expected.keys() - tensors.keys())
        unknown = _some(tensors.keys() - expected.keys())
        raise ValueError(
            f"weights do not fit the model: missing {missing}, unknown {unknown}; trainer and rollout "
            "must be given the same model"
        )
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != tuple(shape):
            raise ValueError(
                f"weight {name!r} must have shape {tuple(shape)}, but has {tuple(tensors[name].shape)}; "
                "trainer and rollout must be given the same model"
            )


def _check_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    ids = np.frombuffer(array("q", token_ids), np.int64)  # a third of the time of min(token_ids)
    if not 0 <= (low := ids.min()) <= (high := ids.max()) < vocab_size:
        raise ValueError(
            f"token ids must be in 0..{vocab_size - 1}, but are {low}..{high}; is the tokenizer the model's?"
        )


def _some(names: Iterable[str]) -> str:
    """Show a few names."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more or "none"
