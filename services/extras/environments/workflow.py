"""Workflow in which an environment and the policy exchange messages until one of them is done."""

import asyncio
import hashlib
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError

from services.common.callables import call_problems, load_callable
from services.common.runspec.base import AtLeastOne, PositiveSeconds
from services.common.runspec.rollout import environment_kind
from services.common.telemetry import tracing
from services.extras.agents.record import EpisodeRecord, History, check_history, refuse_images
from services.extras.agents.requests import ApiError, ChatRequest
from services.extras.agents.requests import Message as ChatMessage
from services.extras.agents.session import MODEL_NAME
from services.extras.agents.trained import TrainedConversations
from services.extras.environments.client import (
    Environment,
    EnvironmentArgs,
    HttpEnvironment,
    OpenEnvironment,
)
from services.extras.environments.local import local_environments
from services.extras.environments.protocol import MAX_ANSWER_BYTES, Message, Observation
from services.rollout import metrics
from services.rollout.calls.outside import AddressPolicy, ExternalService
from services.rollout.failures import CallError
from services.rollout.workflows.base import Episode, WorkflowResources
from services.rollout.workflows.turns import Turn, observed

_KEY = "rollout.workflow_arguments"
# Max time to close an environment whose episode is abandoned.
_ABANDON_S = 1.0
_Answer = TypeVar("_Answer")


class Environments:
    """Plays each episode in an environment, whose messages are the prompt and the observations.

    The environment is reset with the row of the prompt and with a seed that all members of a group share.
    Its reward is the value of the reward ``environment``. An interrupted episode is played again: as long
    as the environment sends the same messages, the recorded replies are reused without sampling.

    Args:
        environment: ``module:Class`` or ``file.py:Class``, which runs in separate processes;
            ``http://`` or ``https://`` URL of a host of such a class; ``openenv+http://`` or
            ``openenv+https://`` URL of an OpenEnv server (door ``slipstream.environments``).
        arguments: Keyword arguments of the class; for an OpenEnv server ``action`` and ``observe``.
        max_turn_tokens: Max tokens of one turn; None applies only the response's limit.
        chat: True to render messages with the model's chat template; otherwise their texts are
            concatenated.
        wait_s: Max time to retry while the environment is busy.
        processes: Number of processes that run the class; each runs many episodes concurrently.
        history: ``template`` to leave the reasoning of earlier replies out if the chat template does, which
            starts a new conversation; ``recorded`` to keep it.
        token: Token for a remote host or server; a run's specification names the secret that holds it.
    """

    def __init__(  # noqa: PLR0913 -- the keys of rollout.workflow_arguments
        self,
        *,
        environment: str,
        arguments: Mapping[str, Any] | None = None,
        max_turns: AtLeastOne = 32,
        max_turn_tokens: AtLeastOne | None = None,
        chat: bool = True,
        timeout_s: PositiveSeconds = 60.0,
        wait_s: PositiveSeconds = 600.0,
        processes: AtLeastOne = 1,
        history: History = "template",
        token: str = "",
    ) -> None:
        check_history(history)
        if token and "://" not in environment:
            raise ValueError(
                f"{_KEY}.token applies to an environment with a URL, but {_KEY}.environment is "
                f"{environment!r}; remove it"
            )
        self._name = environment
        self._arguments = dict(arguments or {})
        self._max_turns = max_turns
        self._max_turn_tokens = max_turn_tokens
        self._is_chat = chat
        self._timeout_s, self._wait_s = timeout_s, wait_s
        self._processes = processes
        self._history: History = history
        self._token = token
        # An environment that changes its tools starts a new conversation; all of them train.
        self._trained = TrainedConversations("all")
        self._environment: Environment | None = None

    def code_problems(self) -> Iterator[str]:
        """Yields why its class cannot be imported or created, each with its key."""
        if "://" in self._name:
            return
        problems = [*call_problems(self._name, key=f"{_KEY}.environment")]
        yield from problems
        if problems or not inspect.isclass(factory := load_callable(self._name)):
            return  # a function creates the instance
        if missing_methods := [
            name for name in ("reset", "step") if not callable(getattr(factory, name, None))
        ]:
            yield (
                f"{_KEY}.environment: class {self._name!r} has no method "
                f"{' and no method '.join(missing_methods)}; an environment needs reset(task, seed) and "
                "step(message)"
            )
        try:
            inspect.signature(factory).bind(**self._arguments)
        except TypeError as error:
            yield (
                f"{_KEY}.arguments: {self._name!r} cannot be created with them ({error}); change the class, "
                "or its arguments in the specification"
            )
        except ValueError:
            return  # no signature

    @asynccontextmanager
    async def serving(self, resources: WorkflowResources) -> AsyncIterator[None]:
        """Opens the environment while the block runs.

        Raises:
            ValueError: If the environment cannot be reached or loaded, or speaks another version of
                the protocol.
        """
        async with self._opened(resources.reach) as environment:
            try:
                await environment.check()
            except CallError as error:
                raise ValueError(f"{_KEY}.environment: {error.message}") from error
            self._environment = environment
            yield

    async def run(self, episode: Episode) -> None:
        """Plays until the environment or a limit ends the episode.

        Raises:
            CallError: If the environment fails.
            GroupError: If the row has images.
        """
        assert self._environment is not None, "the workflow must be serving"
        refuse_images(episode.prompt.pictures)
        task = dict(episode.prompt.row)
        sandbox = None if episode.sandbox is None else episode.sandbox.access
        beginning = self._environment.begin(task, seed=_seed(task), sandbox=sandbox)
        session, observation = await self._timed("begin", beginning)
        seen_so_far = [observation]
        try:
            conversation = (
                _Chat(episode, self._max_turn_tokens, self._history)
                if self._is_chat
                else _Text(episode, self._max_turn_tokens)
            )
            for _ in range(self._max_turns):
                if (
                    observation.is_done
                    or (answer := await conversation.answer(observation)) is None
                ):
                    break
                observation = await self._timed("step", session.step(answer))
                seen_so_far.append(observation)
        except BaseException:
            # The time is limited and errors are ignored: the environment may have failed, or the caller waits
            # until this task has stopped.
            with suppress(CallError, TimeoutError):
                async with asyncio.timeout(_ABANDON_S):
                    await session.close()
            raise
        end = await self._timed("close", session.close())
        episode.earned = self._earned([*seen_so_far, end], is_over=observation.is_done)
        await self._trained.choose(episode)

    def _earned(self, observations: Sequence[Observation], *, is_over: bool) -> Mapping[str, Any]:
        """Adds up the reward terms of all steps and takes the last value of each metric."""
        if len(observations) < 3:  # the first observation, and the end
            raise CallError(
                "invalid_value",
                f"environment {self._name!r} ended an episode before the policy generated a token, so it "
                "cannot train; return a message from reset, or remove such rows from the data",
            )
        terms: dict[str, float] = {}
        measurements: dict[str, float] = {}
        for observation in observations:
            for term, value in observation.reward.items():
                terms[term] = terms.get(term, 0.0) + value
            measurements |= observation.metrics
        if is_over and not terms:
            raise CallError(
                "invalid_value",
                f"environment {self._name!r} ended an episode without a reward; return at least one term, "
                "for example with 0",
            )
        return {"reward": terms, "metrics": measurements}

    @asynccontextmanager
    async def _opened(self, reach: AddressPolicy) -> AsyncIterator[Environment]:
        name = self._name
        if (kind := environment_kind(name)) is not None:
            open_environment: OpenEnvironment = load_callable(kind.opens)
            args = EnvironmentArgs(
                url=name,
                arguments=self._arguments,
                reach=reach,
                token=self._token,
                timeout_s=self._timeout_s,
                wait_s=self._wait_s,
            )
            async with open_environment(args) as environment:
                yield environment
        elif name.startswith(("http://", "https://")):
            if self._arguments:
                raise ValueError(
                    f"{_KEY}.arguments must be passed to the host of {name!r}; remove them here"
                )
            service = ExternalService(
                name, reach=reach, token=self._token, max_answer_bytes=MAX_ANSWER_BYTES
            )
            try:
                yield HttpEnvironment(name, service, timeout_s=self._timeout_s, wait_s=self._wait_s)
            finally:
                await service.close()
        else:
            async with local_environments(
                name,
                self._arguments,
                processes=self._processes,
                timeout_s=self._timeout_s,
                wait_s=self._wait_s,
            ) as environments:
                yield environments

    async def _timed(self, call: str, answer: Awaitable[_Answer]) -> _Answer:
        with (
            metrics.ENVIRONMENT_SECONDS.labels(call=call).time(),
            tracing.span(f"environment.{call}"),
        ):
            return await answer


class _Chat:
    """Renders the environment's messages with the chat template, like those of an agent."""

    def __init__(self, episode: Episode, max_tokens: int | None, history: History) -> None:
        self._episode = episode
        self._record = EpisodeRecord(episode, history=history)
        self._max_tokens = max_tokens
        self._messages: list[ChatMessage] = []
        self._tools: tuple[Message, ...] = ()

    async def answer(self, observation: Observation) -> Message | None:
        """Returns the policy's reply to an observation; None if the response has no room for it.

        Raises:
            CallError: If the observation cannot be rendered for the policy.
        """
        self._tools = self._tools if observation.tools is None else observation.tools
        try:
            self._messages += [
                ChatMessage.model_validate(message) for message in observation.messages
            ]
            request = ChatRequest(
                model=MODEL_NAME,
                messages=tuple(self._messages),
                tools=tuple(dict(tool) for tool in self._tools),
                max_tokens=self._max_tokens,
            )
            (choice,) = (await self._record.chat(request)).choices
        except ApiError as error:
            if error.is_too_long and self._episode.turns:
                return None
            is_image = error.body["error"]["code"] == "invalid_image"
            raise CallError("invalid_image" if is_image else "invalid_value", str(error)) from error
        except ValidationError as error:
            raise CallError("invalid_value", f"messages of the environment: {error}") from error
        self._messages.append(choice.message)
        return choice.message.for_template()


class _Text:
    """Concatenates the texts of the environment and of the policy."""

    def __init__(self, episode: Episode, max_tokens: int | None) -> None:
        episode.is_served = True
        self._episode = episode
        self._max_tokens = max_tokens

    async def answer(self, observation: Observation) -> Message | None:
        """Returns the policy's reply to an observation; None if the response has no room for it.

        Raises:
            CallError: If the observation cannot be tokenized, or differs from the one that was
                recorded before an interruption.
        """
        episode = self._episode
        try:
            messages = [ChatMessage.model_validate(message) for message in observation.messages]
            turn = await self._turn(messages)
        except ValueError as error:
            raise CallError("invalid_value", f"messages of the environment: {error}") from error
        if not episode.turns:
            self._check_beginning(len(turn.token_ids))
        before = episode.replayed(episode.turns)
        if before is not None and before != turn:
            raise CallError(
                "exception",
                "the environment returned other messages when its episode was resumed; it must depend only "
                "on the task and the seed",
            )
        if episode.turns and len(turn.token_ids) >= episode.remaining_tokens:
            episode.is_full = True
            return None
        episode.turns.append(turn)
        reply_turn = await episode.generate(max_tokens=self._max_tokens)
        return {"role": "assistant", "content": episode.text(reply_turn)}

    async def _turn(self, messages: Sequence[ChatMessage]) -> Turn:
        """Returns the observed turn of messages. Raises ValueError if a text cannot be tokenized."""
        episode = self._episode
        tokenizer = episode.tokenizer
        encode = (
            partial(tokenizer.encode, continues=True) if episode.turns else tokenizer.encode_prompt
        )
        images = [url for message in messages for url in message.images]
        if not images:
            return observed(encode("".join(message.text for message in messages)))
        mark_ids = [] if episode.images is None else episode.images.mark_ids
        tokens = [] if episode.turns else encode("")
        for message in messages:
            segments = message.content or ""
            for segment in [segments] if isinstance(segments, str) else segments:
                text = segment if isinstance(segment, str) else segment.text
                has_image = not isinstance(segment, str) and segment.url
                tokens += mark_ids if has_image else tokenizer.encode(text, continues=True)
        return await episode.look(tokens, images)

    def _check_beginning(self, num_tokens: int) -> None:
        limits = self._episode.limits
        if not num_tokens or limits.response_tokens(prompt_tokens=num_tokens) < 1:
            raise CallError(
                "invalid_value",
                f"the environment's first messages have {num_tokens} tokens; expected at least one, and "
                f"fewer than the model's context ({limits.max_tokens}) to leave room for a response",
            )


def _seed(task: Mapping[str, Any]) -> int:
    """Returns a seed that all episodes of a task share."""
    text = json.dumps(task, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
