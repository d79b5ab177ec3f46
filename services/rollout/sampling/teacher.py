"""Adds the fields for distillation to samples: teachers' prompts, and distributions of a served teacher.

A vLLM or SGLang server returns, for each token of a response, its logprob and the most likely tokens at its
position. They become fields of the samples, so that a large teacher needs no GPU of the trainer.
"""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.common.fields import TEACHER_PROMPT, TEACHER_TOP_K
from services.common.models.tokenizer import Tokenizer
from services.common.runspec.run import RunSpec, TeacherSpec
from services.rollout import metrics
from services.rollout.calls.outside import AddressPolicy, ExternalService, delays
from services.rollout.data.prompts import Prompt
from services.rollout.failures import BusyError, CallError, GroupError
from services.rollout.sampling.sample import Sample
from services.rollout.workflows.turns import divided, observed, token_ids

_PATHS = {"vllm": "/v1/completions", "sglang": "/generate"}
_BYTES_PER_TOKEN = 96
"""Max bytes of one token and its logprob in a server's response."""
_OTHERS, _NOBODY = -1.0, -1e30
_FIRST_DELAY_S, _MAX_DELAY_S = 0.2, 5.0


class Teacher:
    """Queries the served teachers of a run's sets, and builds the prompts that teachers see.

    Args:
        tokenizer: Tokenizer of the policy and of the teacher.
        max_tokens: Max tokens of a prompt and its response.
        reach: Addresses that servers may have.
        transport: Replaces the network in tests.
    """

    def __init__(
        self,
        spec: RunSpec,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        reach: AddressPolicy,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        assert spec.teacher is not None, "the caller checks that the run has a teacher"
        self._spec: TeacherSpec = spec.teacher
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._fields = spec.teacher_fields
        self._top_k = 1 if spec.distillation is None else spec.distillation.top_k or 1
        self._places = asyncio.Semaphore(spec.teacher.concurrency)
        longest = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
        self._services = {
            split: ExternalService(
                url.rstrip("/") + _PATHS[spec.teacher.server],
                reach=reach,
                transport=transport,
                max_answer_bytes=(1 << 20) + longest * (self._top_k + 1) * _BYTES_PER_TOKEN,
            )
            for split, url in spec.teacher_urls.items()
        }

    async def close(self) -> None:
        for service in self._services.values():
            await service.close()

    async def fields(
        self, split: str, prompt: Prompt, samples: Sequence[Sample]
    ) -> dict[str, list[Tensor]]:
        """Returns the fields of the samples of one group by name, as the data dictionary defines them.

        Args:
            split: Set that the prompt belongs to.
            samples: All samples of the group; :attr:`TeacherSpec.demonstration` shows one to the teacher.

        Raises:
            GroupError: If a server fails or does not answer before the deadline; a retry may succeed.
        """
        prompts = [self._prompt(prompt, sample, samples) for sample in samples]
        fields: dict[str, list[Tensor]] = {}
        if TEACHER_PROMPT in self._fields:
            fields[TEACHER_PROMPT] = [torch.tensor(ids, dtype=torch.int32) for ids in prompts]
        if split not in self._services:
            return fields
        try:
            async with asyncio.timeout(self._spec.timeout_s):
                rows = await asyncio.gather(
                    *(
                        self._taught(self._services[split], ids, sample)
                        for ids, sample in zip(prompts, samples, strict=True)
                    )
                )
        except (TimeoutError, CallError) as error:
            reason = str(error) or f"it did not answer within {self._spec.timeout_s:g} s"
            raise GroupError(
                "teacher_failed",
                f"the teacher of data.{split} failed: {reason}; check its log, or raise teacher.timeout_s",
                retryable=True,
            ) from error
        columns = {
            "ref_logprobs": [torch.from_numpy(values) for values, _ in rows],
            TEACHER_TOP_K: [torch.from_numpy(values) for _, values in rows],
        }
        return fields | {name: rows for name, rows in columns.items() if name in self._fields}

    def _prompt(self, prompt: Prompt, sample: Sample, samples: Sequence[Sample]) -> Sequence[int]:
        """Returns the tokens that the teacher sees before a response; empty if the sample has no teacher."""
        if self._spec.demonstration is None:
            return prompt.teacher_ids or sample.prompt_ids
        good = [
            peer
            for peer in samples
            if peer.member != sample.member
            and peer.finish_reason != "failed"
            and peer.score.value >= self._spec.min_reward
        ]
        if not good:
            metrics.UNTAUGHT_SAMPLES.labels(reason="no_demonstration").inc()
            return ()
        best = max(good, key=lambda peer: peer.score.value)
        text = self._tokenizer.decode(best.response_ids)
        if not prompt.messages:  # the text of a chat is escaped when it is rendered
            text = self._tokenizer.escape(text)
        instruction = self._spec.demonstration.replace("{response}", text)
        if prompt.messages:
            *earlier, last = prompt.messages
            conversation = [*earlier, {**last, "content": last["content"] + instruction}]
            ids = self._tokenizer.apply_chat_template(conversation, prompt.tools)
        else:
            ids = self._tokenizer.encode_prompt(prompt.text + instruction)
        if len(ids) + len(sample.response_ids) > self._max_tokens:
            metrics.UNTAUGHT_SAMPLES.labels(reason="too_long").inc()
            return ()
        return ids

    async def _taught(
        self, service: ExternalService, prompt_ids: Sequence[int], sample: Sample
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Returns logprobs ``[R]`` and distributions ``[R, K + 1, 2]`` of a sample's response.

        The prompts of further conversations, and samples without a teacher, have zeros.
        """
        conversations = divided((observed(sample.prompt_ids), *sample.turns))
        size = sum(len(token_ids(talk)) for talk in conversations) - len(sample.prompt_ids)
        logprobs = np.zeros(size, np.float32)
        top = np.zeros((size, self._top_k + 1, 2), np.float32)
        end = -len(sample.prompt_ids)
        for number, (first, *turns) in enumerate(conversations):
            start, rest = end + len(first.token_ids), list(token_ids(turns))
            end = start + len(rest)
            context = list(first.token_ids) if number else list(prompt_ids)
            if not context or not rest:
                continue
            async with self._places:
                body = await self._answer(service, [*context, *rest])
            scored = await asyncio.to_thread(
                parsed, self._spec.server, body, rest, top_k=self._top_k
            )
            logprobs[start:end], top[start:end] = scored
        return logprobs, top

    async def _answer(self, service: ExternalService, ids: Sequence[int]) -> bytes:
        """Requests logprobs, and retries while the server is busy or down; the caller enforces a deadline."""
        if self._spec.server == "vllm":
            request: Mapping[str, Any] = {
                "prompt": ids,
                "max_tokens": 1,
                "temperature": 1.0,
                "prompt_logprobs": self._top_k,
            }
        else:
            request = {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": self._top_k,
            }
        waits = delays(_FIRST_DELAY_S, _MAX_DELAY_S)
        while True:
            try:
                response = await service.post(request)
                if response.status_code != 429 and response.status_code < 500:
                    break
            except (BusyError, httpx.TransportError):
                pass
            await asyncio.sleep(next(waits))
        if not response.is_success:
            raise CallError(
                "exception", f"it returned status {response.status_code}: {response.text[:300]}"
            )
        return response.content


def parsed(
    server: str, body: bytes, response: Sequence[int], *, top_k: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Reads a server's answer: logprobs ``[R]`` and distributions ``[R, K + 1, 2]`` of the last ``R`` tokens.

    Args:
        server: ``vllm`` or ``sglang``.
        response: The ``R`` tokens.
        top_k: ``K``, the number of most likely tokens at each position.

    Raises:
        CallError: If the answer has another form, or fewer tokens.
    """
    logprobs = np.zeros(len(response), np.float32)
    top = np.full((len(response), top_k + 1, 2), _OTHERS, np.float32)
    try:
        rows = (_of_vllm if server == "vllm" else _of_sglang)(json.loads(body), response)
        for row, (logprob, likely) in enumerate(rows):
            logprobs[row] = logprob
            top[row, :top_k] = np.reshape(likely[:top_k], (top_k, 2))  # raises if there are fewer
            rest = 1.0 - math.fsum(math.exp(value) for _, value in likely[:top_k])
            top[row, top_k, 1] = math.log(rest) if rest > 0 else _NOBODY
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CallError(
            "invalid_value",
            f"it did not return the {top_k} most likely tokens for each of {len(response)} tokens ({error}); "
            "check teacher.server, and vLLM's --max-logprobs",
        ) from error
    return logprobs, top


_Row = tuple[float, list[tuple[float, float]]]
"""Logprob of a token, and ids and logprobs of the most likely tokens at its position, most likely first."""


def _of_vllm(answer: Any, response: Sequence[int]) -> list[_Row]:
    entries = answer["choices"][0]["prompt_logprobs"][-len(response) :]
    if len(entries) < len(response):
        raise ValueError(f"{len(entries)} tokens")
    rows = []
    for token, entry in zip(response, entries, strict=True):
        # vLLM adds the token itself to the most likely tokens if it is not among them.
        ranked = sorted(
            (value["rank"], float(key), value["logprob"]) for key, value in entry.items()
        )
        likely = [(key, logprob) for _, key, logprob in ranked]
        rows.append((float(entry[str(token)]["logprob"]), likely))
    return rows


def _of_sglang(answer: Any, response: Sequence[int]) -> list[_Row]:
    facts = answer["meta_info"]
    response_entries = facts["input_token_logprobs"][-len(response) :]
    top = facts["input_top_logprobs"][-len(response) :]
    if [entry[1] for entry in response_entries] != list(response):
        raise ValueError("other tokens")
    return [
        (float(logprob), [(float(token), float(value)) for value, token, *_ in likely])
        for (logprob, *_), likely in zip(response_entries, top, strict=True)
    ]
