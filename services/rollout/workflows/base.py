"""Episodes, which record everything a workflow does to turn one prompt into one response.

A workflow is ordinary code that asks its episode for turns. The episode records every turn, so any
replica can resume an interrupted episode: the workflow runs again from its start, the episode
returns the recorded turns without sampling or calling anything, and generation continues inside the
turn that was cut.
"""

import asyncio
import inspect
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from services.common.callables import load_callable
from services.common.models.tokenizer import Tokenizer
from services.common.runspec.examining import argument_problems
from services.common.runspec.rollout import WORKFLOWS, RolloutSpec
from services.rollout.calls.outside import AddressPolicy
from services.rollout.calls.pool import CallPool
from services.rollout.data.prompts import Prompt
from services.rollout.engines.base import (
    Engine,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    OnTokens,
)
from services.rollout.failures import CallError, GroupError
from services.rollout.workflows.turns import (
    NOTHING_SAMPLED,
    Conversation,
    Turn,
    concat_inputs,
    divided,
    flattened,
    merged,
    num_sampled,
    num_tokens,
    observed,
    routed_experts,
    sampled_versions,
    token_ids,
    with_turn,
)

if TYPE_CHECKING:
    from services.rollout.data.images import ImageReader
    from services.rollout.sandbox.pool import EpisodeSandbox
    from services.wire.data.model_inputs import ModelInputs


_Observation = str | Sequence[int] | Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Sampling parameters and limits of an episode."""

    seed: int
    """Seed of this sample."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling; 1 allows all tokens."""
    top_k: int = 0
    """Number of most likely tokens that may be drawn; 0 allows all."""
    returns_mask: bool = False
    """True if the engine reports which tokens could be drawn."""
    top_logprobs: int = 0
    """Number of most likely tokens that the trainer needs to know in place of each sampled one."""
    max_response_tokens: int
    """Max tokens of the response to a prompt of any length, including observed tokens."""
    max_tokens: int
    """Max tokens of a prompt with its response, which is the engine's context length."""
    stop_texts: tuple[str, ...]
    """Texts that end a turn."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end a turn, in addition to the tokenizer's."""
    segment_tokens: int | None = None
    """Tokens after which the episode is interrupted, at any position; None disables segments."""

    def response_tokens(self, *, prompt_tokens: int) -> int:
        return min(self.max_response_tokens, self.max_tokens - prompt_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingChoice:
    """Sampling parameters and limits of one turn."""

    seed: int
    """Seed of the turn's random stream."""
    offset: int
    """Tokens drawn from the stream before the turn."""
    max_tokens: int
    """Max tokens of the turn."""
    stop_texts: tuple[str, ...]
    """Texts that end the turn."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the turn, in addition to the episode's."""


class Interrupted(Exception):  # noqa: N818 -- a signal, not an error
    """Ends a workflow whose generation was interrupted; the episode keeps all its turns."""


class Episode:
    """One prompt and its growing response.

    Attributes:
        prompt: The prompt to answer.
        limits: Sampling parameters and limits.
        turns: Turns so far; if there are several conversations, the turns of the one continued last.
        conversations: An agent's conversations, in order of their start, except those that another continues.
        trained: The conversations that train; None if the one continued last trains.
        num_rewritten: Number of requests whose replies differ from the recorded ones.
        measured: Measurements by name, stored with the terms of the reward.
        is_complete: True after the workflow finished.
        is_full: True if something did not fit into the response.
        is_served: True if an agent drives the episode over HTTP. Then the first turn is the prompt,
            as the agent wrote it; see the extra ``agents``.
        is_interrupted: True after a stop at the next opportunity was requested.
        earned: Reward that the environment or the agent gave; see
            :func:`services.rollout.rewards.base.earned_terms`.
        sandbox: Sandbox of this episode; None if ``rollout.sandbox`` is not set.
        images: Reads images of observations; None if the model takes no images.
        tokenizer: The model's tokenizer.
        call: Calls a user's function in a separate process; see
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
        self.limits = limits
        self.turns: list[Turn] = []
        self.conversations: list[Conversation] = []
        self.trained: Sequence[Conversation] | None = None
        self.num_rewritten = 0
        self.measured: dict[str, float] = {}
        self.is_full = False
        self.is_complete = False
        self.is_served = False
        self.is_interrupted = False
        self.earned: object = None
        self.sandbox: EpisodeSandbox | None = None
        self.images: ImageReader | None = None
        self.tokenizer = tokenizer
        self.call = calls.call
        self._engine = engine
        self._request_id = request_id
        self._numbers = itertools.count()
        self._recorded = divided(recorded)
        self._active: dict[str, tuple[tuple[Turn, ...], Turn]] = {}

    @property
    def request_ids(self) -> list[str]:
        return list(self._active)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Tokens before the response."""
        if not self.is_served:
            return self.prompt.token_ids
        return self.turns[0].token_ids if self.turns else ()

    @property
    def response_turns(self) -> tuple[Turn, ...]:
        return tuple(self.turns[1:] if self.is_served else self.turns)

    @property
    def response_ids(self) -> tuple[int, ...]:
        """All tokens after the prompt."""
        return token_ids(self.response_turns)

    @property
    def remaining_tokens(self) -> int:
        """Tokens by which the response may still grow."""
        limit = self.limits.response_tokens(prompt_tokens=len(self.prompt_ids))
        return limit - num_tokens(self.response_turns)

    @property
    def finish_reason(self) -> FinishReason:
        """Finish reason of the last sampled turn; ``length`` if something did not fit into the response."""
        if self.is_full:
            return "length"
        sampled = [turn.finish_reason for turn in self.turns if turn.finish_reason is not None]
        return sampled[-1] if sampled else "length"

    @property
    def response_text(self) -> str:
        """Text of the last sampled turn, which the reward scores."""
        sampled = [turn for turn in self.turns if turn.is_sampled]
        return self.text(sampled[-1]) if sampled else ""

    @property
    def sequences(self) -> Sequence[Conversation]:
        """Conversations that train, each starting with its prompt."""
        if not self.is_served:
            prompt = self.prompt
            first = observed(
                prompt.token_ids, model_inputs=prompt.model_inputs, pictures=prompt.pictures
            )
            return [(first, *self.turns)]
        return [tuple(self.turns)] if self.trained is None else self.trained

    @property
    def num_segments(self) -> int:
        """Max number of single-version stretches in a conversation that trains."""
        return max(len(sampled_versions(conversation)) for conversation in self.sequences)

    def text(self, turn: Turn) -> str:
        """Returns the text of a turn without special tokens."""
        return self.tokenizer.decode(turn.token_ids)

    def recorded(self, running: Mapping[str, GenerationResult]) -> tuple[Turn, ...]:
        """Returns all turns, from which another attempt resumes this episode.

        Args:
            running: Partial results of the requests that the engine is decoding.
        """
        reached = self.conversations or ([tuple(self.turns)] if self.turns else [])
        for request_id, (before, cut_turn) in self._active.items():
            result = running.get(request_id)
            turn = cut_turn if result is None else cut_turn.continued(result)
            reached = with_turn(reached, before, turn)
        return flattened(
            tuple(turn for turn in conversation if turn.token_ids or not turn.is_cut)
            for conversation in merged(reached, self._recorded)
        )

    def replayed(self, turns: Sequence[Turn], *, number: int = 0) -> Turn | None:
        """Returns the turn that followed these turns before an interruption; None if there is none.

        Args:
            number: Index of the turn if several followed.
        """
        if not self._recorded:
            return None
        num_turns, before = len(turns), tuple(turns)
        recorded = [
            row[num_turns]
            for row in self._recorded
            if len(row) > num_turns and row[:num_turns] == before
        ]
        following = list(dict.fromkeys(recorded))
        return following[number] if number < len(following) else None

    async def generate(self, *, max_tokens: int | None = None) -> Turn:
        """Samples a turn.

        Args:
            max_tokens: Max tokens of this turn; by default only the response's limit applies.

        Raises:
            Interrupted: If generation was interrupted; the sampled tokens are recorded.
            ValueError: If the response has no room left.
        """
        cut_turn = self._next_recorded(sampled=True)
        room = self.remaining_tokens
        if cut_turn is None and room < 1:
            raise ValueError("the response has no tokens left; check remaining_tokens first")
        draw = SamplingChoice(
            seed=self.limits.seed,
            offset=num_sampled(self.turns),
            max_tokens=room if max_tokens is None else min(room, max_tokens),
            stop_texts=self.limits.stop_texts,
        )
        turn = await self.sample_after(self.turns, draw, cut_turn=cut_turn)
        self.turns.append(turn)
        if turn.is_cut:
            raise Interrupted
        return turn

    async def observe(
        self, call: Callable[[], Awaitable[_Observation] | _Observation]
    ) -> Turn | None:
        """Adds a turn that the policy did not sample, for example the result of a tool.

        Args:
            call: Function, plain or async, that returns the text, its token ids, or a turn of
                :meth:`look`. It is not called if the turn was recorded before an interruption.

        Returns:
            The turn, or None if the text would leave the response no room for a further turn.
        """
        turn = self._next_recorded(sampled=False)
        if turn is None:
            begin = time.perf_counter()
            answer = call()
            observation = await answer if isinstance(answer, Awaitable) else answer
            continues = bool(self.turns or self.prompt_ids)
            ids = (
                self.tokenizer.encode(observation, continues=continues)
                if isinstance(observation, str)
                else observation
            )
            turn = ids if isinstance(ids, Turn) else observed(ids)
            self._check_ids(turn.token_ids)
            turn = replace(turn, seconds=time.perf_counter() - begin)
            if len(turn.token_ids) >= self.remaining_tokens:
                self.is_full = True
                return None
        self.turns.append(turn)
        return turn

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        """Raises CallError if an id is not in the vocabulary; no engine checks ids after the last reply."""
        size = self.tokenizer.vocab_size
        if wrong := [token_id for token_id in token_ids if not 0 <= token_id < size]:
            raise CallError(
                "invalid_value",
                f"an observation has the token id {wrong[0]}, but ids are 0 to {size - 1}; use "
                "episode.tokenizer",
            )

    async def look(
        self,
        token_ids: Sequence[int],
        images: Sequence[Any],
        *,
        after: Sequence[Turn] | None = None,
    ) -> Turn:
        """Returns an observed turn with images, without adding it to the episode.

        Args:
            token_ids: Tokens of the turn, with one placeholder for each image.
            images: Data URLs, http(s) URLs, bytes or Pillow images, in order.
            after: Turns before the new one, without the data's prompt; by default the episode's turns.

        Raises:
            CallError: If an image is broken, too large or not allowed, there are too many, or the model takes
                no images.
        """
        if self.images is None:
            raise CallError(
                "invalid_image",
                "an observation has images, but model.images is false; set it to true, or return text",
            )
        turns = self.turns if after is None else after
        num_before = 0 if self.is_served else len(self.prompt.token_ids)
        try:
            ids, inputs, pictures = await asyncio.to_thread(
                self.images.inputs_of,
                token_ids,
                images,
                folder=None,
                origin="an observation",
                num_tokens=num_before + num_tokens(turns),
                earlier=self._inputs_before(turns),
            )
        except GroupError as error:
            raise CallError("invalid_image", f"{error.reason}: {error.message}") from error
        return observed(ids, model_inputs=inputs, pictures=pictures)

    async def sample_after(
        self,
        turns: Sequence[Turn],
        draw: SamplingChoice,
        *,
        cut_turn: Turn | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Turn:
        """Samples the turn that follows the given ones, which need not be the episode's own.

        Args:
            cut_turn: The turn as far as it was sampled before an interruption; None for a new turn.
            on_tokens: Receives the turn's tokens, as far as the engine streams them.

        Returns:
            The turn; it is cut if the episode was interrupted.

        Raises:
            GroupError: If the engine refuses the context.
        """
        cut_turn = cut_turn or NOTHING_SAMPLED
        if on_tokens is not None:
            on_tokens(cut_turn.token_ids, cut_turn.logprobs)
        if self.is_interrupted or not cut_turn.is_cut:
            return cut_turn
        num_left = draw.max_tokens - len(cut_turn.token_ids)
        request = self._request(tuple(turns), cut_turn, draw, num_left, on_tokens)
        self._active[request.request_id] = (tuple(turns), cut_turn)
        begin = time.perf_counter()
        try:
            result = await self._engine.generate(request)
        except ValueError as error:
            raise GroupError("request_refused", str(error), retryable=False) from error
        finally:
            del self._active[request.request_id]
        if result.finish_reason == "length" and request.max_tokens < num_left:
            result = replace(result, finish_reason="aborted")
        return cut_turn.continued(result, time.perf_counter() - begin)

    def _request(
        self,
        turns: tuple[Turn, ...],
        cut_turn: Turn,
        draw: SamplingChoice,
        max_tokens: int,
        on_tokens: OnTokens | None,
    ) -> GenerationRequest:
        before = () if self.is_served else self.prompt.token_ids
        versions = sampled_versions((*turns, cut_turn))
        routed = routed_experts((*turns, cut_turn))
        return GenerationRequest(
            request_id=f"{self._request_id}#{next(self._numbers)}",
            context_ids=before + token_ids((*turns, cut_turn)),
            max_tokens=self._within_segment(max_tokens, num_sampled((*turns, cut_turn))),
            seed=draw.seed,
            draw_offset=draw.offset + len(cut_turn.token_ids),
            model_inputs=self._inputs_before(turns),
            experts_from=0 if routed is None else len(routed),
            oldest_version=min(versions, default=None),
            temperature=self.limits.temperature,
            top_p=self.limits.top_p,
            top_k=self.limits.top_k,
            returns_mask=self.limits.returns_mask,
            top_logprobs=self.limits.top_logprobs,
            stop_token_ids=(
                self.tokenizer.stop_ids | self.limits.stop_token_ids | draw.stop_token_ids
            ),
            stop_texts=draw.stop_texts,
            turn_tokens=len(cut_turn.token_ids),
            on_tokens=on_tokens,
        )

    def _inputs_before(self, turns: Sequence[Turn]) -> "ModelInputs | None":
        """Returns the model's inputs besides tokens for a prompt and the turns after it; None without any."""
        first = None if self.is_served else self.prompt.model_inputs
        return concat_inputs([first, *(turn.model_inputs for turn in turns)])

    def _within_segment(self, max_tokens: int, num_earlier: int) -> int:
        """Limits a number of new tokens to the rest of the current segment."""
        segment = self.limits.segment_tokens
        return max_tokens if segment is None else min(max_tokens, segment - num_earlier % segment)

    def _next_recorded(self, *, sampled: bool) -> Turn | None:
        """Returns the next recorded turn, or None. Raises ValueError if the resumed workflow differs."""
        turn = self.replayed(self.turns)
        if turn is not None and turn.is_sampled != sampled:
            raise ValueError(
                "the workflow behaved differently when it was resumed: a turn was "
                f"{'sampled' if turn.is_sampled else 'observed'} before the interruption and is "
                f"{'sampled' if sampled else 'observed'} now; a workflow must not depend on time or "
                "randomness"
            )
        return turn


class Workflow(Protocol):
    """Turns a prompt into a response.

    A custom workflow is a class with this method; its constructor receives ``rollout.workflow_arguments``.
    """

    async def run(self, episode: Episode) -> None:
        """Asks the episode for turns until the response is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowResources:
    """Services of the rollout for a workflow that starts servers or processes."""

    calls: CallPool
    """Processes that call functions of users."""
    reach: AddressPolicy
    """Policy of the addresses that the workflow may reach."""
    tokenizer: Tokenizer | None = None
    """The model's tokenizer; None if prompts do not use its chat template."""
    temperature: float = 1.0
    """Sampling temperature of the run."""
    bind: str = "127.0.0.1:0"
    """``host:port`` of an endpoint for agents; port 0 selects a free one."""
    host: str = "127.0.0.1"
    """Host name by which agents reach that endpoint."""


@runtime_checkable
class ServingWorkflow(Protocol):
    """A workflow that starts servers or processes, which run as long as the rollout."""

    def serving(self, resources: WorkflowResources) -> AbstractAsyncContextManager[None]:
        """Starts them for the block. Raises ValueError, with the key, if the run cannot use them."""


@runtime_checkable
class TokenizerWorkflow(Protocol):
    """A workflow that only some tokenizers and chat templates allow."""

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Raises ValueError, with the key and the fix, if the workflow cannot use the tokenizer.

        Args:
            tokenizer: The model's tokenizer; None if prompts do not use its chat template.
        """


@runtime_checkable
class CodeWorkflow(Protocol):
    """A workflow whose arguments name functions or classes."""

    def code_problems(self) -> Iterator[str]:
        """Yields why they cannot be imported or called, each with its key."""


def load_workflow(spec: RolloutSpec) -> Workflow:
    """Creates the run's workflow with its arguments.

    Raises:
        ValueError: If the workflow does not exist, does not accept the arguments, or has no ``run``; with one
            line for each wrong argument of a built-in workflow.
    """
    make = load_callable(WORKFLOWS.get(spec.workflow, spec.workflow))
    if spec.workflow in WORKFLOWS:
        key = "rollout.workflow_arguments"
        if problems := [*argument_problems(make, spec.workflow_arguments, key=key)]:
            raise ValueError("\n".join(problems))
    try:
        workflow: Workflow = make(**spec.workflow_arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"rollout.workflow {spec.workflow!r} cannot be created with the arguments "
            f"{sorted(spec.workflow_arguments)} ({error}); check rollout.workflow_arguments"
        ) from error
    except Exception as error:
        raise ValueError(
            f"rollout.workflow {spec.workflow!r} raised {error!r} when it was created; correct the class"
        ) from error
    if not inspect.iscoroutinefunction(getattr(workflow, "run", None)):
        raise ValueError(
            f"rollout.workflow {spec.workflow!r} needs a method 'async def run(self, episode)', "
            f"got {type(workflow).__name__}; add the method"
        )
    return workflow


class SingleTurn:
    """Samples one turn."""

    async def run(self, episode: Episode) -> None:
        await episode.generate()
