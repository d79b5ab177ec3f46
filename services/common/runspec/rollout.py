"""Generation and scoring of responses, with the built-in rewards, workflows and agents by name."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator

from services.common.doors import Door, References
from services.common.runspec.base import MAX_SECONDS, NameIn, SpecPart
from services.common.runspec.engines import ENGINES

REWARDS: Final = References("rewards")
"""The rewards by the value of ``rollout.rewards.N.name``."""

EARNED: Final = "environment"
"""Name of the reward whose score the environment or the agent gave to the episode."""

NEED_ANSWERS: Final = frozenset({"exact_match", "math_verify", "code_tests"})
"""Rewards that compare with the expected answer."""

WORKFLOWS: Final = References("workflows")
"""The workflows by the value of ``rollout.workflow``."""

AGENTS: Final = References("agents")
"""The agents by the value of ``rollout.workflow_arguments.agent``."""

SANDBOXES: Final = References("sandboxes")
"""The sandboxes by the value of ``rollout.sandbox.kind``."""

REWARD_SERVICES: Final = References("reward_services")
"""The clients of reward services by the scheme of their URLs (``http``, ``grpc``)."""


def is_service(reward: str) -> bool:
    """Returns True if a reward's name is the URL of a service."""
    scheme, separator, _ = reward.partition("://")
    return bool(separator) and scheme in REWARD_SERVICES


class SamplingSpec(SpecPart):
    """Sampling of the next token."""

    temperature: float = Field(1.0, ge=0, le=10)
    """Divisor of the logits, in the engine and in the trainer. 0 is greedy (evaluation only)."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: only the smallest set of tokens with this total probability is sampled, of
    the ``top_k`` most likely ones."""
    top_k: int = Field(0, ge=0, le=1024)
    """Number of most likely tokens that are sampled; 0 sets no limit. The engine reports the tokens
    that could be drawn, up to ``top_k`` for each token of a response, and the trainer computes
    logprobs and entropies relative to them (DeepSeek-V3.2, arXiv:2512.02556)."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, in addition to the model's end-of-sequence tokens. They are matched
    in the text without special tokens, as rewards see it. If a text is a special token of the
    tokenizer, that token ends the response; a text that combines a special token with other
    characters, or that no tokens spell, is rejected."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Token ids that end a response, in addition to the model's end-of-sequence tokens."""

    @property
    def is_truncated(self) -> bool:
        """True if some tokens cannot be drawn."""
        return self.top_p < 1 or self.top_k > 0


class TermSpec(SpecPart):
    """One named term of a reward."""

    weight: float = 1.0
    """Weight of this term in the reward's sum. 0 only records it."""
    bounds: tuple[float, float] | None = None
    """Min and max valid value of the term; a value outside fails the sample with ``invalid_value``."""


class RewardSpec(SpecPart):
    """One reward; training uses the weighted sum of all."""

    name: str
    """A built-in reward (``exact_match``, ``math_verify``, ``reasoning_gym``, ``code_tests``),
    ``environment`` for the score that the environment or agent gives to its own episode, the URL
    of a reward service (``http://``, ``https://``, ``grpc://``, ``grpcs://``), or your own
    function ``module:function`` / ``file.py:function``, which receives ``(prompt, response,
    answer, row)``. A reward returns a number, or named terms that are summed."""
    weight: float = 1.0
    """Weight of this reward in the sum."""
    timeout_s: float = Field(30.0, gt=0, le=MAX_SECONDS)
    """Max seconds of one evaluation of the reward. After that, the sample fails with ``timeout``;
    it is not scored 0."""
    bounds: tuple[float, float] | None = None
    """Min and max valid score; for named terms, of their sum. A score outside fails the sample with
    ``invalid_value``."""
    terms: dict[str, TermSpec] = Field(default_factory=dict)
    """Weights and bounds of named terms. A term that is not listed has weight 1. A reward that does
    not return a listed term fails with ``invalid_value``."""
    sees: Literal["response", "group", "pairs"] = "response"
    """Arguments that your own function receives. ``response``: ``(prompt, response, answer, row)``.
    ``group``: ``(prompt, responses, answer, row)`` with all responses of a group; the function
    returns a list of numbers or terms. ``pairs``: ``(prompt, first, second, answer, row)``; the
    function returns its preference for the first response, from 0 to 1. The score of a response
    is its mean over all other responses, in both orders."""
    per: Literal["response", "turn", "token"] = "response"
    """Unit that a number scores. ``response``: the whole response. ``turn`` and ``token``: your own
    reward returns a list with one number for each turn, or for each token, that the policy
    sampled in the conversation. Token-level advantages assign each number to its turn or token;
    other advantages use the sum."""
    column: str | None = Field(None, pattern=r"^[a-z][a-z0-9_]{0,63}$")
    """Name of a column in which the numbers of ``per: token`` or ``turn`` are stored instead of counting
    as reward. Your own loss or advantage may use it (``uses_columns``)."""
    sees_episode: bool = False
    """If true, the reward also receives the whole episode as the keyword argument ``episode``:
    messages, tokens, versions and times. A reward that sees several responses receives the list
    ``episodes``."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward. For a reward service only ``token`` is allowed, which is
    sent as ``Authorization: Bearer``: ``{"secret": "NAME"}``."""


IMAGE: Final = re.compile(r"[A-Za-z0-9][\w.:/@-]*")
"""Name of a container's image. One that begins with a dash would be an option of Docker."""


_FOLDER = r"^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$"


class SandboxSpec(SpecPart):
    """Sandbox of each episode, in which its agent, environment or workflow runs commands."""

    kind: Annotated[str, NameIn(SANDBOXES)] = "bubblewrap"
    """``bubblewrap``: namespaces on the rollout's host, without a daemon. ``docker``, ``podman``: a
    container, by the command line on the rollout's host. ``kubernetes``: a pod in the installation's
    namespace for sandboxes. ``e2b``: a sandbox hosted by E2B."""
    image: str = ""
    """Content that a sandbox starts with. ``bubblewrap``: a folder on the rollout's host, which is
    copied to the working folder. ``e2b``: the name of a template; empty for E2B's default. Others: the
    name of an image."""
    image_column: str | None = None
    """Column of the data with the image of each row's sandbox; with ``bubblewrap``, a folder inside
    ``image``. null uses ``image`` for all rows."""
    folders: tuple[Annotated[str, Field(pattern=_FOLDER)], ...] = Field(("/sandbox",), min_length=1)
    """Folders that ``bubblewrap`` makes writable besides ``/tmp`` and ``/dev/shm``, the working folder
    first."""
    max_running: int = Field(64, ge=1, le=65536)
    """Max simultaneous sandboxes of one replica; further episodes wait."""
    command_timeout_s: float = Field(60.0, gt=0, le=3600)
    """Max seconds of one command."""
    memory_bytes: int = Field(1 << 30, ge=64 << 20)
    """Max memory. With ``bubblewrap``, address space of each process, and memory of all processes. ``e2b``
    has the template's limits of memory, processors and files instead."""
    loopback: bool = False
    """If true, commands of ``bubblewrap`` may open TCP and UDP sockets, which connect them with each other
    and nothing else; ``memory_bytes`` does not limit the buffers of such sockets. If false, they may open
    Unix sockets, where a memory cgroup counts them."""
    cpus: float = Field(1.0, gt=0)
    """Max processor cores of a container."""
    max_processes: int = Field(128, ge=4)
    """Max simultaneous processes of ``bubblewrap``, ``docker`` and ``podman``."""
    disk_bytes: int = Field(256 << 20, ge=1 << 20)
    """Max size of files. ``bubblewrap``: of the working folder, ``/tmp`` and ``/dev/shm``, each in memory.
    ``docker``, ``podman``: of each file. ``kubernetes``: of all files."""
    output_bytes: int = Field(64 << 10, ge=1, le=16 << 20)
    """Max bytes of a command's output; the rest is dropped."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """For ``e2b``: ``api_key``, which is ``{"secret": "NAME"}``."""


class SpeculationSpec(SpecPart):
    """Speculative decoding: several tokens are proposed, and one pass of the policy verifies them."""

    method: Literal["ngram", "suffix", "mtp", "eagle"] = "ngram"
    """Source of proposals. ``ngram``: what followed an earlier occurrence of the last tokens in the prompt
    or response. ``suffix``: the same with suffix trees over earlier responses too (``vllm``, needs
    arctic-inference). ``mtp``: the checkpoint's own head for multi-token prediction (``vllm``). ``eagle``:
    the EAGLE head ``model`` (``vllm``). Heads keep their weights while the policy learns."""
    tokens: int = Field(4, ge=1, le=32)
    """Max proposed tokens of a request in one step."""
    prompt_lookup_min: int = Field(2, ge=1, le=32)
    """``ngram``: min number of last tokens that must have occurred before."""
    prompt_lookup_max: int = Field(5, ge=1, le=32)
    """``ngram``: max number of last tokens that are compared."""
    model: str | None = None
    """``eagle``: folder or Hub id of the head. ``mtp``: of the checkpoint with the head; null is
    ``model.path``."""


class RolloutSpec(SpecPart):
    """Engine, sampling, workflow and rewards of rollouts."""

    engine: Annotated[str, NameIn(ENGINES)] = "torch"
    """Generation engine. ``vllm`` and ``sglang`` must be installed. ``fake`` has no model. ``none``
    has no model and generates nothing: it is for rows that contain their answers
    (``algorithm.loss: sft`` or ``dpo``), and the default for them if there are no held-out
    prompts."""
    engine_arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the engine, by the engine's own names."""
    replicas: int = Field(2, ge=1, le=4096)
    """Number of rollout processes or pods."""
    group_size: int = Field(8, ge=1, le=1024)
    """Responses per prompt."""
    max_response_tokens: int = Field(256, ge=1)
    """Max tokens of a response; a longer one is truncated and flagged. If the prompt leaves fewer
    tokens of the model's context, that number is the limit."""
    max_running_samples: int = Field(256, ge=1)
    """Max samples that one replica decodes at once. Several replicas share a group with more
    members. Default: the replica's share of the samples that ``algorithm.max_staleness`` admits,
    between 64 and 1,024 (256 with ``torch``)."""
    reproducible: bool | Literal["batch_invariant"] = False
    """If true, the same seed, weights and context produce the same tokens in ``vllm`` and
    ``sglang``, as they always do in ``torch``. Each request then has its own random generator,
    which makes every decode step slower. ``batch_invariant``: in addition, logprobs do not depend
    on what else is decoded, to the last bit: ``torch``, and on a GPU the modes of ``vllm`` and
    ``sglang`` for it. With ``torch``, and for dense Llama, Qwen2 and Qwen3 with ``vllm`` in
    ``bfloat16``, the trainer computes with the same operators, so that its logprobs equal the
    engine's."""
    sampling: SamplingSpec = SamplingSpec()
    """Sampling of training responses."""
    quantization: Literal["fp8", "fp8_block"] | None = None
    """Precision of the engine's products. ``fp8``: weights of the decoder layers in FP8 with one scale
    per matrix, inputs with one per token. ``fp8_block``: one scale per 128 x 128 weights, and per 128
    inputs. Each version is quantized once, when an engine adopts it; training, checkpoints and
    adapters keep their precision. ``vllm`` on a GPU, and ``torch``, which rounds to FP8 and computes
    in ``trainer.dtype``. null: ``trainer.dtype``."""
    unquantized_layers: int = Field(0, ge=0)
    """With ``quantization``: number of first decoder layers whose products stay in ``trainer.dtype``. In a
    small model, rounding the first layers changes the policy most."""
    kv_cache_dtype: Literal["fp8"] | None = None
    """Precision of the KV cache: ``fp8`` holds twice as many tokens. ``vllm`` and ``sglang`` on a GPU.
    null: ``trainer.dtype``."""
    max_mismatch: float | None = Field(0.1, gt=0)
    """With ``quantization`` or ``kv_cache_dtype``: max divergence of the policy that samples from the one
    that trains, in nats per token, as a mean of five steps over their freshest tokens. If it is higher,
    the rollouts restart in ``trainer.dtype``, with an event. null never restarts them."""
    kv_policy: Literal["recompute", "keep"] = "recompute"
    """KV cache of running responses after a weight update: ``recompute`` computes it again with the
    new weights, ``keep`` keeps the old one."""
    speculation: SpeculationSpec | None = None
    """Speculative decoding. Responses have exactly the policy's distribution, and their logprobs are the
    policy's. The engine measures both kinds of steps for each number of running samples and uses the faster
    one, so that proposals end where they do not pay. null decodes one token per step."""
    routing_replay: Literal["off", "compare", "replay"] = "off"
    """For mixtures of experts. ``replay``: the trainer uses the experts that the engine chose for
    each token (R3, arXiv:2510.11370). ``compare``: the trainer only reports the share of tokens
    for which the choices differ. ``off``: neither."""
    partial_rollout: bool = False
    """If true, a rollout adopts new weights between two decode steps, and running responses
    continue with them. If false, a rollout first finishes its running responses and starts no
    new ones meanwhile. Default: true, or false if ``algorithm.max_staleness`` is 0."""
    segment_tokens: int | None = Field(None, ge=1)
    """With partial rollout, number of tokens after which a response is parked so that other
    responses get its slot; any replica continues it later, with the weights of that time. Must
    be below ``max_response_tokens``. None parks responses only if necessary."""
    max_segments: int | None = Field(None, ge=1)
    """Max weight versions in one response; a response with more fails. None sets no limit besides
    ``algorithm.max_staleness``."""
    workflow: str = "single_turn"
    """``single_turn``, ``multi_turn``, ``agent`` (your agent over an OpenAI-compatible endpoint),
    ``environment`` (episodes in an environment), or your own class ``module:Class`` /
    ``file.py:Class``."""
    workflow_arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the workflow."""
    sandbox: SandboxSpec | None = None
    """Sandbox of each episode, for the workflows ``agent``, ``environment`` and your own. null starts
    none."""
    rewards: tuple[RewardSpec, ...] = ()
    """Rewards that score a response; training uses their weighted sum. Required if sampled
    responses are reinforced. With ``algorithm.loss: sft`` they score held-out answers; without
    them, the likelihood of the held-out answers is measured."""
    reward_concurrency: int = Field(8, ge=1)
    """Max concurrent reward evaluations in one replica."""
    answer_pattern: str = Field("", max_length=1000)
    """Regular expression for the answer in a response: the last match, or that match's first group
    if the pattern has one. Without a match, the whole response is the answer. The score maj@k of
    an evaluation votes over answers."""
    on_reward_failure: Literal["regenerate", "mask"] = "regenerate"
    """Treatment of a sample whose reward or agent failed: ``regenerate`` generates it again,
    ``mask`` excludes it from the loss."""
    max_attempts: int = Field(3, ge=1)
    """Max attempts of a group before its prompt is quarantined."""

    @property
    def is_quantized(self) -> bool:
        """True if the engine computes, or keeps its KV cache, in another precision than the trainer."""
        return self.quantization is not None or self.kv_cache_dtype is not None

    @field_validator("answer_pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"rollout.answer_pattern must be a regular expression: {error}; for example '#### (.*)'"
            ) from error
        return pattern


_SCHEME: Final = re.compile(r"(?P<name>[\w.-]+)\+(?=https?://)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentKind:
    """Protocol of servers whose URLs are ``NAME+http://...`` and ``NAME+https://...``."""

    title: str
    """Name of the protocol in messages."""
    opens: str
    """Reference ``module:function`` of an
    :class:`~services.extras.environments.client.OpenEnvironment`."""
    passes_sandbox: bool = False
    """True if an environment gets the sandbox of its episode."""


ENVIRONMENTS: Final = Door("environments", EnvironmentKind)
"""The protocols by the name in the scheme."""


def environment_kind(environment: object) -> EnvironmentKind | None:
    """Returns the protocol of an environment's URL; None if the environment is no URL of such a protocol.

    Raises:
        DoorError: If the package that provides the protocol cannot be loaded.
    """
    scheme = _SCHEME.match(environment) if isinstance(environment, str) else None
    if scheme is None or scheme["name"] not in ENVIRONMENTS:
        return None
    return ENVIRONMENTS[scheme["name"]]


def plain_url(url: str) -> str:
    """Returns a URL without the name of a protocol in its scheme."""
    scheme = _SCHEME.match(url)
    return url if scheme is None else url[scheme.end() :]
