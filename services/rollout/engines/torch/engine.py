"""Engine protocol for transformers models that this process decodes."""

import asyncio
import heapq
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from services.common.host import usable_processors
from services.common.models.families import (
    check_trainer,
    has_plain_scores,
    recurrent_module,
    routing_shape,
)
from services.common.models.head import use_float32_head
from services.common.models.invariant import INVARIANT, use_invariant_operators
from services.common.models.loading import build_model, stored_tensors
from services.common.models.quantization import (
    Fp8,
    fp8_rounded,
    fp8_rounded_inputs,
    is_fp8,
)
from services.common.models.vision import set_attention
from services.common.runspec.rollout import SpeculationSpec
from services.common.runspec.trainer import OF_EXPERTS
from services.common.task_group import in_thread
from services.rollout.engines.base import (
    Decode,
    EngineCapabilities,
    EngineStats,
    GenerationRequest,
    GenerationResult,
    check_request,
    check_scorable,
    check_tensors,
)
from services.rollout.engines.engine_config import EngineConfig
from services.rollout.engines.speculation import NgramSpeculator
from services.rollout.engines.torch.decoding import DecodeBatch
from services.weightsync.arena import copy_all
from services.weightsync.endpoints import Place
from services.weightsync.modes.placing import live_placer
from services.weightsync.weight_plan import TensorSpec, WeightPlan
from services.wire.data.model_inputs import ModelInputs, check_arguments, model_arguments

_ROW_BYTES = 16


def use_decoding_kernels(model: PreTrainedModel, *, is_invariant: bool = False) -> None:
    """Selects attention, expert kernels and output head for decoding.

    Torch's grouped kernel multiplies all experts at once but needs rows of a multiple of 16 bytes;
    models with other sizes compute one expert after the other.

    Args:
        is_invariant: True if a token's results must not depend on other tokens.

    Raises:
        ValueError: If the model has no invariant operators.
    """
    config = model.config.get_text_config().to_dict()
    use_float32_head(model)
    if is_invariant:
        use_invariant_operators(model)
        set_attention(model, INVARIANT)
        return
    set_attention(model, "sdpa" if has_plain_scores(config) else "eager")
    experts = (
        value for name, value in model.named_parameters() if OF_EXPERTS in name and value.ndim == 3
    )
    if any(
        size * weight.element_size() % _ROW_BYTES for weight in experts for size in weight.shape[1:]
    ):
        model.set_experts_implementation("eager")


def _round_inputs(model: PreTrainedModel, kind: Fp8, *, num_exact: int) -> None:
    """Rounds the inputs of all linear layers with FP8 weights.

    Inputs of experts whose weights are in one tensor keep their precision.
    """

    def rounded(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return fp8_rounded_inputs(inputs[0], kind), *inputs[1:]

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_fp8(
            f"{name}.weight", tuple(module.weight.shape), num_exact=num_exact
        ):
            module.register_forward_pre_hook(rounded)


def build(config: EngineConfig) -> "TorchEngine":
    """Builds the engine with a model of random weights."""
    torch.set_num_threads(min(torch.get_num_threads(), usable_processors()))
    return TorchEngine(
        build_model(config.config, dtype=config.dtype, device=config.device),
        max_running=config.max_running,
        kv_policy=config.kv_policy,
        decode=config.decode,
        returns_experts=config.returns_experts,
        is_invariant=config.is_invariant,
        quantization=config.quantization,
        unquantized_layers=config.unquantized_layers,
        speculation=config.speculation,
        **config.arguments,
    )


@dataclass(frozen=True, slots=True, order=True)
class _Waiting:
    """Request in the queue, ordered by oldest weight version, then by arrival."""

    priority: float
    arrival: int
    request: GenerationRequest = field(compare=False)

    @classmethod
    def of(cls, request: GenerationRequest, arrival: int) -> "_Waiting":
        oldest = request.oldest_version
        return cls(float("inf") if oldest is None else oldest, arrival, request)


def _speculator_of(config: PretrainedConfig, speculation: SpeculationSpec) -> NgramSpeculator:
    if recurrent_module(config.to_dict()) is not None:
        raise ValueError(
            f"rollout.speculation is set, but model_type {config.model_type!r} has recurrent layers, "
            "whose states the engine torch cannot take back; set it to null"
        )
    return NgramSpeculator(speculation)


class TorchEngine:
    """Decodes running requests together, step by step, and admits waiting ones between steps.

    Each step runs in the engine's thread, so the event loop stays responsive. Operations that must
    happen between two steps (admission, abort, adoption) hold the same lock as a step, which a
    cancelled caller keeps until its thread has ended.
    """

    capabilities = EngineCapabilities(
        name="torch",
        kv_policies=frozenset({"recompute", "keep"}),
        stop_texts=True,
        truncation=True,
        seeds=True,
        routed_experts=True,
        sampling_masks=True,
        top_logprobs=True,
        model_inputs=True,
    )

    def __init__(  # noqa: PLR0913 -- independent features of one engine
        self,
        model: PreTrainedModel,
        *,
        max_running: int,
        max_kv_tokens: int = 1 << 20,
        kv_policy: str = "recompute",
        decode: Decode | None = None,
        returns_experts: bool = False,
        is_invariant: bool = False,
        quantization: Fp8 | None = None,
        unquantized_layers: int = 0,
        speculation: SpeculationSpec | None = None,
    ) -> None:
        """Wraps a loaded model.

        Args:
            model: Model with its weights, on the device that decodes.
            max_running: Max number of requests decoded at once.
            max_kv_tokens: Max tokens in the KV cache, including unused ends of slots.
            kv_policy: ``recompute`` if an adoption recomputes the KV prefix of running requests.
            decode: Converts token ids to text; needed for stop texts.
            returns_experts: True if results include the experts that a mixture's routers chose.
            is_invariant: True if a request's tokens must not depend on other requests.
            quantization: Rounds weights and inputs of the decoder layers to FP8, and computes in the
                weights' dtype; None rounds nothing.
            unquantized_layers: Number of first decoder layers that are not rounded.
            speculation: Settings of proposals; None decodes one token per step.

        Raises:
            ValueError: If the model cannot be decoded exactly, or not speculatively, or has no experts to
                report.
        """
        config = model.config.get_text_config()
        if problems := check_trainer(config.to_dict()):
            raise ValueError("; ".join(problems))
        use_decoding_kernels(model, is_invariant=is_invariant)
        self._is_invariant = is_invariant
        self._model = model.train(False).requires_grad_(False)
        # Found once: a search through all modules takes milliseconds, in which no token is produced.
        self._parameters: dict[str, Tensor] = stored_tensors(model)
        self._quantization = quantization
        self._num_exact = unquantized_layers
        if quantization is not None:
            _round_inputs(model, quantization, num_exact=unquantized_layers)
        self._vocab_size = int(config.vocab_size)
        self.max_tokens = min(int(config.max_position_embeddings), max_kv_tokens)
        self._max_running = max_running
        self._max_kv_tokens = max_kv_tokens
        self._recompute_kv = kv_policy == "recompute"
        self._has_decode = decode is not None
        routing = routing_shape(config.to_dict()) if returns_experts else None
        if returns_experts and routing is None:
            raise ValueError(
                f"model.path has model_type {config.model_type!r} without experts; set "
                "rollout.routing_replay to 'off'"
            )
        self._speculator = None if speculation is None else _speculator_of(config, speculation)
        self._batch = DecodeBatch(
            model,
            decode=decode,
            routing=routing,
            is_invariant=is_invariant,
            speculator=self._speculator,
        )
        self._waiting: list[_Waiting] = []
        self._num_arrived = 0
        self._futures: dict[str, asyncio.Future[GenerationResult]] = {}
        self._between_steps = asyncio.Lock()
        # In the event loop's threads each of them would keep the memory of the largest step it ran.
        self._thread = ThreadPoolExecutor(1, "decode")
        self._changed = asyncio.Condition()
        self._may_step = True
        self._may_admit = True
        self._is_asleep = self._is_blank = False
        self._weight_bytes: dict[str, int] = {}
        self._weight_version = -1
        self._started_at = time.monotonic()
        self._busy_seconds = 0.0

    async def run(self) -> None:
        """Decodes until cancelled."""
        while True:
            async with self._changed:
                await self._changed.wait_for(self._has_work)
            async with self._between_steps:
                if not self._has_work():
                    continue
                started_at = time.monotonic()
                step = partial(self._advance, self._next_requests())
                finished = await in_thread(step, self._thread)
                self._busy_seconds += time.monotonic() - started_at
                self._batch.deliver_tokens()
                self._resolve([*self._batch.pop_refused().items(), *finished])
            await self._notify()

    async def wait_ready(self) -> None:
        """Returns at once: the model is loaded."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Decodes one request; see :class:`~services.rollout.engines.base.Engine`."""
        check_request(request, vocab_size=self._vocab_size, max_model_tokens=self.max_tokens)
        if request.model_inputs is not None and request.model_inputs.tensors:
            if self._is_invariant:
                raise ValueError(
                    "rollout.reproducible is batch_invariant, which the engine torch does not support with "
                    "inputs besides tokens; set it to true"
                )
            check_arguments(self._model.base_model, request.model_inputs)
            if len(request.context_ids) == 1:
                raise ValueError(
                    "a prompt of one token cannot have model inputs, which are given with all tokens but the "
                    "last; add a token after it"
                )
        if request.stop_texts and not self._has_decode:
            raise ValueError("stop texts need a tokenizer, but this engine has none")
        if request.request_id in self._futures:
            raise ValueError(f"request {request.request_id!r} is already being decoded")
        future: asyncio.Future[GenerationResult] = asyncio.get_running_loop().create_future()
        self._futures[request.request_id] = future
        self._num_arrived += 1
        heapq.heappush(self._waiting, _Waiting.of(request, self._num_arrived))
        await self._notify()
        try:
            return await future
        finally:
            if self._futures.pop(request.request_id, None) is not None:
                await self.abort({request.request_id})

    async def score(
        self, token_ids: Sequence[int], model_inputs: ModelInputs | None = None
    ) -> tuple[float, ...]:
        """Returns log probabilities of given tokens, from a plain forward pass between two steps."""
        check_scorable(token_ids, vocab_size=self._vocab_size, max_model_tokens=self.max_tokens)
        if model_inputs is not None:
            check_arguments(self._model.base_model, model_inputs)
        async with self._between_steps:
            assert not self._is_blank, "an engine without weights cannot score"
            return await in_thread(partial(self._score, token_ids, model_inputs), self._thread)

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        async with self._between_steps:
            waiting = [item.request.request_id for item in self._waiting]
            aborted = {name for name in waiting if request_ids is None or name in request_ids}
            self._resolve([(name, _NOTHING_YET) for name in aborted])
            self._waiting = [
                item for item in self._waiting if item.request.request_id not in aborted
            ]
            heapq.heapify(self._waiting)
            self._resolve(self._batch.abort(request_ids))
        await self._notify()

    async def peek(self) -> dict[str, GenerationResult]:
        """Returns the tokens so far of each running request."""
        async with self._between_steps:
            return self._batch.peek()

    async def pause(self, *, drain: bool = False) -> None:
        """Stops between two steps; with ``drain``, finishes the running requests first."""
        self._may_admit = False
        if drain:
            async with self._changed:
                await self._changed.wait_for(lambda: len(self._batch) == 0)
        self._may_step = False
        async with self._between_steps:
            """No step is running any more."""

    async def resume(self) -> None:
        """Resumes after a pause, unless the engine has no weights."""
        if self._is_blank:
            return
        self._may_admit = self._may_step = True
        await self._notify()

    async def sleep(self) -> None:
        """Releases the cache and the weights' storage."""
        await self.pause()
        async with self._between_steps:
            if not self._is_asleep:
                self._is_asleep = self._is_blank = True
                await in_thread(self._release_memory, self._thread)

    async def wake(self) -> None:
        """Allocates the weights' storage again."""
        async with self._between_steps:
            if self._is_asleep:
                await in_thread(self._restore_memory, self._thread)
                self._is_asleep = False

    def weight_specs(self) -> list[TensorSpec]:
        """Lists the weights by name, tied ones once."""
        return [
            TensorSpec(
                name=name,
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).removeprefix("torch."),
            )
            for name, parameter in self._parameters.items()
        ]

    async def open_weights(self, plan: WeightPlan, slots: Sequence[Sequence[Tensor]]) -> Place:
        """Pauses and gives write access to the model's live parameters."""
        await self.pause()
        return live_placer(plan, self._parameters)

    async def adopt_placed(self, version: int) -> None:
        """Adopts the weights that were written in place."""
        await self.adopt_weights(version, self._parameters)

    async def close_weights(self) -> None:
        """Resumes under the old weights."""
        await self.resume()

    async def adopt_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        """Copies new weights into the live parameters between two steps."""
        check_tensors({name: value.shape for name, value in self._parameters.items()}, tensors)
        async with self._between_steps:
            assert not self._is_asleep, "a sleeping engine has no memory for weights; wake it first"
            started_at = time.monotonic()
            await in_thread(partial(self._copy_weights, tensors), self._thread)
            self._weight_version, self._is_blank = version, False
            return time.monotonic() - started_at

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._batch),
            num_waiting=len(self._waiting),
            tokens_total=self._batch.tokens_total,
            kv_used_fraction=len(self._batch) * self._batch.span / self._max_kv_tokens,
            idle_seconds=time.monotonic() - self._started_at - self._busy_seconds,
            weight_version=self._weight_version,
            prompt_tokens_total=self._batch.prompt_tokens_total,
            cached_tokens_total=self._batch.shared_tokens_total,
            recomputed_tokens_total=self._batch.recomputed_tokens_total,
            drafts=None if self._speculator is None else self._speculator.totals,
            is_asleep=self._is_blank,
        )

    def _has_work(self) -> bool:
        if not self._may_step:
            return False
        return len(self._batch) > 0 or (self._may_admit and len(self._waiting) > 0)

    def _next_requests(self) -> list[GenerationRequest]:
        """Takes waiting requests, in order, while slots and KV tokens last."""
        admitted: list[GenerationRequest] = []
        num_running, span = len(self._batch), self._batch.span
        while self._may_admit and self._waiting and num_running < self._max_running:
            request = self._waiting[0].request
            span = max(span, len(request.context_ids) + request.max_tokens)
            num_running += 1
            if num_running * span > self._max_kv_tokens:
                break
            admitted.append(heapq.heappop(self._waiting).request)
        return admitted

    def _advance(self, admitted: list[GenerationRequest]) -> list[tuple[str, GenerationResult]]:
        """Prefills new requests and runs one step of all (in the engine's thread)."""
        assert not self._is_blank, "an engine without weights cannot decode"
        if admitted:
            self._batch.admit(admitted)
        return self._batch.step(self._weight_version) if len(self._batch) else []

    @torch.inference_mode()
    def _score(
        self, token_ids: Sequence[int], model_inputs: ModelInputs | None
    ) -> tuple[float, ...]:
        model, ids = self._model, torch.tensor([token_ids], device=self._model.device)
        bundles = [] if model_inputs is None else [model_inputs]
        arguments = model_arguments(model.base_model, bundles, model.device)
        logits = model(input_ids=ids, use_cache=False, **arguments).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])
        return tuple(logprobs.squeeze(1).tolist())

    @torch.no_grad()
    def _copy_weights(self, tensors: Mapping[str, Tensor]) -> None:
        live = list(self._parameters.values())
        copy_all(live, [tensors[name] for name in self._parameters])
        if self._quantization is not None:
            for name, value in self._parameters.items():
                if is_fp8(name, tuple(value.shape), num_exact=self._num_exact):
                    value.copy_(fp8_rounded(value, self._quantization))
        if self._recompute_kv or self._is_blank:
            self._batch.recompute()
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)

    def _release_memory(self) -> None:
        """Frees the parameters' storage; their shapes remain."""
        self._batch.release_cache()
        for name, parameter in self._parameters.items():
            storage = parameter.untyped_storage()
            self._weight_bytes[name] = storage.nbytes()
            storage.resize_(0)
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _restore_memory(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.untyped_storage().resize_(self._weight_bytes[name])

    def _resolve(self, results: Iterable[tuple[str, GenerationResult | Exception]]) -> None:
        for request_id, result in results:
            future = self._futures.pop(request_id, None)
            if future is None or future.done():
                continue
            if isinstance(result, GenerationResult):
                future.set_result(result)
            else:
                future.set_exception(ValueError(f"the model refuses its inputs: {result}"))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


_NOTHING_YET = GenerationResult(token_ids=(), logprobs=(), version_runs=(), finish_reason="aborted")
