"""An SGLang server of a fleet, by SGLang's own interface: nothing of Slipstream runs inside it.

Every answer of SGLang states its ``weight_version``, a text that this module sets: owner, session, version
and a counter. The text says ``loading`` before the first byte of a version changes, and names the version
only after the last one, while no request runs; so tokens whose text names a version were sampled under it.
A restarted server has another text, as has one that another rollout took. The counter changes every few
seconds, by which others see that the owner lives.
"""

import asyncio
import base64
import json
import pickle  # noqa: TID251 -- the form of SGLang, which is written here and never read
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from torch import Tensor

from services.extras.external_engine.request_segments import Segment, TokenChunk
from services.extras.fleets.client import (
    ANSWER_TIMEOUT_S,
    END_TIMEOUT_S,
    LEAST_RATE,
    OVERLOADED,
    SCORE_TIMEOUT_S,
    AnyWeights,
    FleetServer,
    ReadEvent,
    ServerAwayError,
    ServerBusyError,
    ServerFailedError,
    ServerOverloadedError,
    ServerRefusedError,
)
from services.extras.fleets.engine import FleetBackend, FleetEngine
from services.extras.fleets.labels import LOADING, NO_VERSION, Label
from services.extras.fleets.protocol import LEASE_S, LOAD_TIMEOUT_S
from services.extras.fleets.weights import FleetWeights
from services.extras.sglang.outputs import new_tokens
from services.rollout.engines.base import EngineCapabilities
from services.rollout.engines.engine_config import EngineConfig

_BEAT_S: Final = LEASE_S / 4
"""Seconds after which the counter changes."""
_SILENCE_S: Final = LEASE_S - _BEAT_S
"""Seconds without a change of the counter after which another owner takes a server."""
_PAUSE_TIMEOUT_S: Final = 30.0
_UNAVAILABLE: Final = 503
_FLUSH_POLL_S: Final = 0.05
_CHUNK_BYTES: Final = 64 << 20
"""Bytes of the tensors of one request, unless one tensor has more."""


def build(config: EngineConfig) -> FleetEngine:
    """Builds the engine ``sglang-server``; :meth:`FleetEngine.run` attaches to its servers."""
    capabilities = EngineCapabilities(
        name="sglang-server",
        kv_policies=frozenset({"recompute"}),
        stop_texts=True,
        truncation=True,
        seeds=config.is_reproducible,
        top_logprobs=True,
    )
    backend = FleetBackend(config, SglangServer, capabilities)
    return FleetEngine.ordered(backend, config, length_argument="context_length")


class SglangServer(FleetServer):
    """Speaks SGLang's interface."""

    path = "/generate"
    wrong_path = (
        "lacks a part of SGLang's interface; use SGLang 0.5.21 or a later one, and, if this is a balancer, "
        "list its servers in rollout.engine_arguments.addresses"
    )

    def __init__(self, address: str, **options: Any) -> None:
        super().__init__(address, **options)
        self._engine: Mapping[str, Any] = {}
        """Answer of ``/server_info``."""
        self._label: Label | None = None
        """Newest ``weight_version`` of the server that this rollout knows."""
        self._beat_at = 0.0
        self._other: tuple[Label, float] | None = None
        """Label of another owner, and the time at which it was seen first."""

    @property
    def kv_capacity_tokens(self) -> int:
        return int(self._engine["max_total_num_tokens"])

    async def attach(self) -> None:
        self.detach()
        started_at = _now()
        model = await self.ask("GET", "/model_info")
        with self.reading(model):
            self._check_other(Label.parse(model["weight_version"]))
        engine = await self.ask("GET", "/server_info")
        with self.reading(engine):
            self._engine = {
                **engine,
                **{key: model[key] for key in ("architectures", "model_type")},
            }
            int(engine["max_total_num_tokens"]), int(engine["max_req_input_len"])
            # A server says no id of its process; these numbers are measured and drawn at its start.
            self.note_process(f"{engine['startup_time']} {engine['random_seed']}")
        self._check_delay(started_at)
        session = secrets.token_hex(8)
        # It also ends the responses of the owner before.
        await self._set_label(
            Label(owner=self._owner, session=session, version=NO_VERSION), aborts=True
        )
        # An owner that died in a load has left it paused.
        await self._control("/continue_generation")
        await self._check_ready()
        self._session = session

    def _check_other(self, label: Label | None) -> None:
        """Checks that no other owner is alive.

        Raises:
            ServerBusyError: If the label of another one changed, or has not been watched for long enough.
        """
        if label is None or label.owner == self._owner:
            self._other = None
            return
        if self._other is None or self._other[0] != label:
            self._other = label, _now()
        if (silence_s := _now() - self._other[1]) < _SILENCE_S:
            raise ServerBusyError(
                f"{self.address}: {label.owner!r} uses this server, or did until {silence_s:.0f} s ago; end "
                "that run, or name another server"
            )
        self._other = None

    def problems(self, config: EngineConfig) -> Iterator[str]:
        engine, architectures = self._engine, list(config.config.architectures or ())
        if architectures and engine["architectures"] != architectures:
            yield f"its model is {engine['architectures']}, but the run has {architectures}"
        needs = {
            "dtype": (config.dtype_name, f"--dtype {config.dtype_name}"),
            "enable_fp32_lm_head": (True, "--enable-fp32-lm-head"),
            "dp_size": (1, "one server for each replica (--dp-size 1)"),
            "pp_size": (1, "--pp-size 1"),
            "tokenizer_worker_num": (1, "--tokenizer-worker-num 1"),
            "disaggregation_mode": ("null", "prefill and decoding in one server"),
            "speculative_algorithm": (None, "no --speculative-algorithm"),
            "quantization": (None, "no --quantization"),
        }
        if self.draws_by_seed:
            needs["enable_deterministic_inference"] = (True, "--enable-deterministic-inference")
        for name, (value, fix) in needs.items():
            if engine.get(name) != value:
                yield f"{name} is {engine.get(name)!r}; start SGLang with {fix}"
        longest = int(config.config.get_text_config().max_position_embeddings)
        num_needed = min(longest, config.arguments.get("context_length", longest))
        num_supported = min(int(engine["max_req_input_len"]), int(engine["max_total_num_tokens"]))
        if num_supported < num_needed:
            yield (
                f"its requests have {num_supported} tokens at most, but the run's may have {num_needed}; "
                f"raise --context-length, or set rollout.engine_arguments.context_length to {num_supported}"
            )

    async def check(self) -> None:
        started_at = _now()
        model = await self.ask("GET", "/model_info")
        with self.reading(model):
            label = Label.parse(model["weight_version"])
        if label is None or label.session != self._session or not self._session:
            raise ServerAwayError(
                f"{self.address} has lost this session: it was restarted, or another owner attached"
            )
        if label.version != str(self.version):
            self.withdraw()
        if _now() - self._beat_at >= _BEAT_S:
            self._check_delay(started_at)
            await self._beat(label.version)
        await self._check_ready()

    async def _check_ready(self) -> None:
        """Checks that the server, which is not paused, was not asked to end.

        After SIGTERM it accepts requests as before, and ends once it has none.

        Raises:
            ServerAwayError: If it was.
        """
        if (await self.send("GET", "/ready"))[0] != _UNAVAILABLE:
            return
        try:
            # After SIGTERM, the server refuses this request at once. If its engine does not answer, it
            # refuses after 20 s, and that failure has another deadline. A successful request marks the
            # server as ready.
            status, _, _ = await self.send("GET", "/health")
        except ServerAwayError:
            return
        if status == _UNAVAILABLE:
            raise ServerAwayError(f"{self.address} was asked to end (SIGTERM), or has not started")

    async def upload(self, weights: AnyWeights) -> None:
        """Does nothing: SGLang has no place for a second version, so that :meth:`load` sends it."""
        self.received = weights

    async def load(self, weights: AnyWeights) -> None:
        assert isinstance(weights, FleetWeights), "only vLLM's servers receive from the trainer"
        self.received = None
        self.withdraw()
        ranks = int(self._engine.get("tp_size") or 1)
        timeout_s = LOAD_TIMEOUT_S + weights.num_bytes * ranks / LEAST_RATE
        try:
            async with asyncio.timeout(timeout_s):
                await self._check_session()
                async with self._paused():
                    await self._set_label(self._next_label(LOADING), aborts=True)
                    async with self._beating():
                        await self._replace(weights, ranks)
                        await self._compare_checksum(weights)
                        await self._flush()
                    await self._check_session()
                    await self._set_label(self._next_label(str(weights.version)), aborts=True)
        except TimeoutError as error:
            raise ServerAwayError(
                f"{self.address} did not load version {weights.version} within {timeout_s:.0f} s"
            ) from error
        self.version, self.digest = weights.version, weights.digest

    async def _check_session(self) -> None:
        model = await self.ask("GET", "/model_info")
        with self.reading(model):
            label = Label.parse(model["weight_version"])
        if label is None or label.session != self._session:
            raise ServerAwayError(
                f"{self.address} has lost this session: it was restarted, or another owner attached"
            )

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Ends all requests and lets no other begin while the block runs; an error leaves the pause."""
        await self._control("/pause_generation", {"mode": "abort"}, timeout_s=_PAUSE_TIMEOUT_S)
        yield
        await self._control("/continue_generation")

    @asynccontextmanager
    async def _beating(self) -> AsyncIterator[None]:
        """Shows that this owner lives while the block runs, of which one operation may outlast a lease."""
        has_ended = asyncio.Event()

        async def beat() -> None:
            while not has_ended.is_set():
                try:
                    async with asyncio.timeout(_BEAT_S):
                        await has_ended.wait()
                except TimeoutError:
                    # The operations have their own deadlines and reasons.
                    with suppress(ServerAwayError, ServerRefusedError):
                        started_at = _now()
                        await self._check_session()
                        self._check_delay(started_at)
                        await self._beat(LOADING)

        beating = asyncio.ensure_future(beat())
        try:
            yield
            # A beat that was cancelled might arrive after the version's label, and replace it.
            has_ended.set()
            await beating
        finally:
            beating.cancel()
            await asyncio.wait([beating])

    async def _replace(self, weights: FleetWeights, ranks: int) -> None:
        """Replaces all weights between the begin and the end of SGLang's update."""
        begin = "/begin_weight_update"
        try:
            await self._control(begin)
        except ServerRefusedError as error:
            if "already open" not in str(error):
                raise
            # An owner died in the middle of an update.
            await self._control("/end_weight_update", timeout_s=LOAD_TIMEOUT_S)
            await self._control(begin)
        for tensors in _chunks(weights.tensors()):
            payload = await asyncio.to_thread(_serialized, tensors)
            await self._control(
                "/update_weights_from_tensor",
                # The cache is flushed once, when it is idle; a flush before would end the scheduler.
                {"serialized_named_tensors": [payload] * ranks, "flush_cache": False},
                timeout_s=LOAD_TIMEOUT_S + len(payload) * ranks / LEAST_RATE,
            )
            await self._check_session()
        await self._control("/end_weight_update", timeout_s=LOAD_TIMEOUT_S)

    async def _compare_checksum(self, weights: FleetWeights) -> None:
        """Compares the checksum of the parameters with that of servers of the same layout, if it has one.

        Raises:
            ServerRefusedError: If it differs.
        """
        if self._engine.get("device") != "cuda":
            return  # SGLang computes it on GPUs only
        answer = await self._control(
            "/weights_checker", {"action": "checksum"}, timeout_s=LOAD_TIMEOUT_S
        )
        with self.reading(answer):
            checksum = str(answer["per_engine_checksum"])
        layout = tuple(
            str(self._engine.get(key)) for key in ("version", "device", "tp_size", "ep_size")
        )
        address, first_checksum = weights.checksums.setdefault(layout, (self.address, checksum))
        if checksum != first_checksum:
            raise ServerRefusedError(
                f"{self.address} holds other weights than {address} after loading version "
                f"{weights.version}: their checksums are {checksum:.12} and {first_checksum:.12}"
            )

    async def _flush(self) -> None:
        """Empties the prefix cache once the last requests have left the scheduler.

        Raises:
            ServerAwayError: If it is not empty in time.
        """
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                while (await self.send("POST", "/flush_cache"))[0] != 200:  # noqa: ASYNC110 -- a server
                    await asyncio.sleep(_FLUSH_POLL_S)
        except TimeoutError as error:
            raise ServerAwayError(
                f"{self.address} did not empty its prefix cache within {ANSWER_TIMEOUT_S:.0f} s"
            ) from error

    async def end(self) -> None:
        async with asyncio.timeout(END_TIMEOUT_S):
            await self._check_session()
            body = {"new_version": NO_VERSION, "abort_all_requests": True}
            await self._control("/update_weight_version", body)
            # It may be paused, if the run ends while weights load.
            await self._control("/continue_generation")

    def body(self, segment: Segment) -> Mapping[str, Any]:
        request = segment.request
        sampling: dict[str, Any] = {
            "max_new_tokens": segment.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "min_p": request.min_p,
            "stop_token_ids": sorted(request.stop_token_ids),
        }
        if self.draws_by_seed:
            # SGLang derives random numbers from seed and position, so that a later segment continues them.
            sampling["sampling_seed"] = request.seed % 2**63
        return {
            # SGLang aborts by prefix, so that no id may be the prefix of another.
            "rid": f"{self.session}.{segment.segment_id};",
            "input_ids": segment.context_ids,
            "sampling_params": sampling,
            "stream": True,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": request.top_logprobs,
            # Blocks of an earlier session may be those of other weights.
            "extra_key": f"{self.session}.{segment.cache_salt}",
        }

    def read_events(self, segment: Segment) -> ReadEvent:
        num_seen, version = 0, str(self.version)
        is_incremental = bool(self._engine.get("incremental_streaming_output"))

        def read(event: Mapping[str, Any]) -> TokenChunk | None:
            nonlocal num_seen
            is_first = not num_seen
            try:
                info = event["meta_info"]
                self._check_version(info, version)
                num_earlier = 0 if is_incremental else num_seen
                token_ids, logprobs, top = new_tokens(
                    info, num_earlier, segment.request.top_logprobs
                )
                num_seen += len(token_ids)
                _check_equal(num_seen, int(info["completion_tokens"]))
                reason = self._finish_reason(info["finish_reason"], segment)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise ServerFailedError(
                    f"{self.address} sent a malformed event ({error!r}): {json.dumps(event)[:300]}"
                ) from error
            cached_tokens = int(info.get("cached_tokens") or 0) if is_first else 0
            return TokenChunk(
                token_ids=token_ids,
                logprobs=logprobs,
                cached_tokens=cached_tokens,
                finish_reason=reason,
                top_logprobs=top,
            )

        return read

    def _check_version(self, info: Mapping[str, Any], version: str) -> None:
        """Checks that all tokens of an output were sampled under a version of this session.

        Raises:
            ServerAwayError: If not.
        """
        texts = [info["weight_version"]]
        texts += [span["version"] for span in info.get("weight_versions") or ()]
        for text in texts:
            label = Label.parse(text)
            if label is None or (label.session, label.version) != (self._session, version):
                raise ServerAwayError(
                    f"{self.address} sampled under {text!r} instead of version {version} of this session"
                )

    def _finish_reason(self, finish: Mapping[str, Any] | None, segment: Segment) -> str | None:
        """Converts SGLang's reason.

        Raises:
            ServerOverloadedError: If the request was refused because of others.
            ServerFailedError: If the server failed.
        """
        if finish is None:
            return None
        if finish["type"] == "stop":
            # A token that ends texts by the server's configuration, but not by the run's: it goes on.
            return "stop" if finish["matched"] in segment.request.stop_token_ids else "abort"
        status = int(finish.get("status_code") or 0)
        if status in OVERLOADED:
            raise ServerOverloadedError(f"{self.address}: {finish.get('message')}")
        if status >= 400:
            raise ServerFailedError(f"{self.address} ended a response: {finish.get('message')}")
        return str(finish["type"])

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        version = str(self.version)
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": f"{self.session}.score.{secrets.token_hex(4)}",
        }
        answer = await self.ask("POST", self.path, body, timeout_s=SCORE_TIMEOUT_S)
        try:
            info = answer["meta_info"]
            self._check_version(info, version)
            if info["finish_reason"]["type"] == "abort":
                raise ServerAwayError(f"{self.address} aborted the logprobs of a prompt")
            entries = info["input_token_logprobs"]
            # Not their ids: SGLang shows 0 in place of the last one of the vocabulary.
            _check_equal(len(entries), len(token_ids))
            return tuple(float(entry[0]) for entry in entries[1:])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ServerRefusedError(
                f"{self.address} returned no logprobs of a prompt ({error!r}): {answer!s:.300}"
            ) from error

    def _next_label(self, version: str) -> Label:
        beat = 0 if self._label is None else self._label.beat + 1
        return Label(owner=self._owner, session=self._session, version=version, beat=beat)

    async def _beat(self, version: str) -> None:
        """Shows that this owner lives."""
        await self._set_label(self._next_label(version), aborts=False)

    async def _set_label(self, label: Label, *, aborts: bool) -> None:
        body = {"new_version": str(label), "abort_all_requests": aborts}
        await self._control("/update_weight_version", body)
        self._label, self._beat_at = label, _now()

    def _check_delay(self, since: float) -> None:
        """Checks that no other owner can have attached since a label was read.

        Raises:
            ServerAwayError: If this process stood still for too long.
        """
        if _now() - since > _BEAT_S:
            raise ServerAwayError(f"{self.address} took more than {_BEAT_S:.0f} s to answer")

    async def _control(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> Mapping[str, Any]:
        """Sends an operation of SGLang's control interface, which says whether it succeeded.

        Raises:
            ServerAwayError: If the server does not answer in time.
            ServerRefusedError: If the operation failed.
        """
        answer = await self.ask("POST", path, body or {}, timeout_s=timeout_s)
        with self.reading(answer):
            if not answer.get("success", True):
                raise ServerRefusedError(f"{self.address}: {path}: {answer.get('message')!s:.300}")
        return dict(answer)


def _check_equal(value: object, expected: object) -> None:
    if value != expected:
        raise ValueError(f"expected {expected}, got {value}")


def _now() -> float:
    return asyncio.get_running_loop().time()


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields tensors in lists of at most ``_CHUNK_BYTES``; larger tensors are alone."""
    chunk: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in tensors.items():
        if chunk and num_bytes + tensor.nbytes > _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append((name, tensor))
        num_bytes += tensor.nbytes
    if chunk:
        yield chunk


def _serialized(tensors: Sequence[tuple[str, Tensor]]) -> str:
    """Returns tensors by value, in the form that SGLang's restricted unpickler reads.

    Clones have their own storages, as a pickled view would contain the whole arena.
    """
    copies = [(name, tensor.clone()) for name, tensor in tensors]
    return base64.b64encode(pickle.dumps(copies)).decode()
