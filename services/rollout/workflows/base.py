"""An episode: what a workflow does to turn one prompt into one response.

A workflow is ordinary code that asks its episode for turns. Every turn is recorded, so an interrupted
episode can be resumed on any replica: the workflow runs again from its start, the recorded turns are
handed back without generating or calling anything, and generation goes on in the middle of the turn that
was cut.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from services.common.models.tokenizer import Tokenizer
from services.rollout.calls.pool import CallPool
from services.rollout.engines.base import (
    Engine,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    VersionRun,
    append_version,
)
from services.rollout.failures import GroupError
from services.rollout.prompts import Prompt

TOOL_VERSION = -1
"""Weight version of tokens that no policy sampled."""


class Interrupted(Exception):  # noqa: N818 -- an order, not an error
    """Generation was interrupted; the episode keeps everything that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A stretch of the response that was either sampled or observed."""

    token_ids: tuple[int, ...]
    """Tokens of the turn."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled token; 0 for observed ones."""
    version_runs: tuple[VersionRun, ...]
    """Weight versions, run-length coded; observed tokens have version -1."""
    finish_reason: FinishReason | None
    """How sampling ended; None for an observed turn."""

    @property
    def is_sampled(self) -> bool:
        """Whether the policy sampled these tokens."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """How the tokens of an episode are drawn and when it ends."""

    seed: int
    """Seed of this sample."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    max_response_tokens: int
    """Most tokens of the response, observed ones included."""
    stop_texts: tuple[str, ...]
    """Texts that end a turn."""
    segment_tokens: int | None = None
    """Tokens after which the episode is interrupted, wherever it is; None never is."""


class Episode:
    """One prompt and its growing response.

    Attributes:
        prompt: What is answered.
        turns: What happened so far.
        request_id: Names the episode's requests in the engine, one at a time.
        is_generating: Whether the engine works on it.
        is_interrupted: Whether it was told to stop at the next chance.
        call: Calls a function of the user's in a process of its own; see
            :meth:`services.rollout.calls.pool.CallPool.call`.
    """

    def __init__(
        self,
        prompt: Prompt,
        limits: EpisodeLimits,
        *,
        engine: Engine,
        tokenizer: Tokenizer,
        calls: CallPool,
        request_id: str,
        recorded: Sequence[Turn] = (),
    ) -> None:
        self.prompt = prompt
        self.turns: list[Turn] = []
        self.request_id = request_id
        self.is_generating = False
        self.is_interrupted = False
        self._limits = limits
        self._engine = engine
        self._tokenizer = tokenizer
        self._is_full = False
        self.call = calls.call
        self._recorded = list(recorded)
        self._started = _EMPTY

    @property
    def response_ids(self) -> list[int]:
        """All tokens after the prompt."""
        return [token for turn in self.turns for token in turn.token_ids]

    @property
    def remaining_tokens(self) -> int:
        """Tokens that the response may still grow by."""
        used = sum(len(turn.token_ids) for turn in self.turns)
        return self._limits.max_response_tokens - used

    @property
    def finish_reason(self) -> FinishReason:
        """How the last sampled turn ended; ``length`` if something did not fit into the response."""
        if self._is_full:
            return "length"
        sampled = [turn.finish_reason for turn in self.turns if turn.finish_reason is not None]
        return sampled[-1] if sampled else "length"

    @property
    def response_text(self) -> str:
        """Text of the last sampled turn: what the reward judges."""
        sampled = [turn for turn in self.turns if turn.is_sampled]
        return self.text(sampled[-1]) if sampled else ""

    @property
    def sampled_versions(self) -> list[int]:
        """Weight versions of the sampled stretches; see :func:`sampled_versions`."""
        return sampled_versions(self.turns)

    def text(self, turn: Turn) -> str:
        """Text of a turn, special tokens left out."""
        return self._tokenizer.decode(turn.token_ids)

    def recorded(self, running: GenerationResult | None = None) -> tuple[Turn, ...]:
        """All turns, those that wait to be handed back included.

        Args:
            running: What the engine has so far of the turn that is being sampled.
        """
        turns = [*self.turns]
        if self.is_generating:
            turns.append(self._started if running is None else _continued(self._started, running))
        turns += self._recorded
        return tuple(turn for turn in turns if turn.token_ids or turn.finish_reason != "aborted")

    async def generate(self, *, max_tokens: int | None = None) -> Turn:
        """Sample a turn.

        Args:
            max_tokens: Bound on this turn; by default only the response's bound holds.

        Raises:
            Interrupted: If generation was interrupted; what was sampled is recorded.
            ValueError: If the response has no room left.
        """
        recorded = self._next_recorded(sampled=True)
        if recorded is not None and recorded.finish_reason != "aborted":
            self.turns.append(recorded)
            return recorded
        room = self.remaining_tokens
        if room < 1:
            raise ValueError("the response has no room left; look at remaining_tokens first")
        if max_tokens is not None:
            room = min(room, max_tokens)
        self._started = recorded or _EMPTY
        turn = self._started if self.is_interrupted else await self._sample(room)
        self.turns.append(turn)
        if turn.finish_reason == "aborted":
            raise Interrupted
        return turn

    async def observe(self, call: Callable[[], Awaitable[str]]) -> Turn | None:
        """Add what the world answered, for example the result of a tool.

        Args:
            call: Makes the text. Not called when the turn was recorded before an interruption.

        Returns:
            The turn, or None if the text does not fit into the response any more.
        """
        turn = self._next_recorded(sampled=False)
        if turn is None:
            token_ids = tuple(self._tokenizer.encode(await call()))
            if len(token_ids) > self.remaining_tokens:
                self._is_full = True
                return None
            turn = Turn(
                token_ids=token_ids,
                logprobs=(0.0,) * len(token_ids),
                version_runs=((TOOL_VERSION, len(token_ids)),) if token_ids else (),
                finish_reason=None,
            )
        self.turns.append(turn)
        return turn

    def _within_segment(self, num_tokens: int) -> int:
        """Cut a number of new tokens to what is left of this segment."""
        if self._limits.segment_tokens is None:
            return num_tokens
        sampled = sum(len(turn.token_ids) for turn in self.turns if turn.is_sampled)
        total = sampled + len(self._started.token_ids)
        return min(num_tokens, self._limits.segment_tokens - total % self._limits.segment_tokens)

    def _next_recorded(self, *, sampled: bool) -> Turn | None:
        """Take the next recorded turn; a workflow that changed its mind is a fault of its own."""
        if not self._recorded:
            return None
        turn = self._recorded.pop(0)
        if turn.is_sampled != sampled:
            raise ValueError(
                "the workflow took another course when it was resumed: a turn was "
                f"{'sampled' if turn.is_sampled else 'observed'} before the interruption and is "
                f"{'sampled' if sampled else 'observed'} now; workflows must not depend on time or chance"
            )
        return turn

    async def _sample(self, room: int) -> Turn:
        """Generate the rest of the turn that was started."""
        started = self._started
        sampled = [turn for turn in (*self.turns, started) if turn.is_sampled]
        versions = [version for turn in sampled for version, _ in turn.version_runs]
        request = GenerationRequest(
            request_id=self.request_id,
            context_ids=(*self.prompt.token_ids, *self.response_ids, *started.token_ids),
            max_tokens=self._within_segment(room - len(started.token_ids)),
            seed=self._limits.seed,
            draw_offset=sum(len(turn.token_ids) for turn in sampled),
            oldest_version=min(versions, default=None),
            temperature=self._limits.temperature,
            stop_token_ids=frozenset({self._tokenizer.eos_id}),
            stop_texts=self._limits.stop_texts,
        )
        self.is_generating = True
        try:
            result = await self._engine.generate(request)
        except ValueError as error:
            raise GroupError("request_refused", str(error), retryable=False) from error
        finally:
            self.is_generating = False
        if result.finish_reason == "length" and request.max_tokens < room - len(started.token_ids):
            result = replace(result, finish_reason="aborted")
        return _continued(started, result)


def version_runs(turns: Iterable[Turn]) -> list[VersionRun]:
    """Weight versions of all tokens of some turns, run-length coded."""
    runs: list[VersionRun] = []
    for turn in turns:
        for version, num_tokens in turn.version_runs:
            append_version(runs, version, num_tokens)
    return runs


def sampled_versions(turns: Iterable[Turn]) -> list[int]:
    """Weight versions of the sampled stretches, in order, without repeats in a row."""
    versions: list[int] = []
    for version, _ in version_runs(turn for turn in turns if turn.is_sampled):
        if versions[-1:] != [version]:
            versions.append(version)
    return versions


def _continued(started: Turn, result: GenerationResult) -> Turn:
    """A turn and what was sampled after it."""
    runs = list(started.version_runs)
    for version, num_tokens in result.version_runs:
        append_version(runs, version, num_tokens)
    return Turn(
        token_ids=started.token_ids + result.token_ids,
        logprobs=started.logprobs + result.logprobs,
        version_runs=tuple(runs),
        finish_reason=result.finish_reason,
    )


class Workflow(Protocol):
    """Turns a prompt into a response.

    A run's own workflow is a class that is called with ``rollout.workflow_arguments`` and has this method.
    """

    async def run(self, episode: Episode) -> None:
        """Ask the episode for turns until the response is complete."""
        ...


_EMPTY = Turn(token_ids=(), logprobs=(), version_runs=(), finish_reason="aborted")
