"""A training step of TRL (https://github.com/huggingface/trl) over its prefix trie, with TRL's own code.

Planner, packing, attention, output head and loss are those of its asynchronous trainer. Around them
are the parts of a step of transformers' trainer: micro-batches are made, then moved and trained one
by one, gradients are clipped, weights are updated. Rollouts and the trainer's own bookkeeping are
left out. TRL's attention kernel comes from a hub; here it is the one that our side uses, torch's,
or FlashAttention 4 if that is installed.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedModel

from services.common.runspec.trainer import OptimizerSpec
from services.trainer.batch import flash
from services.trainer.batch.samples import Samples

_LEAST_VERSION = "1.16"
_takes_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
_torch_kernel: Any = partial(varlen_attn, enable_gqa=True) if _takes_gqa else varlen_attn


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch as TRL's collator makes it."""

    inputs: dict[str, Tensor]
    """Inputs of its ``compute_loss``."""
    numbers: tuple[int, ...]
    """Indexes of its samples."""

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens that the model computes."""
        return self.inputs["input_ids"].numel()


class TrlStep:
    """A step over groups.

    Args:
        model: Model from :func:`begin_trl`; trained in place.
        samples: Samples, all of which are trained.
        advantages: ``[R]`` of the response tokens, one value per sample.
        groups: ``[n]`` the group of each sample.
        optimizer: The same as ours.
        clip: Clip distance of the ratio.
        max_tokens: Unique tokens of a micro-batch (``token_budget``).
        device: Device of the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        samples: Samples,
        advantages: Tensor,
        *,
        groups: Tensor,
        optimizer: OptimizerSpec,
        clip: float,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self._trainer = _module("async_grpo_trainer")
        self._model: Any = model
        self._samples = list(_samples(samples, advantages, groups))
        self._num_trained = float(len(samples.responses.values))
        self._max_tokens = max_tokens
        self._device = device
        self._max_norm = optimizer.max_grad_norm
        self._parameters = list(model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self._state = SimpleNamespace(
            accelerator=SimpleNamespace(
                num_processes=1,
                reduce=lambda values, reduction: values,
                gather=lambda values: values,
            ),
            epsilon_low=clip,
            epsilon_high=clip,
            aux_loss_enabled=False,
            # The loss is divided by the tokens of the whole update, like ours.
            current_gradient_accumulation_steps=1,
            _metrics={"train": defaultdict(list)},
            **dict.fromkeys(_COUNTERS, 0.0),
        )
        self._trained_batches: list[tuple[Batch, Tensor]] = []

    def packed(self) -> list[Batch]:
        """Plans and packs the micro-batches on the CPU."""
        # The planner waits until a further sample does not fit; this filler is that sample.
        filler = {**self._samples[-1], "group_id": -1, "number": -1}
        filler["input_ids"] = torch.zeros(self._max_tokens, dtype=torch.int64)
        filler["completion_mask"] = torch.zeros(self._max_tokens, dtype=torch.int64)
        planner = self._trainer.TokenBudgetBatcher(
            [*self._samples, filler], 1, self._max_tokens, defaultdict(list)
        )
        collator = self._trainer.DataCollatorForRollout(0, 1, token_budget=self._max_tokens)
        batches = []
        for rows in planner:
            inputs = collator.torch_call([rows])
            inputs["global_n_tokens"] = torch.full((1,), self._num_trained)
            numbers = tuple(sample["number"] for row in rows for sample in row.samples)
            batches.append(Batch(inputs, numbers))
        trained = sorted(number for batch in batches for number in batch.numbers)
        assert trained == list(range(len(self._samples))), "TRL's planner left samples out"
        return batches

    def run(self, batches: list[Batch] | None = None) -> tuple[float, float]:
        """Trains the samples once.

        Args:
            batches: Prepared micro-batches; None makes them before the first is trained, as
                transformers' trainer does.

        Returns:
            Loss and norm of the gradients.
        """
        self._trained_batches, losses = [], []
        for batch in self.packed() if batches is None else batches:
            inputs = {name: values.to(self._device) for name, values in batch.inputs.items()}
            forward = partial(self._forward, batch)
            loss = self._trainer.AsyncGRPOTrainer.compute_loss(self._state, forward, inputs)
            loss.backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).sum()), float(norm)

    def logprobs(self) -> Tensor:
        """Returns ``[R]`` the logprobs of the last step, before its update, in the order of the samples."""
        logprobs_of_row: dict[int, Tensor] = {}
        for batch, values in self._trained_batches:
            terms = values.cpu()[batch.inputs["token_index"].flatten()]
            owners = batch.inputs["segment_id"].flatten()
            for index, number in enumerate(batch.numbers):
                logprobs_of_row[number] = terms[owners == index]
        return torch.cat([logprobs_of_row[number] for number in sorted(logprobs_of_row)])

    def _forward(self, batch: Batch, **inputs: Any) -> Any:
        outputs = self._model(**inputs)
        self._trained_batches.append((batch, outputs.log_probs.detach().flatten()))
        return outputs


_COUNTERS = (
    "_last_forward_time_s",
    "_step_forward_tokens",
    "_step_trained_tokens",
    "_step_seq_len_weighted",
    "_step_samples",
    "_step_forward_s",
)
"""Metrics that the loss adds to the trainer's."""


def trl_version() -> str:
    """Returns the version of the package.

    Raises:
        SystemExit: If it is not installed, or has no tree packing.
    """
    _module("packing")
    return version("trl")


def begin_trl(model: PreTrainedModel, dtype: torch.dtype, *, recomputes: bool) -> None:
    """Replaces a model's attention and output head by TRL's, in place.

    Args:
        model: Model with any attention.
        dtype: Dtype of its weights and computation; frequencies of rotary embeddings remain
            float32.
        recomputes: If true, layers keep only their inputs.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    packing, kernels = _module("packing"), SimpleNamespace(flash_attn_varlen_func=_attention)
    packing._flash_attn = lambda: kernels  # noqa: SLF001 -- there is no other way to name a kernel
    packing.register_tree_attention()
    model.set_attn_implementation(packing.TREE_ATTENTION)
    import_module("trl.trainer.utils").add_fused_lm_head(
        model, temperature=1.0, outputs=("log_probs", "entropy")
    )
    if recomputes:
        untyped: Any = model
        untyped.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()


def _module(name: str) -> Any:
    try:
        return import_module(f"trl.experimental.async_grpo.{name}")
    except ImportError as error:
        raise SystemExit(
            f"the peer is TRL from {_LEAST_VERSION} on, which does not load here: {error}; "
            f"pip install 'trl>={_LEAST_VERSION}'"
        ) from error


def _samples(samples: Samples, advantages: Tensor, groups: Tensor) -> Iterator[dict[str, Any]]:
    """Yields samples in the form that TRL's rollouts pass to its trainer."""
    lengths = samples.responses.lengths.tolist()
    parts = zip(
        samples.prompts.unbind(),
        samples.responses.unbind(),
        samples.tokens["rollout_logprobs"].split(lengths),
        advantages.split(lengths),
        strict=True,
    )
    for number, (prompt, response, logprobs, token_advantages) in enumerate(parts):
        nothing = torch.zeros(len(prompt))
        yield {
            "number": number,
            "group_id": int(groups[number]),
            "input_ids": torch.cat([prompt, response]).long(),
            "completion_mask": torch.cat([nothing, torch.ones(len(response))]).long(),
            "old_log_probs": torch.cat([nothing, logprobs]),
            "advantage": float(token_advantages[0]),
            "metrics": {},
        }


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    max_queries: int,
    max_keys: int,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """Returns ``[T, heads, D]`` attention of queries that are at the ends of their keys."""
    assert causal, "TRL asks for attention to later tokens"
    if not query.is_cuda:
        return _exact_attention(query, key, value, cu_queries, cu_keys, scale=softmax_scale)
    query, key, value = (tensor.contiguous() for tensor in (query, key, value))
    if flash.is_here() and query.shape[-1] in flash.HEAD_SIZES:
        return flash.flash_attention(
            query,
            key,
            value,
            cu_queries=cu_queries,
            cu_keys=cu_keys,
            max_queries=max_queries,
            max_keys=max_keys,
            scaling=query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            window=None if window_size[0] < 0 else window_size[0] + 1,
        )
    output: Tensor = _torch_kernel(
        query,
        key,
        value,
        cu_queries,
        cu_keys,
        max_queries,
        max_keys,
        scale=softmax_scale,
        window_size=(window_size[0], 0),
    )
    return output


def _exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    *,
    scale: float | None,
) -> Tensor:
    """Returns the same on any device, sequence by sequence and without windows."""
    parts = []
    bounds = (pairwise(cumulative_lengths.tolist()) for cumulative_lengths in (cu_queries, cu_keys))
    for (begin, end), (first, last) in zip(*bounds, strict=True):
        q, k, v = (
            states.transpose(0, 1)[None]
            for states in (query[begin:end], key[first:last], value[first:last])
        )
        visible = torch.ones(end - begin, last - first, dtype=torch.bool, device=query.device)
        visible = visible.tril(last - first - (end - begin))
        output = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=scale, enable_gqa=True
        )
        parts.append(output[0].transpose(0, 1))
    return torch.cat(parts)
