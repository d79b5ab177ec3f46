"""A vLLM server of a fleet, whose middleware (``server.py``) keeps sessions and receives weights."""

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from services.common.security.credentials import current_identity
from services.common.task_group import gather_in_group
from services.extras.external_engine.request_segments import Segment, TokenChunk, segment_seed
from services.extras.fleets.client import (
    ANSWER_TIMEOUT_S,
    END_TIMEOUT_S,
    LEAST_RATE,
    SCORE_TIMEOUT_S,
    FleetServer,
    ReadEvent,
    ServerAwayError,
    ServerFailedError,
    ServerRefusedError,
)
from services.extras.fleets.direct.messages import ADD, DONE, FAILED, GET, SET, Message
from services.extras.fleets.direct.weights import DirectWeights
from services.extras.fleets.engine import FleetBackend, FleetEngine
from services.extras.fleets.groups import TokenGroups
from services.extras.fleets.protocol import (
    ADAPTERS,
    API,
    ATTACH,
    CUT,
    GENERATE,
    GROUP,
    LOAD,
    LOAD_TIMEOUT_S,
    SCHEDULER,
    SESSION_HEADER,
    STATE,
    TOKEN_LINES,
    VERSION_HEADER,
    WEIGHTS,
)
from services.extras.fleets.weights import BUCKET_BYTES, FleetWeights
from services.rollout.engines.base import EngineCapabilities
from services.rollout.engines.engine_config import EngineConfig, ImageLimits

logger = logging.getLogger(__name__)

_BUCKETS_AT_ONCE: Final = 2
_MESSAGE_KEYS: Final = {
    DONE: {"job"},
    FAILED: {"job", "why"},
    GET: {"job", "key", "request"},
    ADD: {"job", "key", "request", "amount"},
    SET: {"job", "key", "value"},
}
"""Keys of each kind of message of a worker."""
_EXCHANGE_S: Final = 5.0
"""Time of an exchange of messages beyond that for which the server waits."""
_NO_LOGPROB: Final = -9999.0


def build(config: EngineConfig) -> FleetEngine:
    """Builds the engine ``vllm-server``; :meth:`FleetEngine.run` attaches to its servers."""
    capabilities = EngineCapabilities(
        name="vllm-server",
        # A server cuts responses whose version it replaces, and their caches end with them.
        kv_policies=frozenset({"recompute"}),
        stop_texts=True,
        truncation=False,
        seeds=config.is_reproducible,
        model_inputs=config.images is not None,
    )
    make_server: Callable[..., FleetServer] = VllmServer
    if config.adds_adapters:
        # A run's token outlives its processes, so that only the run itself takes its sessions over.
        run_token = current_identity().run_token.encode()
        make_server = partial(
            VllmServer,
            share=float(config.arguments.get("share", 1.0)),
            proof=hmac.digest(run_token, b"slipstream-fleet", "sha256").hex() if run_token else "",
        )
    backend = FleetBackend(config, make_server, capabilities)
    return FleetEngine.ordered(backend, config, length_argument="max_model_len")


class VllmServer(FleetServer):
    """Speaks the interface of ``protocol`` to a server's middleware.

    Args:
        share: Weight of the run on a server that runs share, with adapters; None for a run that brings whole
            weights.
        proof: Secret with which another process can take the session over.
    """

    path = GENERATE
    wrong_path = (
        "is no member of a fleet; start vLLM with --middleware services.extras.fleets.server.FleetMember "
        "and --enable-scale-out, or, if this is a balancer, list its servers in "
        "rollout.engine_arguments.addresses"
    )

    def __init__(
        self, address: str, *, share: float | None = None, proof: str = "", **options: Any
    ) -> None:
        super().__init__(address, **options)
        self._attachment: dict[str, Any] = {"owner": self._owner}
        self._shares = share is not None
        if share is not None:
            self._attachment |= {"holds": ADAPTERS, "share": share, "proof": proof}
        self._engine: dict[str, Any] = {}
        """Result of ``server.describe_engine``."""
        self.worker_devices: Sequence[str] = ()
        """Device of each of the engine's workers, once :meth:`open_group` has started their members."""

    @property
    def kv_capacity_tokens(self) -> int:
        return int(self._engine["kv_capacity_tokens"])

    async def attach(self) -> None:
        self.detach()
        answer = await self._call("POST", ATTACH, self._attachment, is_new=True)
        with self.reading(answer):
            api = answer.get("api")
        if api != API:
            raise ServerRefusedError(
                f"{self.address} has version {api} of the fleet's interface, expected {API}; "
                "install the same release of slipstream there"
            )
        with self.reading(answer):
            self._engine = dict(answer["engine"])
            self.note_process(str(answer["instance"]))
            self._session = str(answer["session"])
            sends_lines = bool(self._engine.get("sends_token_lines")) and not self._shares
            dtype = str(self._engine.get("dtype"))
            self.token_groups = TokenGroups(self, self._cut, dtype=dtype) if sends_lines else None

    def problems(self, config: EngineConfig) -> Iterator[str]:
        engine = self._engine
        text = config.config.get_text_config()
        sizes = {
            "vocab_size": int(text.vocab_size),
            "num_hidden_layers": int(text.num_hidden_layers),
            "hidden_size": int(text.hidden_size),
        }
        settings = {
            "dtype": (config.dtype_name, f"--dtype {config.dtype_name}"),
            "logprobs_mode": ("processed_logprobs", "--logprobs-mode processed_logprobs"),
            "head_dtype": ("float32", """--hf-overrides '{"head_dtype": "float32"}'"""),
            "takes_tokens": (True, "--enable-scale-out"),
            "data_parallel_size": (1, "one server for each replica"),
            "api_processes": (1, "--api-server-count 1"),
        }
        for name, size in sizes.items():
            if engine.get(name) != size:
                yield f"{name} is {engine.get(name)!r}, but {size} in the run; start vLLM with its model"
        for name, (value, fix) in settings.items():
            if engine.get(name) != value:
                yield f"{name} is {engine.get(name)!r}; start vLLM with {fix}"
        if config.images is not None:
            yield from self._image_problems(config.images)
        longest = int(text.max_position_embeddings)
        num_needed = min(longest, config.arguments.get("max_model_len", longest))
        try:
            num_supported, _ = int(engine["max_model_len"]), int(engine["kv_capacity_tokens"])
        except (LookupError, TypeError, ValueError) as error:
            raise ServerRefusedError(
                f"{self.address} describes its engine without max_model_len and kv_capacity_tokens: "
                f"{dict(engine)!s:.300}"
            ) from error
        if num_supported < num_needed:
            yield (
                f"max_model_len is {num_supported}, but the run's requests may have {num_needed} tokens; "
                f"raise --max-model-len, or set rollout.engine_arguments.max_model_len to {num_supported}"
            )

    def _image_problems(self, limits: ImageLimits) -> Iterator[str]:
        engine = self._engine
        needed = {"max_images": limits.max_images, "max_image_tokens": limits.max_tokens}
        if any(int(engine.get(name) or 0) < value for name, value in needed.items()):
            has = {name: engine.get(name, 0) for name in needed}
            yield (
                f"it takes images up to {has}, but the run needs {needed}; start it by "
                f"services.extras.fleets.serve with --max-images {limits.max_images} --max-image-tokens "
                f"{limits.max_tokens}"
            )
        elif self.token_groups is None:
            yield f"it takes images only with its own scheduler; start vLLM with --scheduler-cls {SCHEDULER}"

    async def check(self) -> None:
        self._take(await self._call("GET", STATE))

    async def open_group(self) -> None:
        """Starts a member of weight groups in each of the engine's workers.

        Raises:
            ServerAwayError: If the server does not answer.
            ServerRefusedError: If its workers have no such members.
        """
        answer = await self._call("POST", GROUP, {"open": True}, timeout_s=LOAD_TIMEOUT_S)
        with self.reading(answer):
            self.worker_devices = [str(device) for device in answer["devices"]]

    async def exchange(
        self, messages: Sequence[tuple[int, Message]], *, wait_s: float
    ) -> list[tuple[int, Message]]:
        """Sends messages to workers; returns theirs, as soon as there is one.

        Args:
            messages: Pairs of a worker's number and its message.
            wait_s: Longest time for which the server waits for a message.

        Raises:
            ServerAwayError: If the server does not answer.
        """
        body = {"messages": messages, "wait_s": wait_s}
        answer = await self._call("POST", GROUP, body, timeout_s=wait_s + _EXCHANGE_S)
        with self.reading(answer):
            messages = [(int(number), dict(message)) for number, message in answer["messages"]]
            if all(
                _MESSAGE_KEYS[message["kind"]] <= message.keys() and isinstance(message["job"], int)
                for _, message in messages
            ):
                return messages
            raise ValueError("a message lacks a key, or its job is no number")
        raise AssertionError("a malformed answer raises")

    async def upload(self, weights: FleetWeights | DirectWeights) -> None:
        self.received = None
        if isinstance(weights, DirectWeights):
            await weights.repeat(self, weights)
            self.received = weights
            return
        announced = {
            "version": weights.version,
            "bucket_bytes": BUCKET_BYTES,
            "tensors": [[spec.name, spec.shape, spec.dtype] for spec in weights.plan.tensors],
        }
        timeout_s = ANSWER_TIMEOUT_S + weights.num_bytes / LEAST_RATE
        try:
            async with asyncio.timeout(timeout_s):
                await self._call("POST", WEIGHTS, announced, timeout_s=timeout_s)
                slots = asyncio.Semaphore(_BUCKETS_AT_ONCE)
                await gather_in_group(
                    [self._send(weights, index, slots) for index in range(weights.num_buckets)]
                )
        except TimeoutError as error:
            raise ServerAwayError(
                f"{self.address} did not receive version {weights.version} within {timeout_s:.0f} s"
            ) from error
        self.received = weights

    async def _send(self, weights: FleetWeights, index: int, slots: asyncio.Semaphore) -> None:
        async def parts() -> AsyncIterator[bytes]:
            for bucket_part in weights.parts(index):
                yield bucket_part

        async with slots:
            await self._call(
                "PUT",
                f"{WEIGHTS}/{index}",
                parts(),
                headers={
                    "Content-Type": "application/octet-stream",
                    "Content-Length": str(weights.bucket_bytes(index)),
                    VERSION_HEADER: str(weights.version),
                },
                timeout_s=None,
            )

    async def load(self, weights: FleetWeights | DirectWeights) -> None:
        self.received = None
        self.withdraw()
        body = {"version": weights.version, "digest": weights.digest, "base": weights.base}
        if isinstance(weights, DirectWeights):
            body["received_by"] = "workers"
        answer = await self._call("POST", LOAD, body, timeout_s=LOAD_TIMEOUT_S)
        with self.reading(answer):
            differing = [str(name) for name in answer.get("differing") or ()]
        if differing:
            raise ServerRefusedError(
                f"{self.address} holds other weights than version {weights.version}: {len(differing)} "
                f"tensors differ, such as {', '.join(differing[:3])}; check how vLLM was started there"
            )
        self._take(answer)
        if not self.serves(weights):
            raise ServerRefusedError(
                f"{self.address} serves version {self.version} with digest {self.digest[:12]}, expected "
                f"{weights.version} with {weights.digest[:12]}"
            )
        logger.debug("weights loaded", extra={"server": self.address, "ways": answer.get("ways")})

    async def _cut(self, group: str, numbers: list[int]) -> None:
        await self._call("POST", CUT, {"group": group, "numbers": numbers})

    async def end(self) -> None:
        await self._call("DELETE", ATTACH, timeout_s=END_TIMEOUT_S)

    def request_headers(self) -> dict[str, str]:
        """Returns the headers of a request that must sample under the version in service."""
        headers = {SESSION_HEADER: self._session, VERSION_HEADER: str(self.version)}
        return headers if self.token_groups is None else {**headers, "Accept": TOKEN_LINES}

    def body(self, segment: Segment) -> Mapping[str, Any]:
        request = segment.request
        parameters: dict[str, Any] = {
            "max_tokens": segment.max_tokens,
            "temperature": request.temperature,
            "logprobs": 0,
            "stop_token_ids": sorted(request.stop_token_ids),
            "ignore_eos": True,
            "detokenize": False,
        }
        if self.draws_by_seed:
            parameters["seed"] = segment_seed(request.seed, segment.draw_offset)
        body = {
            "token_ids": segment.context_ids,
            "sampling_params": parameters,
            "stream": True,
            # Blocks of an earlier session may be those of other weights.
            "cache_salt": f"{self.session}.{segment.cache_salt}",
        }
        if (images := request.model_inputs) is not None and images.tensors:
            body["model_inputs"] = images.digest
        return body

    def read_events(self, segment: Segment) -> ReadEvent:
        return self._chunk

    def _chunk(self, event: Mapping[str, Any]) -> TokenChunk | None:
        """Reads the tokens of an event; None for an event without a choice.

        Raises:
            ServerFailedError: If it is malformed, or lacks a token's logprob.
        """
        if not event.get("choices"):
            return None
        try:
            (choice,) = event["choices"]
            token_ids = [int(token) for token in choice.get("token_ids") or []]
            content = (choice.get("logprobs") or {}).get("content") or []
            logprobs = [float(entry["logprob"]) for entry in content if _has_logprob(entry)]
            reason = choice.get("finish_reason")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ServerFailedError(
                f"{self.address} sent a malformed event: {json.dumps(event)[:200]}"
            ) from error
        if len(logprobs) != len(token_ids):
            raise ServerFailedError(
                f"{self.address} sent {len(token_ids)} tokens with {len(logprobs)} logprobs"
            )
        return TokenChunk(token_ids=token_ids, logprobs=logprobs, finish_reason=reason)

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        body = {
            "token_ids": list(token_ids),
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False},
            "stream": False,
        }
        headers = {VERSION_HEADER: str(self.version)}
        answer = await self._call(
            "POST", GENERATE, body, headers=headers, timeout_s=SCORE_TIMEOUT_S
        )
        try:
            _, *entries = answer["prompt_logprobs"]
            return tuple(
                float(entry[str(token)]["logprob"])
                for token, entry in zip(token_ids[1:], entries, strict=True)
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ServerRefusedError(
                f"{self.address} returned no logprobs of a prompt ({error!r}); its vLLM is too old"
            ) from error

    def _take(self, state: Mapping[str, Any]) -> None:
        with self.reading(state):
            version = state["version"]
            self.version = None if version is None else int(version)
            self.digest = str(state["digest"])

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | AsyncIterator[bytes] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = ANSWER_TIMEOUT_S,
        is_new: bool = False,
    ) -> Any:
        """Sends a request of this session; see :meth:`ask`."""
        session = {} if is_new else {SESSION_HEADER: self._session}
        return await self.ask(
            method, path, body, headers={**session, **(headers or {})}, timeout_s=timeout_s
        )


def _has_logprob(entry: Mapping[str, Any]) -> bool:
    """Returns True if an entry has the logprob of a token.

    vLLM 0.26 names tokens ``token_id:N`` only, and writes -9999 where it has no logprob.
    """
    if "token_id" in entry:
        return entry["token_id"] is not None
    return str(entry["token"]).startswith("token_id:") and entry["logprob"] > _NO_LOGPROB
