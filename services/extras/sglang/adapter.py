"""SGLang backend of the external engine."""

import asyncio
import base64
import importlib.util
import inspect
import os
import signal
import tempfile
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import sglang
import torch
from sglang import Engine
from sglang.srt.managers import io_struct
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import MultiprocessingSerializer

from services.common.models.families import exact_tokens, routing_shape
from services.common.models.vision import checkpoint_config
from services.common.runspec.engines import engine_kind
from services.extras.external_engine.engine import ExternalEngine
from services.extras.external_engine.request_segments import (
    Segment,
    TokenChunk,
    convert_experts,
)
from services.extras.sglang.images import ImageInputs
from services.extras.sglang.outputs import new_masks, new_tokens, top_of_masks
from services.rollout.engines.base import (
    EngineCapabilities,
    EngineDiedError,
    GenerationRequest,
    RoutedExperts,
)
from services.rollout.engines.engine_config import EngineConfig, write_sglang_config
from services.wire.data.model_inputs import ModelInputs


def use_own_event_loops() -> None:
    """Restores asyncio's event loop policy, which importing SGLang replaces by uvloop's.

    This process does not run a uvloop loop, so it could no longer start child processes, such as those of
    rewards.
    """
    asyncio.set_event_loop_policy(None)


use_own_event_loops()


def kernels(config: EngineConfig) -> dict[str, str]:
    """Returns arguments that avoid SGLang kernels whose packages are missing or incomplete."""
    if config.device.type == "cpu":
        return {}
    module_spec = importlib.util.find_spec("sgl_kernel")
    folders = (module_spec and module_spec.submodule_search_locations) or ()
    backends: dict[str, str] = {}
    if not any(True for folder in folders for _ in Path(folder).glob("**/flash_ops*")):
        backends["attention_backend"] = "triton"
    if importlib.util.find_spec("flashinfer") is None:
        backends["sampling_backend"] = "pytorch"
    return backends


def pins_memory() -> bool:
    """Returns True if SGLang can pin the memory for chosen experts, which it does on a CPU too."""
    try:
        torch.cuda.cudart()
    except (AssertionError, RuntimeError):  # torch without CUDA, or no driver
        return False
    return True


def memory_saver(config: EngineConfig) -> dict[str, bool]:
    """Returns the arguments of an engine that releases its GPU memory from time to time.

    Raises:
        EngineDiedError: If the package that this needs is not installed.
    """
    if not config.sleeps or config.device.type == "cpu":
        return {}
    if importlib.util.find_spec("torch_memory_saver") is None:
        raise EngineDiedError(
            "topology.placement needs SGLang to release its GPU memory, which requires a package that is not "
            "installed; install torch-memory-saver"
        )
    return {"enable_memory_saver": True}


_LOADER = "services.extras.sglang.worker.load"
_TELLS_EXPERTS = "enable_return_routed_experts"
_MAX_MASK = "sampling_mask_max_tokens"
# ServerArgs is not a dataclass in newer releases, but has a signature in all of them.
_OPTIONS = frozenset(inspect.signature(ServerArgs).parameters)
_SLEEPING = ["kv_cache", "weights"]
_IDLE_TIMEOUT_S = 30.0
# Tokens of a request that arrive together: the event loop that answers a weight transfer also handles every
# output.
_STREAM_INTERVAL = 16
_DIED = "the SGLang engine died; see its log lines above"


def sampling_masks(config: EngineConfig) -> dict[str, str]:
    """Returns the arguments of an engine that reports the tokens that could be drawn.

    FlashInfer keeps all tokens that are as likely as the last of ``top_k``, so a mask could have any size.
    """
    return {"sampling_backend": "pytorch"} if config.returns_masks else {}


def build(config: EngineConfig) -> ExternalEngine:
    """Builds the engine; :meth:`ExternalEngine.run` starts it.

    Raises:
        ValueError: If SGLang is too old to report the tokens that could be drawn.
    """
    if config.returns_masks and _MAX_MASK not in _OPTIONS:
        raise ValueError(
            "rollout.sampling.top_k or top_p excludes tokens, and SGLang reports which from version 0.5.21 "
            f"on, but {sglang.__version__} is installed; upgrade it, set top_p to 1 and top_k to 0, or "
            "rollout.engine to torch"
        )
    exact = exact_tokens(config.config.to_dict(), "sglang")
    if exact is not None:
        config = replace(config, arguments={"context_length": exact, **config.arguments})
    return ExternalEngine.ordered(SglangBackend(config), config, length_argument="context_length")


class SglangBackend:
    """Runs one SGLang engine in child processes of this one."""

    def __init__(self, config: EngineConfig) -> None:
        """Prepares the engine; :meth:`serve` starts it.

        Args:
            config: Configuration; its arguments are further ``ServerArgs``.
        """
        config.check_arguments(_OPTIONS, engine="SGLang")
        self._arguments: dict[str, Any] = {
            "dtype": config.dtype_name,
            "device": config.device.type,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "skip_server_warmup": True,
            "grammar_backend": "none",
            "max_running_requests": config.max_running,
            "stream_interval": _STREAM_INTERVAL,
            "custom_weight_loader": [_LOADER],
            "log_level": "error",
            # The trainer also computes logits in float32.
            "enable_fp32_lm_head": True,
            "enable_deterministic_inference": config.is_reproducible,
            **kernels(config),
            **memory_saver(config),
            **sampling_masks(config),
            **config.precision_arguments(engine_kind("sglang")),
            **config.arguments,
        }
        # Except in deterministic mode, SGLang uses one random stream for all requests.
        self.capabilities = EngineCapabilities(
            name="sglang",
            kv_policies=frozenset({"recompute"}),
            stop_texts=True,
            truncation=True,
            seeds=bool(self._arguments["enable_deterministic_inference"]),
            routed_experts=_TELLS_EXPERTS in _OPTIONS
            and (config.device.type != "cpu" or pins_memory()),
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
        if self.routing is not None:
            self._arguments[_TELLS_EXPERTS] = True
        self._config = checkpoint_config(config.config)
        self._engine: Engine | None = None
        self._died = asyncio.Event()
        self.streams: set[_Stream] = set()
        """Open segment streams."""

    @property
    def drafts(self) -> None:
        """None: the specification's rules refuse speculation with SGLang."""

    @property
    def kv_capacity_tokens(self) -> int:
        (info, *_) = self.engine._scheduler_init_result.scheduler_infos  # noqa: SLF001 -- as its get_server_info does
        return int(info["max_total_num_tokens"])

    @property
    def engine(self) -> Engine:
        """The SGLang engine; available after the start."""
        assert self._engine is not None, "the engine is not started"
        return self._engine

    async def serve(self, on_start: Callable[[], None]) -> None:
        # A failing child sends this signal, which would end this process without a message.
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGQUIT, self._note_death)
        with tempfile.TemporaryDirectory() as folder:
            write_sglang_config(self._config, folder)
            arguments = {"model_path": folder} | self._arguments
            with nullcontext() if self._images is None else self._images.installed():
                engine = await asyncio.to_thread(Engine, **arguments)
        use_own_event_loops()
        pids = engine.get_all_child_pids()
        try:
            engine.tokenizer_manager.auto_create_handle_loop()
            loop.add_signal_handler(signal.SIGQUIT, self._note_death)
            with self._watched(engine, pids):
                self._engine = engine
                on_start()
                await self._died.wait()
            raise EngineDiedError(_DIED)
        finally:
            # SGLang's own shutdown would kill every child of this process, not only its own.
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def submit(self, segment: Segment) -> "_Stream":
        request = segment.request
        sampling = {
            "max_new_tokens": segment.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "min_p": request.min_p,
            "stop_token_ids": sorted(request.stop_token_ids),
        }
        if self.capabilities.seeds:
            # SGLang derives random numbers from seed and position, so a later segment continues the
            # stream.
            sampling["sampling_seed"] = request.seed % 2**63
        # SGLang aborts by name prefix, so no name may be a prefix of another.
        name = f"{segment.segment_id};"
        reports: dict[str, Any] = {} if self.routing is None else {"return_routed_experts": True}
        if request.returns_mask:
            reports["return_sampling_mask"] = True
        num_top = min(request.top_logprobs, self._vocab_size)
        outputs = self._request(
            name,
            segment.context_ids,
            sampling,
            request.model_inputs,
            **reports,
            stream=True,
            extra_key=segment.cache_salt,
            logprob_start_len=-1,
            top_logprobs_num=num_top,
        )
        stream = _Stream(
            self, name, outputs, request, experts_from=segment.experts_from, num_top=num_top
        )
        try:
            # The stream's first turn in the event loop sends the request; only then can an abort find
            # it.
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            await stream.close()  # an open request blocks all weight updates
            raise
        return stream

    async def abort_segments(self, segment_ids: Collection[str]) -> None:
        """Ends segments after the running step."""
        for segment_id in segment_ids:
            self.abort(f"{segment_id};")

    def abort(self, name: str) -> None:
        self.engine.tokenizer_manager.abort_request(rid=name)

    async def load(self, description: str) -> None:
        """Copies weights into the schedulers' models."""
        manager = self.engine.tokenizer_manager
        has_session = hasattr(io_struct, "BeginWeightUpdateReqInput")
        payload = MultiprocessingSerializer.serialize([(description, torch.zeros(1))])
        update = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload] * self.engine.server_args.tp_size,
            load_format=_LOADER,
            # Versions share no cache blocks (see Segment.cache_salt), and a flush kills a scheduler
            # that is not idle.
            flush_cache=False,
        )
        if has_session:
            await manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(), None)
        is_loaded, message = await manager.update_weights_from_tensor(update, None)
        if has_session:
            await manager.end_weight_update(io_struct.EndWeightUpdateReqInput(), None)
        if not is_loaded:
            raise EngineDiedError(f"SGLang rejected the weights: {message}")

    async def sleep(self) -> None:
        """Releases cache and weights; the next adoption replaces all weights."""
        manager = self.engine.tokenizer_manager
        # A release kills the scheduler if a step is running, such as that of a segment that just
        # ended.
        flushed = await manager.flush_cache(timeout_s=_IDLE_TIMEOUT_S)
        if not flushed.success:
            raise EngineDiedError(f"SGLang was not idle within {_IDLE_TIMEOUT_S:.0f} s")
        await manager.release_memory_occupation(
            io_struct.ReleaseMemoryOccupationReqInput(tags=_SLEEPING), None
        )

    async def wake(self) -> None:
        await self.engine.tokenizer_manager.resume_memory_occupation(
            io_struct.ResumeMemoryOccupationReqInput(tags=_SLEEPING), None
        )

    async def score(
        self, name: str, token_ids: Sequence[int], model_inputs: ModelInputs | None = None
    ) -> tuple[float, ...]:
        """Requests the log probabilities of a prompt; SGLang then uses no cached prefix."""
        has_images = model_inputs is not None and bool(model_inputs.tensors)
        # SGLang replaces placeholders by keys of its cache, and would return the keys' log probabilities.
        placeholders = [self._config.image_token_id] if has_images else None
        outputs = self._request(
            name,
            token_ids,
            {"max_new_tokens": 1, "temperature": 1.0},
            model_inputs,
            stream=False,
            extra_key=name,
            logprob_start_len=0,
            token_ids_logprob=placeholders,
        )
        # An open request delays weight updates.
        async with aclosing(outputs):
            info = (await anext(outputs))["meta_info"]
        entries = list(info["input_token_logprobs"])
        if placeholders is not None:
            for number, (entry,) in enumerate(info["input_token_ids_logprobs"][1:], start=1):
                if token_ids[number] == placeholders[0]:
                    entries[number] = entry
        return tuple(float(entry[0]) for entry in entries[1:])

    def _request(
        self,
        name: str,
        token_ids: Sequence[int],
        sampling: dict[str, Any],
        model_inputs: ModelInputs | None,
        **arguments: Any,
    ) -> AsyncGenerator[dict[str, Any], None]:
        if model_inputs is not None and model_inputs.tensors:
            arguments["image_data"] = [{"inputs": model_inputs}]
        request = io_struct.GenerateReqInput(
            rid=name,
            input_ids=list(token_ids),
            sampling_params=sampling,
            return_logprob=True,
            **arguments,
        )
        outputs: AsyncGenerator[dict[str, Any], None] = (
            self.engine.tokenizer_manager.generate_request(request, None)
        )
        return outputs

    @contextmanager
    def _watched(self, engine: Engine, pids: Sequence[int]) -> Iterator[None]:
        """Detects the death of a child; SGLang's own watchdog would end this process."""
        watchdog = engine.tokenizer_manager._subprocess_watchdog  # noqa: SLF001 -- as its shutdown does
        if watchdog is not None:
            watchdog.stop()
        loop = asyncio.get_running_loop()
        watched = [os.pidfd_open(pid) for pid in pids]
        for descriptor in watched:
            loop.add_reader(descriptor, self._note_death)
        try:
            yield
        finally:
            for descriptor in watched:
                loop.remove_reader(descriptor)
                os.close(descriptor)

    def _note_death(self) -> None:
        self._died.set()
        for stream in self.streams:
            stream.fail()


class _Stream:
    """Token stream of one segment."""

    def __init__(
        self,
        backend: SglangBackend,
        name: str,
        outputs: Any,
        request: GenerationRequest,
        *,
        experts_from: int,
        num_top: int,
    ) -> None:
        self._returns_mask = request.returns_mask
        self._num_top = num_top
        self._experts_from = experts_from
        self._backend = backend
        self._name = name
        self._outputs = outputs
        self._next = asyncio.ensure_future(anext(outputs))
        self._num_seen = 0
        self._is_over = False
        self._is_dead = False
        backend.streams.add(self)

    async def next(self) -> TokenChunk:
        """Returns the tokens since the last call."""
        try:
            info = (await self._next)["meta_info"]
        except asyncio.CancelledError:
            if self._is_dead:
                raise EngineDiedError(_DIED) from None
            raise
        # Outputs are cumulative.
        is_first = self._num_seen == 0
        finish = info["finish_reason"]
        if finish is not None and finish.get("status_code"):
            # An abort of this adapter has no status, and its segment is submitted again.
            raise EngineDiedError(f"SGLang refused a request: {finish.get('message')}")
        token_ids, logprobs, top = new_tokens(info, self._num_seen, self._num_top)
        mask = None
        if self._returns_mask and token_ids:
            mask, masked_logprobs = new_masks(info, self._num_seen, len(token_ids))
            if top is not None:
                shifts = np.subtract(masked_logprobs, logprobs).tolist()
                top = top_of_masks(top, mask, shifts, self._num_top)
            logprobs = masked_logprobs
        self._num_seen += len(token_ids)
        if finish is None:
            self._next = asyncio.ensure_future(anext(self._outputs))
        else:
            self._is_over = True
        return TokenChunk(
            token_ids=token_ids,
            logprobs=logprobs,
            cached_tokens=info.get("cached_tokens", 0) if is_first else 0,
            finish_reason=None if finish is None else finish["type"],
            routed_experts=self._experts(info) if self._is_over else None,
            sampling_mask=mask,
            top_logprobs=top,
        )

    def _experts(self, info: Mapping[str, Any]) -> RoutedExperts | None:
        """Converts SGLang's experts, which cover all tokens but the last.

        SGLang reports flat int32 values, as base64 if they come through its own detokenizer.
        """
        routing, experts = self._backend.routing, info.get("routed_experts")
        if routing is None or experts is None:
            return None
        if isinstance(experts, str):
            experts = np.frombuffer(base64.b64decode(experts), np.int32)
        entries = np.asarray(experts).reshape(-1, routing.num_chosen)
        num_tokens = info["prompt_tokens"] + info["completion_tokens"] - 1
        if not entries.size or len(entries) % num_tokens:
            return None
        experts = convert_experts(entries.reshape(num_tokens, -1, routing.num_chosen), routing)
        return experts[self._experts_from :]

    def fail(self) -> None:
        """Cancels the wait for an output that will not arrive."""
        self._is_dead = True
        self._next.cancel()

    async def close(self) -> None:
        if self not in self._backend.streams:
            return
        self._backend.streams.discard(self)
        if not self._is_over:
            self._backend.abort(self._name)
            self._next.cancel()
            await asyncio.wait([self._next])
        await self._outputs.aclose()
