"""Samples and scores the members of one prompt group that this replica was assigned."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from services.common.models.tokenizer import Tokenizer
from services.common.runspec.data import kind_of
from services.common.runspec.rollout import RolloutSpec
from services.common.task_group import TaskGroup, is_cancelled, unwrapped
from services.common.telemetry import tracing
from services.rollout import metrics
from services.rollout.calls.pool import CallPool
from services.rollout.data.images import ImageReader
from services.rollout.data.prompts import Curriculum, Prompt
from services.rollout.engines.base import Engine, GenerationResult, split_stop_texts
from services.rollout.failures import CallError, GroupError
from services.rollout.rewards.answers import BEGIN
from services.rollout.rewards.base import Reward, RewardInput, Score, sum_of_scores
from services.rollout.rewards.scorer import Comparison
from services.rollout.sampling.progress_cache import GroupProgress, MemberProgress
from services.rollout.sampling.sample import (
    Sample,
    answer_digest,
    demonstration_sample,
    placed_rewards,
)
from services.rollout.sandbox.service import SandboxService
from services.rollout.workflows.base import Episode, EpisodeLimits, Interrupted, Workflow
from services.rollout.workflows.training import history_of
from services.rollout.workflows.turns import Turn, flattened, num_sampled, trained_once
from services.wire.workers import GroupAssignment

logger = logging.getLogger(__name__)
_END_TOKENS = 8
"""Tokens at the end of a prompt that may begin the reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupServices:
    """Collaborators that every running group of this replica uses."""

    engine: Engine
    tokenizer: Tokenizer
    workflow: Workflow
    """Runs the episodes."""
    reward: Reward
    """Scores finished episodes."""
    calls: CallPool
    """Runs the workflow's tool calls."""
    comparison: Callable[[str], Comparison | None] = lambda _: None
    """Returns, for a split, the reward that scores members against each other; None if the split has none."""
    images: ImageReader | None = None
    """Reads images of observations; None if the model takes no images."""
    sandboxes: SandboxService | None = None
    """Runs the sandboxes of episodes, if the run has them."""
    curriculum: Curriculum | None = None
    """Decides which prompts are worth sampling, if the run names a function for it."""
    top_logprobs: int = 0
    """Number of most likely tokens that the trainer needs to know in place of each sampled one."""


class RunningGroup:
    """Samples all assigned members concurrently; the first permanent failure cancels the others.

    Attributes:
        assignment: The group and the members to generate.
        is_interrupted: True after :meth:`interrupt` was called.
        is_cut: True if the group ended before all members were complete, because it was interrupted
            or reached the end of a segment.
        stalled: Reason of the interruption if the group stalled, otherwise empty.
    """

    def __init__(
        self, assignment: GroupAssignment, services: GroupServices, spec: RolloutSpec
    ) -> None:
        self.assignment = assignment
        self.is_interrupted = False
        self.is_cut = False
        self.stalled = ""
        self._is_training = kind_of(assignment.split) == "train"
        self._services = services
        self._spec = spec
        self._earlier: GroupProgress = {}
        self._episodes: dict[int, Episode] = {}
        self._num_failed_scores: dict[int, int] = {}
        self._scores: dict[int, Score] = {}
        self._reward_inputs: dict[int, RewardInput] = {}
        self._members: dict[int, asyncio.Task[Sample | None]] = {}
        self._stops = split_stop_texts(spec.sampling.stop, services.tokenizer)
        self._opens_reasoning: dict[tuple[int, ...], bool] = {}
        """By the last tokens of a prompt; a workflow may render its episode's prompt again."""

    async def sample(self, prompt: Prompt, progress: GroupProgress) -> list[Sample]:
        """Samples and scores all members; returns no samples if the group was cut.

        Args:
            progress: Progress of an earlier attempt, by member.

        Raises:
            GroupError: If a member failed permanently.
        """
        members = self.assignment.members
        self._earlier = {member: progress[member] for member in members if member in progress}
        with unwrapped(GroupError):
            async with TaskGroup() as tasks:
                for member in members:
                    self._members[member] = tasks.create_task(self._sample_member(prompt, member))
        self.is_cut = any(
            task.cancelled() or task.result() is None for task in self._members.values()
        )
        if self.is_cut:
            return []
        samples = [task.result() for task in self._members.values()]
        finished = [sample for sample in samples if sample is not None]
        comparison = self._services.comparison(self.assignment.split)
        return finished if comparison is None else await self._compared(finished, comparison)

    def interrupt(self) -> Collection[str]:
        """Requests a stop and returns the engine requests that the caller must abort.

        Aborted requests keep their tokens. Running scores and tool calls are cancelled; they run
        again when the group is resumed.
        """
        self.is_interrupted = True
        for member, episode in self._episodes.items():
            episode.is_interrupted = True
            if not episode.request_ids:
                self._members[member].cancel()
        return [name for episode in self._episodes.values() for name in episode.request_ids]

    def marks(
        self, running: Mapping[str, GenerationResult], tokens_total: int
    ) -> Mapping[int, int]:
        """Returns a progress mark for each unfinished member, which changes with every token or call.

        Args:
            running: Partial results of the requests that the engine is decoding.
            tokens_total: Token counter of the engine. It is part of the mark of a request that
                waits for a slot, so that a waiting member does not count as stalled while the
                engine generates tokens.
        """
        marks: dict[int, int] = {}
        for member, episode in self._episodes.items():
            if member in self._scores:
                continue
            generated = [running[name].token_ids for name in episode.request_ids if name in running]
            num_waiting = len(episode.request_ids) - sum(map(bool, generated))
            turns = sum(map(len, (episode.turns, *episode.conversations)))
            turns += self._num_failed_scores[member]
            marks[member] = (turns << 32) + sum(map(len, generated)) + num_waiting * tokens_total
        return marks

    def progress(self, running: Mapping[str, GenerationResult]) -> GroupProgress:
        """Returns the progress of all members so far.

        Args:
            running: Partial results of the requests that the engine is decoding.
        """
        progress: dict[int, MemberProgress] = {}
        for member, episode in self._episodes.items():
            turns = episode.recorded(running)
            failed = self._num_failed_scores[member]
            if turns:
                progress[member] = MemberProgress(
                    num_failed_scores=failed, turns=turns, score=self._scores.get(member)
                )
        return {**self._earlier, **progress}

    async def _sample_member(self, prompt: Prompt, member: int) -> Sample | None:
        """Samples and scores one member; tries again after a failed score if the specification allows."""
        if prompt.demonstrations:
            return await demonstration_sample(
                prompt, member, self._spec, self._services.engine, is_training=self._is_training
            )
        earlier = self._earlier.get(member, _NOTHING)
        num_tries = self._spec.max_attempts if self._spec.on_reward_failure == "regenerate" else 1
        recorded: Sequence[Turn] = earlier.turns
        for num_failed in range(earlier.num_failed_scores, num_tries):
            self._num_failed_scores[member] = num_failed
            episode = self._episodes[member] = self._episode(prompt, member, num_failed, recorded)
            recorded = ()
            try:
                if not await self._run_workflow(episode):
                    return None
                self._check_segments(episode)
                reward_input = self._reward_inputs[member] = self._input(episode)
                score = earlier.score or await self._score(reward_input)
            except CallError as error:
                failure = error
                continue
            self._scores[member] = score
            return self._sample(member, episode, score=score, failed=False)
        if self._spec.on_reward_failure == "mask" and episode.response_ids:
            return self._sample(member, episode, score=Score(0.0), failed=True)
        source = "reward" if episode.is_complete else "workflow"
        raise GroupError(f"{source}_{failure.kind}", failure.message, retryable=True)

    def _episode(
        self, prompt: Prompt, member: int, num_failed: int, recorded: Sequence[Turn]
    ) -> Episode:
        assignment = self.assignment
        index = assignment.members.index(member)
        seed = assignment.seeds[index]
        stop_texts, special_ids = self._stops
        episode = Episode(
            prompt,
            EpisodeLimits(
                seed=seed if num_failed == 0 else _derived_seed(seed, num_failed),
                temperature=assignment.temperatures[index],
                top_p=self._spec.sampling.top_p,
                top_k=self._spec.sampling.top_k,
                # Some engines truncate only if they report masks, which held-out samples do not need.
                returns_mask=self._spec.sampling.is_truncated
                and (self._is_training or not self._services.engine.capabilities.truncation),
                top_logprobs=self._services.top_logprobs if self._is_training else 0,
                max_response_tokens=self._spec.max_response_tokens,
                max_tokens=self._services.engine.max_tokens,
                stop_texts=stop_texts,
                stop_token_ids=special_ids | frozenset(self._spec.sampling.stop_token_ids),
                # An evaluation measures one weight version, so held-out responses are not split
                # into segments.
                segment_tokens=self._spec.segment_tokens if self._is_training else None,
            ),
            engine=self._services.engine,
            tokenizer=self._services.tokenizer,
            calls=self._services.calls,
            request_id=f"{assignment.group_id}.{member}/{assignment.attempt}.{num_failed}",
            recorded=recorded,
        )
        episode.images = self._services.images
        return episode

    async def _run_workflow(self, episode: Episode) -> bool:
        """Runs an episode; returns True if it finished and was not interrupted."""
        episode.is_interrupted = self.is_interrupted
        try:
            with tracing.span("rollout.generate") as span:
                await self._run_in_sandbox(episode)
                _check_sampled(episode)
                span["gen_ai.usage.output_tokens"] = len(episode.response_ids)
                if tracing.is_collecting():
                    span["num_segments"] = episode.num_segments
        except Interrupted:
            return False
        except CallError as error:
            metrics.WORKFLOW_FAILURES.labels(kind=error.kind).inc()
            raise
        except GroupError:
            raise
        # A workflow may be the user's code.
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            logger.exception("workflow failed")
            raise GroupError(
                "workflow_error", f"{type(error).__name__}: {error}", retryable=True
            ) from error
        episode.is_complete = True
        return not self.is_interrupted

    async def _run_in_sandbox(self, episode: Episode) -> None:
        if self._services.sandboxes is None:
            await self._services.workflow.run(episode)
            return
        async with self._services.sandboxes.open(episode.prompt.row) as sandbox:
            episode.sandbox = sandbox
            await self._services.workflow.run(episode)
            episode.measured = {**episode.measured, **sandbox.measured}

    def _check_segments(self, episode: Episode) -> None:
        """Raises GroupError if a response has more weight versions than ``rollout.max_segments``."""
        maximum = self._spec.max_segments
        if maximum is not None and (num_segments := episode.num_segments) > maximum:
            raise GroupError(
                "too_many_segments",
                f"a response has tokens of {num_segments} weight versions, more than "
                f"rollout.max_segments ({maximum}); raise it or publish less often",
                retryable=True,
            )

    async def _compared(self, samples: Sequence[Sample], comparison: Comparison) -> list[Sample]:
        """Adds the comparison's scores to those of the members; failed members are not compared."""
        scored = [sample for sample in samples if sample.finish_reason != "failed"]
        if not scored:
            return [*samples]
        reward_inputs = [self._reward_inputs[sample.member] for sample in scored]
        for _ in range(self._spec.max_attempts):
            try:
                with metrics.REWARD_SECONDS.time(), tracing.span("reward.compare"):
                    scores = await comparison.score(reward_inputs)
                break
            except CallError as error:
                metrics.REWARD_FAILURES.labels(kind=error.kind).inc()
                failure = error
        else:
            if self._spec.on_reward_failure == "mask":
                return [replace(s, finish_reason="failed", score=Score(0.0)) for s in samples]
            raise GroupError(f"reward_{failure.kind}", failure.message, retryable=True)
        added_scores = dict(zip([sample.member for sample in scored], scores, strict=True))
        return [
            replace(s, score=sum_of_scores(s.score, added_scores[s.member]))
            if s.member in added_scores
            else s
            for s in samples
        ]

    async def _score(self, reward_input: RewardInput) -> Score:
        try:
            with metrics.REWARD_SECONDS.time(), tracing.span("reward.score"):
                return await self._services.reward.score(reward_input)
        except CallError as error:
            metrics.REWARD_FAILURES.labels(kind=error.kind).inc()
            raise

    def _input(self, episode: Episode) -> RewardInput:
        prompt = episode.prompt
        lengths = tuple(len(turn.token_ids) for turn in episode.turns if turn.is_sampled)
        end = prompt.token_ids[-_END_TOKENS:]
        if end not in self._opens_reasoning:
            text = self._services.tokenizer.decode(end, keeps_special=True)
            self._opens_reasoning[end] = text.rstrip().endswith(BEGIN)
        return RewardInput(
            prompt=prompt.text,
            response=episode.response_text,
            opens_reasoning=len(lengths) == 1 and self._opens_reasoning[end],
            answer=prompt.answer,
            row=prompt.row,
            split=self.assignment.split,
            earned=episode.earned,
            turn_lengths=lengths,
            episode=partial(history_of, episode),
        )

    def _sample(self, member: int, episode: Episode, *, score: Score, failed: bool) -> Sample:
        sequences = trained_once(episode.sequences)
        prompt, *turns = flattened(sequences)
        earned = () if failed else score.tokens
        sample = Sample(
            member=member,
            prompt_ids=prompt.token_ids,
            prompt_inputs=prompt.model_inputs,
            prompt_pictures=prompt.pictures,
            turns=tuple(turns),
            score=replace(score, terms={**score.terms, **episode.measured}),
            token_rewards=placed_rewards(earned, tuple(episode.turns), sequences) if earned else (),
            columns={
                name: placed_rewards(numbers, tuple(episode.turns), sequences)
                for name, numbers in ({} if failed else score.columns).items()
            },
            finish_reason="failed" if failed else episode.finish_reason,
            is_greedy=episode.limits.temperature == 0,
            seed=episode.limits.seed,
            answer=self._answer(episode),
        )
        metrics.SAMPLES.labels(finish_reason=sample.finish_reason).inc()
        metrics.RESPONSE_TOKENS.observe(len(sample.response_ids))
        metrics.SEGMENTS.observe(len(sample.sampled_versions))
        return sample

    def _answer(self, episode: Episode) -> str:
        """Returns the digest of the response's answer; empty in training, which does not use it."""
        if self._is_training:
            return ""
        return answer_digest(episode.response_text, self._spec.answer_pattern)


def _check_sampled(episode: Episode) -> None:
    """Raises CallError if the episode ended before the policy sampled a token."""
    if not any(map(num_sampled, episode.sequences)):
        raise CallError(
            "invalid_value",
            "the episode ended before the policy generated a token, so it cannot train; sample at least one "
            "turn in the workflow",
        )


def _derived_seed(seed: int, num_failed: int) -> int:
    """Returns the seed of a further try, which is the same on every replica."""
    digest = hashlib.sha256(f"{seed}/{num_failed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


_NOTHING = MemberProgress(num_failed_scores=0, turns=())
