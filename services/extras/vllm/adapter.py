"""vLLM backend of the external engine, based on vLLM's asynchronous engine.

The backend sends requests directly to vLLM's engine process, and one task receives all outputs.
Tokens arrive in batches with their log probabilities in arrays (see
:mod:`services.extras.vllm.scheduler`), without an object per token.
"""

import asyncio
import importlib.util
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import vllm
from transformers import PretrainedConfig
from vllm import SamplingParams, envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreOutput, utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor
from vllm.v1.outputs import LogprobsLists

from services.common.errors import DataLossError
from services.common.host import usable_processors
from services.common.models.families import recurrent_module, routing_shape
from services.common.models.vision import checkpoint_config
from services.common.models.vllm_operators import missing_operators
from services.common.runspec.engines import engine_kind
from services.common.runspec.rollout import SpeculationSpec
from services.extras.external_engine.engine import ExternalEngine, FirstToken
from services.extras.external_engine.request_segments import (
    Segment,
    TokenChunk,
    convert_experts,
    encoded_masks,
    segment_seed,
    top_table,
)
from services.extras.vllm.images import ImageInputs, image_arguments
from services.extras.vllm.kind import CAPTURED_SIZES, CORES_FOR_TWO_PROCESSES
from services.extras.vllm.process import EngineContext
from services.extras.vllm.versions import prepare_speculation
from services.rollout.engines.base import (
    DraftTotals,
    EngineCapabilities,
    EngineDiedError,
    GenerationRequest,
    RoutedExperts,
    SamplingMask,
    TopLogprobs,
    VersionRun,
)
from services.rollout.engines.engine_config import (
    EngineConfig,
    cached_config_folder,
)
from services.wire.data.model_inputs import ModelInputs

_MASKS = "return_sampling_mask"
"""vLLM's argument to report the tokens that could be drawn; versions before 0.28 lack it."""
_DEFAULT_MAX_LOGPROBS = 20
_SCHEDULERS = "services.extras.vllm.scheduler"
_CPU_WORKERS = "services.extras.vllm.cpu_worker"


def start(arguments: AsyncEngineArgs, *, reports_experts: bool) -> AsyncLLM:
    """Starts an engine that sends tokens in batches.

    Args:
        reports_experts: True to report the chosen experts with the tokens.

    Raises:
        ValueError: If the engine cannot report them.
        EngineDiedError: If vLLM's process did not start. It has printed the reason.
    """
    reports_on_cpu = reports_experts and current_platform.is_cpu()
    if reports_experts and not reports_on_cpu:
        arguments = replace(arguments, enable_return_routed_experts=True)
    # Without a context, vLLM schedules at most 2,048 tokens a step, also on GPUs where its server takes more.
    context = None if current_platform.is_cpu() else UsageContext.OPENAI_API_SERVER
    config = _engine_config(arguments, context)
    prepare_speculation(config)
    if reports_on_cpu:
        if not config.cache_config.enable_prefix_caching:
            raise ValueError(
                "vLLM reports chosen experts only with prefix caching, which is unavailable on a CPU for "
                "latent attention and with rollout.engine_arguments.enable_prefix_caching false; set "
                "rollout.routing_replay to 'off'"
            )
        config.parallel_config.worker_cls = f"{_CPU_WORKERS}.RoutingWorker"
        scheduler = f"{_CPU_WORKERS}.RoutingScheduler"
    elif config.scheduler_config.async_scheduling:
        scheduler = f"{_SCHEDULERS}.BatchingAsyncScheduler"
    else:
        scheduler = f"{_SCHEDULERS}.BatchingScheduler"
    config.scheduler_config.scheduler_cls = scheduler
    if not current_platform.is_cpu():
        # vLLM would spawn its engine's process, which imports for tens of seconds. The fork server
        # of `begin_imports` has done that and has not initialized the GPU driver.
        utils.get_mp_context = EngineContext
        if arguments.distributed_executor_backend is None:
            _separate_worker(config)
    try:
        return AsyncLLM(
            vllm_config=config,
            executor_class=Executor.get_class(config),
            log_stats=False,
            log_requests=False,
        )
    except RuntimeError as error:
        if "Engine core initialization failed" not in str(error):
            raise
        raise EngineDiedError(_DID_NOT_START) from error


def _engine_config(arguments: AsyncEngineArgs, context: UsageContext | None) -> VllmConfig:
    try:
        return arguments.create_engine_config(usage_context=context)
    except ValueError as error:
        if not getattr(arguments, _MASKS, False) or "Model Runner V2" not in str(error):
            raise
        raise ValueError(
            "rollout.sampling.top_k or top_p excludes tokens, and vLLM reports which with its Model Runner "
            "V2 only, which it does not use for this run (its log names the reason; the variable "
            "VLLM_USE_V2_MODEL_RUNNER can be one); set top_p to 1 and top_k to 0, or rollout.engine to torch"
        ) from error


def _separate_worker(config: VllmConfig) -> None:
    """Lets an engine on one GPU run its model in another process than its scheduler, as on several GPUs.

    In one process, a step waits for the Python code of both, which takes longer than the GPU. Measured in
    docs/one-gpu.md.
    """
    has_one = config.parallel_config.distributed_executor_backend == "uni"
    # The two processes wait for each other in busy loops.
    if has_one and usable_processors() >= CORES_FOR_TWO_PROCESSES:
        config.parallel_config.distributed_executor_backend = "mp"


_WORKER = "services.extras.vllm.worker.WeightLoader"
_PLAIN_WORKER = "services.extras.vllm.cpu_worker.PlainWeightLoader"
_ROUTERS = r"re:.*\.gate$"
"""Layers that are not quantized, in vLLM's notation: a wrong choice of experts has the largest effect."""
_DIED = "the vLLM engine died; see its log lines above"
_DID_NOT_START = "the vLLM engine did not start; see its log lines above"
# Steps whose tokens are sent together: few enough that a streaming client receives several chunks a
# second.
_STREAM_INTERVAL = 16


def captured_sizes(max_running: int, per_request: int = 1) -> list[int]:
    """Returns the numbers of tokens for which vLLM captures CUDA graphs.

    vLLM looks for the graph of a step, with or without proposals, at the next captured number only. With
    proposals, all numbers are therefore multiples of ``per_request``, except ``max_running``, the number of
    tokens of a step of all slots without proposals.

    Args:
        max_running: Number of slots.
        per_request: Tokens of a request in a step with proposals.
    """
    if per_request == 1:
        return list(CAPTURED_SIZES)
    counts = [*(n for n in CAPTURED_SIZES if n < max_running), max_running]
    return sorted(
        {-(-n // per_request) * per_request for n in CAPTURED_SIZES}
        | {size for n in counts if (size := n * per_request) <= CAPTURED_SIZES[-1]}
        | {max_running, max(max_running // per_request, 1) * per_request}
    )


def speculative_config(speculation: SpeculationSpec) -> dict[str, Any]:
    """Returns vLLM's configuration of speculative decoding.

    vLLM verifies by rejection sampling and reports the policy's logprobs for accepted tokens too.
    """
    config: dict[str, Any] = {
        "method": speculation.method,
        "num_speculative_tokens": speculation.tokens,
    }
    if speculation.method == "ngram":
        config["prompt_lookup_min"] = speculation.prompt_lookup_min
        config["prompt_lookup_max"] = speculation.prompt_lookup_max
    if speculation.model is not None:
        config["model"] = speculation.model
        # Weight sync delivers the policy's own weights, but not those of the draft head.
        config["draft_load_config"] = {"load_format": "auto"}
        if speculation.method == "eagle":
            head, _ = PretrainedConfig.get_config_dict(speculation.model)
            if any("eagle3" in name.lower() for name in head.get("architectures") or ()):
                config["method"] = "eagle3"
    return config


def build(config: EngineConfig) -> ExternalEngine:
    """Builds the engine; :meth:`ExternalEngine.run` starts it.

    Raises:
        ValueError: If proposals need a package that is not installed, or vLLM is too old to report the tokens
            that could be drawn.
    """
    if config.returns_masks and _MASKS not in {field.name for field in fields(AsyncEngineArgs)}:
        raise ValueError(
            "rollout.sampling.top_k or top_p excludes tokens, and vLLM reports which from version 0.28 on, "
            f"but {vllm.__version__} is installed; upgrade it, set top_p to 1 and top_k to 0, or "
            "rollout.engine to torch"
        )
    is_suffix = config.speculation is not None and config.speculation.method == "suffix"
    if is_suffix and importlib.util.find_spec("arctic_inference") is None:
        raise ValueError(
            "rollout.speculation.method is 'suffix', for which vLLM needs a package that is not installed; "
            "install arctic-inference, or set the method to 'ngram'"
        )
    backend = VllmBackend(config)
    return ExternalEngine.ordered(backend, config, length_argument="max_model_len", freezer=backend)


class VllmBackend:
    """Runs one vLLM engine in a child process of this one."""

    def __init__(self, config: EngineConfig) -> None:
        """Prepares the engine; :meth:`serve` starts it.

        Args:
            config: Configuration; its arguments are further ``AsyncEngineArgs``.
        """
        config.check_arguments([field.name for field in fields(AsyncEngineArgs)], engine="vLLM")
        # With top_p, top_k or min_p, vLLM reports log probabilities of the truncated distribution.
        self.capabilities = EngineCapabilities(
            name="vllm",
            kv_policies=frozenset({"recompute", "keep"}),
            stop_texts=True,
            truncation=False,
            seeds=config.is_reproducible,
            # Versions of vLLM without this parameter report all experts at the end, including those of
            # recomputed tokens.
            routed_experts=hasattr(SamplingParams(), "routed_experts_prompt_start"),
            sampling_masks=config.returns_masks,
            top_logprobs=True,
            model_inputs=config.images is not None,
        )
        self._vocab_size = int(config.config.get_text_config().vocab_size)
        self._images = (
            None
            if config.images is None
            else ImageInputs(checkpoint_config(config.config), config.dtype)
        )
        self.routing = routing_shape(config.config.to_dict()) if config.returns_experts else None
        self._config = config
        self._llm: AsyncLLM | None = None
        self._streams: dict[str, _Stream] = {}
        self._num_asked = 0
        self._drafts: dict[int, DraftTotals] = {}
        """Proposals of each of vLLM's engines."""
        self.first_token = FirstToken()
        self._versions = [-1]
        """Weight version of each era."""

    @property
    def drafts(self) -> DraftTotals | None:
        if self._config.speculation is None:
            return None
        return sum(self._drafts.values(), DraftTotals())

    @property
    def kv_capacity_tokens(self) -> int:
        cache = self.llm.vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)

    @property
    def llm(self) -> AsyncLLM:
        """The vLLM engine; available after the start."""
        assert self._llm is not None, "the engine is not started"
        return self._llm

    async def serve(self, on_start: Callable[[], None]) -> None:
        """Starts vLLM and serves until cancelled."""
        config = checkpoint_config(self._config.config)
        folder = cached_config_folder(config, Path(envs.VLLM_CACHE_ROOT) / "slipstream")
        llm = await asyncio.to_thread(
            start, self.engine_args(str(folder)), reports_experts=self.routing is not None
        )
        try:
            self._llm = llm
            await self._warm_up()
            on_start()
            while True:
                await self._deliver()
        except EngineDeadError as error:
            raise EngineDiedError(_DIED) from error
        finally:
            self._end_streams()
            llm.shutdown()

    async def submit(self, segment: Segment) -> "_Stream":
        return await self._ask(
            segment.segment_id,
            segment.context_ids,
            self._sampling(segment),
            segment.cache_salt,
            segment.request.model_inputs,
            segment.request,
        )

    async def abort_segments(self, segment_ids: Collection[str]) -> None:
        """Ends segments; discards their tokens that vLLM has not sent yet."""
        segment_names = set(segment_ids)
        request_names = [
            name for name, stream in self._streams.items() if stream.segment_id in segment_names
        ]
        with _alive():
            await self.llm.engine_core.abort_requests_async(request_names)
        for name in request_names:
            if (stream := self._streams.pop(name, None)) is None:
                continue  # it ended by itself in the meantime
            stream.end(TokenChunk(token_ids=(), logprobs=(), finish_reason="abort"))

    async def freeze(self) -> None:
        with _alive():
            await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def load(self, description: str) -> None:
        """Loads weights into the workers' models.

        Raises:
            DataLossError: If quantized parameters are not those of the weights; nothing may be decoded.
        """
        with _alive():
            loaded = await self.llm.collective_rpc("load_slipstream_weights", args=(description,))
        if names := sorted({name for report in loaded for name in report["differing"]}):
            raise DataLossError(
                f"{len(names)} quantized parameters of the engine differ from the received weights: "
                f"{', '.join(names[:3])}"
            )

    async def thaw(self, version: int, *, recompute: bool) -> bool:
        """Continues after :meth:`freeze`; tokens sampled from now on have the given version."""
        self._versions.append(version)
        is_emptied = False
        with _alive():
            if recompute:
                is_emptied = await self.llm.engine_core.reset_prefix_cache_async(
                    reset_running_requests=True, reset_connector=True
                )
            await self.llm.engine_core.resume_scheduler_async()
        self.first_token.start()
        return is_emptied is True

    async def sleep(self) -> None:
        """Releases cache and weights; the next adoption replaces all weights."""
        with _alive():
            if self._config.sleeps:
                await self.llm.engine_core.sleep_async(level=2)

    async def wake(self) -> None:
        with _alive():
            if self._config.sleeps:
                await self.llm.engine_core.wake_up_async()

    async def score(
        self, name: str, token_ids: Sequence[int], model_inputs: ModelInputs | None = None
    ) -> tuple[float, ...]:
        """Requests the log probabilities of a prompt; vLLM then uses no cached prefix."""
        parameters = SamplingParams(
            **self._any_tokens,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        stream = await self._ask(name, token_ids, parameters, None, model_inputs)
        try:
            output: Any = await stream.output()
        finally:
            await stream.close()
        return tuple(output.new_prompt_logprobs_tensors.logprobs[:, 0].tolist())

    async def give_up(self, name: str) -> None:
        """Aborts a request whose result is no longer needed."""
        if self._streams.pop(name, None) is not None:
            await self.llm.engine_core.abort_requests_async([name])

    def versions_of(
        self, eras: Sequence[tuple[int, int]], num_tokens: int
    ) -> tuple[VersionRun, ...]:
        """Returns the weight versions of tokens, run-length encoded.

        Args:
            eras: Pairs of an era and the index of its first token.
        """
        starts = [start for _, start in eras] + [num_tokens]
        return tuple(
            (self._versions[era], starts[index + 1] - start)
            for index, (era, start) in enumerate(eras)
        )

    def engine_args(self, folder: str) -> AsyncEngineArgs:
        """Returns the arguments for a model whose configuration is in a folder."""
        arguments: dict[str, Any] = {
            "model": folder,
            "dtype": self._config.dtype_name,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_num_seqs": self._config.max_running,
            "logprobs_mode": "processed_logprobs",
            # The trainer also computes logits in float32.
            "hf_overrides": {"head_dtype": "float32"},
            "worker_extension_cls": _WORKER,
            "disable_log_stats": True,
            "enable_sleep_mode": self._config.sleeps and not current_platform.is_cpu(),
            "stream_interval": _STREAM_INTERVAL,
            # With a common seed, replicas would give the same prompt the same responses.
            "seed": secrets.randbits(31),
            **self._reports(),
            **self._config.precision_arguments(engine_kind("vllm")),
        }
        if self._config.quantization is not None:
            exact = [rf"re:.*\.layers\.{n}\..*" for n in range(self._config.unquantized_layers)]
            arguments["quantization_config"] = {"ignore": [_ROUTERS, *exact]}
        per_request = 1
        if self._config.speculation is not None:
            per_request += self._config.speculation.tokens
            arguments["speculative_config"] = speculative_config(self._config.speculation)
        if self._config.images is not None:
            limits = self._config.images
            arguments |= image_arguments(limits.max_images, limits.max_tokens)
        arguments["compilation_config"] = {
            "cudagraph_capture_sizes": captured_sizes(self._config.max_running, per_request)
        }
        is_recurrent = recurrent_module(self._config.config.to_dict()) is not None
        if is_recurrent and not current_platform.is_cpu():
            # The trainer computes states in float32 too.
            arguments["mamba_ssm_cache_dtype"] = "float32"
        if self._config.is_invariant and not missing_operators(
            self._config.config.to_dict(), self._config.dtype
        ):
            # Kernels that Inductor generates for norms and activations round differently from vLLM's own,
            # which the trainer uses. Without Inductor, only whole passes can be captured as CUDA graphs.
            arguments["compilation_config"] |= {
                "mode": 0,
                "custom_ops": ["all"],
                "cudagraph_mode": "FULL",
            }
        if current_platform.is_cpu():
            # vLLM's engine dies on a CPU if it prefills a seeded request in chunks: it rewinds the
            # request's random generator, which CPU generators cannot do.
            arguments["enable_chunked_prefill"] = False
            if is_recurrent:
                # Prefixes of recurrent states are cached only with chunked prefill.
                arguments["enable_prefix_caching"] = False
            if self._config.is_written_in_place:
                arguments["worker_extension_cls"] = _PLAIN_WORKER
        values = dict(self._config.arguments)
        if isinstance(compilation := values.get("compilation_config"), Mapping):
            values["compilation_config"] = {**arguments["compilation_config"], **compilation}
        return AsyncEngineArgs(**(arguments | values))

    def _reports(self) -> dict[str, Any]:
        """Returns the arguments that let vLLM report other tokens than those that it drew."""
        arguments: dict[str, Any] = {_MASKS: True} if self._config.returns_masks else {}
        if self._config.top_logprobs > _DEFAULT_MAX_LOGPROBS:
            arguments["max_logprobs"] = self._config.top_logprobs
        return arguments

    async def _ask(
        self,
        name: str,
        token_ids: Sequence[int],
        parameters: SamplingParams,
        cache_salt: str | None,
        model_inputs: ModelInputs | None = None,
        generation: GenerationRequest | None = None,
    ) -> "_Stream":
        prompt: Any = {"type": "token", "prompt_token_ids": list(token_ids)}
        if model_inputs is not None and model_inputs.tensors:
            assert self._images is not None
            prompt |= self._images.of(token_ids, model_inputs)
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt
        # vLLM may process an abort again after the next request arrived, so names are never reused.
        self._num_asked += 1
        unique = f"{name}#{self._num_asked}"
        request = self.llm.input_processor.process_inputs(unique, prompt, parameters, ("generate",))
        stream = self._streams[unique] = _Stream(self, unique, segment_id=name, request=generation)
        try:
            with _alive():
                await self.llm.engine_core.add_request_async(request)
        except BaseException:
            await stream.close()  # the engine would decode for a caller that left
            raise
        return stream

    def _sampling(self, segment: Segment) -> SamplingParams:
        request = segment.request
        experts = (
            {} if self.routing is None else {"routed_experts_prompt_start": segment.experts_from}
        )
        return SamplingParams(
            **experts,
            **self._distribution(request),
            max_tokens=segment.max_tokens,
            seed=segment_seed(request.seed, segment.draw_offset)
            if self.capabilities.seeds
            else None,
            logprobs=min(request.top_logprobs, self._vocab_size),
            stop_token_ids=sorted(request.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def _distribution(self, request: GenerationRequest) -> dict[str, Any]:
        """Returns the parameters of the distribution that tokens are drawn from."""
        if not self._config.returns_masks:
            return {"temperature": request.temperature}
        # An engine that reports masks refuses greedy requests, and those without top_k.
        if request.temperature == 0:
            return {"temperature": 1.0, "top_k": 1}
        return {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or self._vocab_size,
            "min_p": request.min_p,
        }

    @property
    def _any_tokens(self) -> dict[str, Any]:
        """Parameters of requests whose tokens do not matter."""
        return {"top_k": 1} if self._config.returns_masks else {}

    async def _warm_up(self) -> None:
        """Decodes one request: the first one with log probabilities compiles GPU kernels for a second."""
        parameters = SamplingParams(
            **self._any_tokens,
            max_tokens=2,
            seed=0 if self.capabilities.seeds else None,
            logprobs=0,
            prompt_logprobs=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        await self._ask("warm-up", (0, 0), parameters, None)
        while self._streams:
            await self._deliver()

    async def _deliver(self) -> None:
        """Passes vLLM's next outputs to the streams that wait for them."""
        outputs = await self.llm.engine_core.get_output_async()
        if outputs.scheduler_stats is not None and outputs.scheduler_stats.spec_decoding_stats:
            draft_stats = outputs.scheduler_stats.spec_decoding_stats
            self._drafts[outputs.engine_index] = DraftTotals(
                num_drafts=draft_stats.num_drafts,
                num_tokens=draft_stats.num_draft_tokens,
                num_accepted=draft_stats.num_accepted_tokens,
            )
        for output in outputs.outputs:
            if (stream := self._streams.get(output.request_id)) is None:
                continue
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            stream.put(output)

    def _end_streams(self) -> None:
        for stream in self._streams.values():
            stream.end(EngineDiedError(_DIED))
        self._streams.clear()


@contextmanager
def _alive() -> Iterator[None]:
    try:
        yield
    except EngineDeadError as error:
        raise EngineDiedError(_DIED) from error


class _Stream:
    """Token stream of one segment."""

    def __init__(
        self,
        backend: VllmBackend,
        name: str,
        *,
        segment_id: str,
        request: GenerationRequest | None = None,
    ) -> None:
        self._request = request
        self._backend = backend
        self._name = name
        self.segment_id = segment_id
        self._outputs: deque[EngineCoreOutput] = deque()
        self._end: TokenChunk | EngineDiedError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: EngineCoreOutput) -> None:
        """Adds an output of vLLM."""
        self._outputs.append(output)
        self._wake()

    def end(self, end: TokenChunk | EngineDiedError) -> None:
        self._end = end
        self._wake()

    async def next(self) -> TokenChunk:
        """Returns the tokens since the last call."""
        output = await self.output()
        return output if isinstance(output, TokenChunk) else self._chunk(output)

    async def output(self) -> EngineCoreOutput | TokenChunk:
        """Returns vLLM's next output, or the last chunk. Raises EngineDiedError."""
        while not self._outputs and self._end is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._outputs:
            return self._outputs.popleft()
        assert self._end is not None
        if isinstance(self._end, EngineDiedError):
            raise self._end
        return self._end

    async def close(self) -> None:
        await self._backend.give_up(self._name)

    def _chunk(self, output: EngineCoreOutput) -> TokenChunk:
        reason = None if output.finish_reason is None else str(output.finish_reason)
        if reason == "error":
            raise EngineDiedError(f"vLLM aborted {self.segment_id!r}; see its log")
        if output.new_logprobs is None:
            return TokenChunk(token_ids=(), logprobs=(), finish_reason=reason)
        self._backend.first_token.record()
        eras, logprobs = output.new_logprobs.logprob_token_ids, output.new_logprobs.logprobs
        token_logprobs = logprobs if logprobs.ndim == 1 else logprobs[:, 0]
        return TokenChunk(
            token_ids=output.new_token_ids,
            logprobs=token_logprobs.tolist(),
            version_runs=self._backend.versions_of(eras.tolist(), len(output.new_token_ids)),
            cached_tokens=output.prefill_stats.num_cached_tokens if output.prefill_stats else 0,
            finish_reason=reason,
            routed_experts=self._experts(output),
            sampling_mask=self._mask(output),
            top_logprobs=self._top(output.new_logprobs),
        )

    def _experts(self, output: EngineCoreOutput) -> RoutedExperts | None:
        """Converts vLLM's experts of the new tokens, ``[n, layers, K]``, with or without dense layers."""
        routing, experts = self._backend.routing, getattr(output, "routed_experts", None)
        if routing is None or experts is None:
            return None
        return convert_experts(experts, routing)

    def _mask(self, output: EngineCoreOutput) -> SamplingMask | None:
        """Converts vLLM's masks of the new tokens, if the request asks for them."""
        if self._request is None or not self._request.returns_mask:
            return None
        if (masks := output.new_sampling_mask) is None:
            # Before 0.32, vLLM loses them between the ranks of its batch-sharded sampling.
            raise EngineDiedError(
                "vLLM did not report which tokens could be drawn; upgrade it to 0.32 or later, or set "
                "rollout.sampling.top_p to 1 and top_k to 0"
            )
        return encoded_masks(masks.token_ids, masks.offsets[:-1])

    def _top(self, top_lists: LogprobsLists) -> TopLogprobs | None:
        """Converts the most likely tokens in place of the new tokens, if the request asks for them."""
        if self._request is None or not self._request.top_logprobs:
            return None
        if top_lists.logprobs.ndim == 1:
            raise EngineDiedError("vLLM did not report the most likely tokens")
        candidates, logprobs = top_lists.sampled_token_ranks, top_lists.logprobs[:, 1:]
        return top_table(candidates, logprobs, self._request.top_logprobs)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
