"""Engine protocol: token ids in; token ids, log probabilities and weight versions out."""

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from services.common.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from services.weightsync.endpoints import Place
    from services.weightsync.weight_plan import TensorSpec, WeightPlan
    from services.wire.data.model_inputs import ModelInputs

FinishReason = Literal["stop", "length", "aborted"]
RoutedExperts = NDArray[np.integer[Any]]
"""Chosen experts, ``[tokens, layers, K]`` uint8 or int16.

See :class:`~services.common.models.experts.RoutingShape`.
"""
SamplingMask = NDArray[np.int32]
"""``[S]`` tokens that could be drawn, encoded as in the data dictionary (``sampling_mask``)."""
TopLogprobs = NDArray[np.float32]
"""``[tokens, K + 1, 2]`` ids and log probabilities of the most likely tokens, as in the data dictionary
(``sampler_topk``)."""
NO_LOGPROB = -1e30
"""Finite log probability of an event that cannot happen."""
VersionRun = tuple[int, int]
"""``(weight_version, num_tokens)``: a run of consecutive tokens that this version sampled."""
OnTokens = Callable[[Sequence[int], Sequence[float]], None]
"""Callback that receives new tokens and their log probabilities, in the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Request to sample the tokens that follow a context."""

    request_id: str
    """Id, unique among the requests in flight."""
    context_ids: tuple[int, ...]
    """Prompt and all tokens generated so far; at least one token."""
    max_tokens: int
    """Max number of new tokens."""
    seed: int
    """Seed of the sample. The same seed, weights and context draw the same tokens."""
    draw_offset: int = 0
    """Number of tokens drawn earlier under this seed; a resumed sample continues its random stream there."""
    oldest_version: int | None = None
    """Oldest weight version in the response so far; None if nothing was sampled.

    The engine admits waiting requests oldest version first, so that samples close to the staleness limit
    finish first.
    """
    temperature: float = 1.0
    """Divisor of the logits; 0 is greedy, with log probabilities at temperature 1."""
    top_p: float = 1.0
    """Nucleus sampling: draws from the smallest set of tokens with at least this total probability."""
    top_k: int = 0
    """Draws from this many most probable tokens; 0 allows all."""
    min_p: float = 0.0
    """Draws from tokens with at least this fraction of the highest probability; 0 allows all."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the response; the stop token is part of the response."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end the response; the token that completes one is part of the response."""
    turn_tokens: int = 0
    """Number of tokens at the end of the context that earlier requests sampled in the same turn.

    A stop text may begin in them.
    """
    model_inputs: "ModelInputs | None" = None
    """Tensors that the model takes besides the prompt's tokens."""
    returns_mask: bool = False
    """True to report which tokens could be drawn; log probabilities are then relative to these tokens."""
    top_logprobs: int = 0
    """Number of most likely tokens to report in place of each new token."""
    experts_from: int = 0
    """Index of the first context token whose experts are requested, if the engine reports them."""
    on_tokens: OnTokens | None = field(default=None, compare=False, repr=False)
    """Callback for streaming. The result may contain tokens that were never passed to it."""

    @property
    def is_truncated(self) -> bool:
        """True if ``top_p``, ``top_k`` or ``min_p`` excludes some tokens.

        Log probabilities still refer to the full distribution, unless ``returns_mask`` is True. A truncated
        response trains only if it is.
        """
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """New tokens of one request."""

    token_ids: tuple[int, ...]
    """Sampled tokens."""
    logprobs: tuple[float, ...]
    """Float32 log probability of each token: ``log_softmax(logits / temperature)``.

    With ``returns_mask``, the softmax is over the tokens of the mask only.
    """
    version_runs: tuple[VersionRun, ...]
    """Weight version of each token, run-length encoded; the counts sum to the number of tokens."""
    finish_reason: FinishReason
    """Reason for the end; ``aborted`` keeps the tokens so far, so that any replica can resume the sample."""
    routed_experts: RoutedExperts | None = field(default=None, compare=False)
    """Chosen experts of each token from ``experts_from`` to the last but one, including new tokens.

    None if there are no new tokens or the engine does not report experts.
    """
    sampling_mask: SamplingMask | None = field(default=None, compare=False)
    """Tokens that could be drawn for each new token; None without ``returns_mask``."""
    top_logprobs: TopLogprobs | None = field(default=None, compare=False)
    """Most likely tokens in place of each new token, with log probabilities of the same distribution as
    ``logprobs``; None if the request asks for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """Features of an engine. A run that needs other features is refused with the reason."""

    name: str
    """Engine name as in ``rollout.engine``."""
    kv_policies: frozenset[str]
    """Supported values of ``rollout.kv_policy``."""
    stop_texts: bool
    """True if texts can end a response, not only tokens."""
    truncation: bool
    """True if ``top_p``, ``top_k`` and ``min_p`` work, with log probabilities of the full distribution."""
    seeds: bool
    """True if the same seed draws the same tokens."""
    routed_experts: bool = False
    """True if the engine reports the experts it chose."""
    sampling_masks: bool = False
    """True if the engine reports which tokens could be drawn."""
    top_logprobs: bool = False
    """True if the engine reports the most likely tokens."""
    model_inputs: bool = False
    """True if requests may have tensors besides token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTotals:
    """Counts of speculative decoding."""

    num_drafts: int = 0
    """Times that tokens were proposed for a request."""
    num_tokens: int = 0
    """Tokens that were proposed."""
    num_accepted: int = 0
    """Proposed tokens that became part of a response."""

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that a pass with proposals adds to a response: accepted ones, and one drawn token."""
        return 1 + self.num_accepted / max(self.num_drafts, 1)

    def __add__(self, other: "DraftTotals") -> "DraftTotals":
        return DraftTotals(
            num_drafts=self.num_drafts + other.num_drafts,
            num_tokens=self.num_tokens + other.num_tokens,
            num_accepted=self.num_accepted + other.num_accepted,
        )


class EngineDiedError(RuntimeError):
    """The engine's process died or does not respond; only a restart helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges of an engine, for admission, heartbeats and metrics."""

    num_running: int
    """Requests that are being decoded."""
    num_waiting: int
    """Requests that wait for a slot."""
    tokens_total: int
    """Tokens sampled since the start."""
    kv_used_fraction: float
    """Fraction of the KV cache in use, 0 to 1."""
    idle_seconds: float
    """Seconds since the start in which nothing was decoded."""
    weight_version: int
    """Version of the live weights; -1 before the first adoption."""
    prompt_tokens_total: int = 0
    """Context tokens since the start, including contexts of requests that continued after an update."""
    cached_tokens_total: int = 0
    """Context tokens found in a prefix cache or shared with another request."""
    recomputed_tokens_total: int = 0
    """Response tokens computed again since the start, under new weights or to resume a response."""
    drafts: "DraftTotals | None" = None
    """Proposals since the start; None without speculation."""
    is_asleep: bool = False
    """True if the engine released its memory and has received no weights since."""


class Engine(Protocol):
    """Generation engine. One instance per rollout process; all methods run in one event loop."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """Features of this engine."""

    @property
    def max_tokens(self) -> int:
        """Max length of a context with its response."""

    async def run(self) -> None:
        """Serves until cancelled. Requests made before the start wait. Raises if the engine dies."""

    async def wait_ready(self) -> None:
        """Waits until the engine, whose :meth:`run` was started, can serve."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Decodes one request.

        Raises:
            ValueError: If the request can never be decoded, for example because it is empty, exceeds the
                model's max length or contains unknown tokens.
        """

    async def score(
        self, token_ids: Sequence[int], model_inputs: "ModelInputs | None" = None
    ) -> tuple[float, ...]:
        """Computes the log probability of every token but the first, given its prefix, at temperature 1.

        The engine does not use cached prefixes, so the result reflects the live weights. The call may wait
        until a paused engine resumes.

        Args:
            token_ids: At least two tokens.

        Returns:
            Float32 values, one fewer than there are tokens.

        Raises:
            ValueError: If the tokens can never be scored.
        """

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """Ends requests (None: all) between two steps; their results keep the tokens so far."""

    async def peek(self) -> "dict[str, GenerationResult]":
        """Returns a snapshot of the running requests by id, taken between two steps."""

    async def pause(self, *, drain: bool = False) -> None:
        """Stops between two steps and keeps all requests; with ``drain``, finishes running ones first."""

    async def resume(self) -> None:
        """Resumes after a pause; an engine that slept resumes only once it has adopted weights."""

    async def sleep(self) -> None:
        """Pauses and releases device memory: the KV cache and the weights' storage. Idempotent.

        Requests keep their slots and their tokens.
        """

    async def wake(self) -> None:
        """Reclaims the device memory. Idempotent.

        The engine decodes nothing before the next adoption. All requests then continue under the new weights,
        with a recomputed cache.
        """

    def weight_specs(self) -> "list[TensorSpec]":
        """Lists the tensors that an adoption must provide, by checkpoint name; tied weights once."""

    async def adopt_weights(self, version: int, tensors: "Mapping[str, Tensor]") -> float:
        """Copies verified tensors into the live model between two steps; running requests continue.

        Later tokens carry ``version``. Their KV prefix is recomputed unless the KV policy keeps it.

        Args:
            tensors: Every tensor of :meth:`weight_specs`.

        Returns:
            Seconds in which no token was produced.

        Raises:
            ValueError: If a tensor is missing, unknown or of another shape; nothing was changed.
        """

    def stats(self) -> EngineStats:
        """Returns gauges, without waiting for the engine."""


@runtime_checkable
class OpenEngine(Engine, Protocol):
    """Engine that can receive weights directly into its live parameters."""

    async def open_weights(
        self, plan: "WeightPlan", slots: "Sequence[Sequence[Tensor]]"
    ) -> "Place":
        """Stops between two steps and keeps all requests until :meth:`adopt_placed` or :meth:`close_weights`.

        May be called again if buckets of a version were placed and the version was not adopted.

        Args:
            plan: Layout of the received data.
            slots: Buffers that hold received data before it is placed; see
                :meth:`~services.weightsync.endpoints.WeightSink.open_weights`.

        Raises:
            ValueError: If the live weights cannot be written this way.
        """

    async def adopt_placed(self, version: int) -> None:
        """Adopts the placed buckets as a version; requests continue at the next :meth:`Engine.resume`."""

    async def close_weights(self) -> None:
        """Continues under the old weights; allowed only if no bucket was placed."""


def fewer_top(top: TopLogprobs, count: int) -> TopLogprobs:
    """Returns a copy with at most the ``count`` most likely tokens; the others join the last entry."""
    if top.shape[1] - 1 <= count:
        return top.copy()
    shortened = top[:, : count + 1].copy()
    shortened[:, count] = [-1, 0]
    shortened[:, count, 1] = np.logaddexp.reduce(top[:, count:, 1], axis=1)
    return shortened


def append_version(runs: list[VersionRun], version: int, num_tokens: int) -> None:
    """Adds tokens to run-length encoded versions, in place."""
    if num_tokens == 0:
        return
    if runs and runs[-1][0] == version:
        runs[-1] = (version, runs[-1][1] + num_tokens)
    else:
        runs.append((version, num_tokens))


def check_request(request: GenerationRequest, *, vocab_size: int, max_model_tokens: int) -> None:
    """Refuses a request that can never be decoded.

    Raises:
        ValueError: With the expected value, the actual value and a remedy.
    """
    length = len(request.context_ids)
    if length == 0:
        raise ValueError("the context has no tokens; expected at least one prompt token")
    if request.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {request.max_tokens}")
    if length + request.max_tokens > max_model_tokens:
        raise ValueError(
            f"the context has {length} tokens and {request.max_tokens} more are requested, but the "
            f"model's context has {max_model_tokens}; shorten the prompt or lower max_response_tokens"
        )
    _check_ids(request.context_ids, vocab_size)


def check_scorable(token_ids: Sequence[int], *, vocab_size: int, max_model_tokens: int) -> None:
    """Refuses tokens that can never be scored.

    Raises:
        ValueError: With the expected value, the actual value and a remedy.
    """
    # Engines that score through a generation request also draw one token after the given ones.
    if not 2 <= len(token_ids) < max_model_tokens:
        raise ValueError(
            f"scoring expects 2 to {max_model_tokens - 1} tokens, got {len(token_ids)}"
        )
    _check_ids(token_ids, vocab_size)


def check_supported(request: GenerationRequest, can: EngineCapabilities) -> None:
    """Refuses a request that needs a feature the engine lacks.

    Raises:
        ValueError: With the engine's name and the missing feature.
    """
    if request.stop_texts and not can.stop_texts:
        raise ValueError(f"engine {can.name!r} supports stop tokens only, not stop texts")
    check_inputs(request.model_inputs, can)
    reports_mask = request.returns_mask and can.sampling_masks
    if request.is_truncated and not (can.truncation or reports_mask):
        raise ValueError(
            f"engine {can.name!r} cannot sample with top_p, top_k or min_p and report logprobs of the "
            "whole distribution; remove them or use another engine"
        )
    if request.returns_mask and not can.sampling_masks:
        raise ValueError(f"engine {can.name!r} does not report which tokens could be drawn")
    if request.top_logprobs and not can.top_logprobs:
        raise ValueError(f"engine {can.name!r} does not report the most likely tokens")


def check_inputs(model_inputs: "ModelInputs | None", can: EngineCapabilities) -> None:
    """Refuses inputs besides token ids, which the engine would ignore.

    Raises:
        ValueError: With the engine's name.
    """
    if model_inputs is not None and model_inputs.tensors and not can.model_inputs:
        raise ValueError(f"engine {can.name!r} takes token ids only, no other inputs of the model")


def check_tensors(shapes: Mapping[str, Sequence[int]], tensors: "Mapping[str, Tensor]") -> None:
    """Refuses weights that do not fit the model, before anything is changed.

    Args:
        shapes: Shape of every tensor by name.

    Raises:
        ValueError: If a tensor is missing, unknown or of another shape.
    """
    if shapes.keys() != tensors.keys():
        missing_names = _some(shapes.keys() - tensors.keys())
        unknown_names = _some(tensors.keys() - shapes.keys())
        raise ValueError(
            f"weights do not match the model: missing {missing_names}, unknown {unknown_names}; trainer and "
            "rollout need the same model"
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != tuple(shape):
            raise ValueError(
                f"weight {name!r} must have shape {tuple(shape)}, got {tuple(tensors[name].shape)}; "
                "trainer and rollout need the same model"
            )


def _check_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    ids = np.frombuffer(array("q", token_ids), np.int64)  # three times as fast as min(token_ids)
    low, high = ids.min(), ids.max()
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token ids must be in 0..{vocab_size - 1}, got {low}..{high}; use the model's own tokenizer"
        )


def _some(names: Iterable[str]) -> str:
    """Lists up to three names, sorted."""
    ordered = sorted(names)
    rest = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + rest or "none"


# Characters at the start of a decoded text that may differ from those inside it: up to three bytes of a
# character that began before, and a space that SentencePiece's decoder leaves out.
_BROKEN_CHARACTERS = 4
Decode = Callable[[Sequence[int]], str]
"""Converts token ids to text."""


def ends_in_stop_text(request: GenerationRequest, new: Sequence[int], decode: Decode) -> bool:
    """Returns True if the last token completed one of the request's stop texts.

    Stop texts are matched in the text that rewards see: special tokens, also between the characters of a stop
    text, are left out.

    Args:
        request: Request whose stop texts are matched over the entire turn, which may begin in the context.
        new: Tokens of the response so far; at least one.
    """
    num_characters = max(map(len, request.stop_texts)) + _BROKEN_CHARACTERS
    num_tokens, num_all = num_characters, len(new) + request.turn_tokens
    while True:
        tail = [*new[-num_tokens:]]
        if num_earlier := min(num_tokens - len(tail), request.turn_tokens):
            tail = [*request.context_ids[-num_earlier:], *tail]
        text = decode(tail)
        # Special tokens have no text, and several tokens may spell one character.
        if len(text) >= num_characters or num_tokens >= num_all:
            return any(stop in text for stop in request.stop_texts)
        num_tokens *= 2


def split_stop_texts(
    texts: Sequence[str], tokenizer: Tokenizer
) -> tuple[tuple[str, ...], frozenset[int]]:
    """Separates stop texts that are special tokens, which decoded text omits, from other stop texts.

    Returns:
        Texts to search for in decoded text, and the ids of the special tokens.

    Raises:
        ValueError: If a text is empty, or mixes a special token with other text and so could never match.
    """
    special = tokenizer.textless_tokens
    plain = tuple(text for text in texts if text not in special)
    for text in plain:
        if not text:
            raise ValueError("a stop text is empty; expected at least one character")
        if inner := [token for token in special if token in text]:
            raise ValueError(
                f"the stop text {text!r} contains the special token {inner[0]!r}; a stop text must be one "
                "special token, or contain none"
            )
    return plain, frozenset(special[text] for text in texts if text in special)


def unspelled_stop_texts(texts: Sequence[str], tokenizer: Tokenizer) -> list[str]:
    """Returns the stop texts that no sequence of tokens spells, so that they can never end a response."""
    return [text for text in texts if not tokenizer.can_spell(text)]
