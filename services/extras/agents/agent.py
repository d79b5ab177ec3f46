"""Workflow in which an existing agent drives the episode through an OpenAI-compatible endpoint."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from services.common.callables import call_problems
from services.common.runspec.base import AtLeastOne, PositiveSeconds
from services.common.runspec.rollout import AGENTS
from services.extras.agents.endpoint import Endpoint
from services.extras.agents.record import History, check_history, refuse_images
from services.extras.agents.runner import AgentRunner, agent_runner
from services.extras.agents.trained import TrainedConversations
from services.rollout.failures import CallError
from services.rollout.workflows.base import Episode, WorkflowResources
from services.rollout.workflows.reply_formats import check_tool_format


class Agent:
    """Runs an agent for each sample; the tokens that it samples with its API key become the sample.

    The agent is called with ``base_url``, ``api_key``, ``model``, ``prompt``, ``row`` and, if the run has
    sandboxes, ``sandbox``, and queries the policy with any OpenAI client. Its conversations are recorded
    token by token: the first messages are the prompt; later messages are observed and do not train. The
    reward scores the last reply.

    An interrupted sample is resumed by running the agent again. As long as the agent sends the same
    requests, it gets the recorded replies; from the first different request on, replies are sampled.

    Args:
        agent: ``module:function`` or ``file.py:function``, a coroutine or a plain function; the URL
            of a service that receives the same arguments as JSON and answers when it has finished;
            or ``verifiers``. Its return value or answer is the value of the reward ``environment``.
        processes: Number of processes that run a function; each runs many episodes concurrently.
        train: Conversations that train: ``last`` (the one that was continued last), ``all``, or
            ``module:function`` / ``file.py:function`` that selects them.
        token: Token for a service; a run's specification names the secret that holds it.
        tool_format: Format of tool calls; ``auto`` derives it from the chat template.
        history: ``template`` to leave the reasoning of earlier replies out of a request if the chat template
            does, which starts a new conversation; ``recorded`` to keep it.
    """

    def __init__(
        self,
        *,
        agent: str,
        timeout_s: PositiveSeconds = 600.0,
        processes: AtLeastOne = 1,
        train: str = "last",
        token: str = "",
        tool_format: str = "auto",
        history: History = "template",
    ) -> None:
        check_tool_format(tool_format)
        check_history(history)
        if token and "://" not in agent:
            raise ValueError(
                "rollout.workflow_arguments.token applies to an agent with a URL, but "
                f"rollout.workflow_arguments.agent is {agent!r}; remove it"
            )
        self._name, self._agent = agent, AGENTS.get(agent, agent)
        self._timeout_s = timeout_s
        self._processes = processes
        self._token = token
        self._tool_format = tool_format
        self._history: History = history
        self._train, self._trained = train, TrainedConversations(train)
        self._parts: tuple[Endpoint, AgentRunner] | None = None

    def code_problems(self) -> Iterator[str]:
        """Yields why its functions cannot be imported or called, each with its key."""
        if ":" in self._train:
            key = "rollout.workflow_arguments.train"
            yield from call_problems(self._train, "conversations, row", key=key)
        if "://" not in self._name and self._name not in AGENTS:
            yield from call_problems(self._name, key="rollout.workflow_arguments.agent")

    @asynccontextmanager
    async def serving(self, resources: WorkflowResources) -> AsyncIterator[None]:
        """Serves the endpoint and keeps the agent's processes running while the block runs."""
        running = agent_runner(self._agent, self._processes, resources.reach, token=self._token)
        async with (
            running as runner,
            Endpoint.serve(
                resources.bind,
                host=resources.host,
                temperature=resources.temperature,
                tool_format=self._tool_format,
                history=self._history,
            ) as endpoint,
        ):
            self._parts = endpoint, runner
            yield

    async def run(self, episode: Episode) -> None:
        """Runs the agent.

        Raises:
            CallError: If the agent fails, times out or samples nothing.
            GroupError: If the row has images.
        """
        assert self._parts is not None, "the workflow must be serving"
        endpoint, runner = self._parts
        refuse_images(episode.prompt.pictures)
        try:
            async with endpoint.open(episode) as access, asyncio.timeout(self._timeout_s):
                arguments = {
                    "base_url": access.base_url,
                    "api_key": access.api_key,
                    "model": access.model,
                    "prompt": episode.prompt.text,
                    "row": dict(episode.prompt.row),
                }
                if episode.sandbox is not None:
                    arguments["sandbox"] = episode.sandbox.access
                episode.earned = await runner.run(arguments)
        except TimeoutError as error:
            raise CallError(
                "timeout", f"the agent took longer than {self._timeout_s:g} s"
            ) from error
        if not any(turn.is_sampled for turn in episode.turns):
            raise CallError("exception", "the agent finished without a request to the policy")
        episode.measured = {
            "conversations": float(len(episode.conversations)),
            "rewritten_histories": float(episode.num_rewritten),
        }
        await self._trained.choose(episode)
