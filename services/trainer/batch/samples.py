"""Samples of a rank: prompts, responses, and columns with one number per response token.

An episode of several conversations is one stored response, which is split into token sequences::

    prompt_ids        response_ids
    [prompt 0]        [response 0] [prompt 1] [response 1] ...
    version_runs            >= -1         -2         >= -1
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from services.common.errors import InternalError
from services.common.fields import (
    PROMPT_VERSION,
    ROUTED_EXPERTS,
    SAMPLER_TOP_K,
    SAMPLING_MASK,
    TEACHER_PROMPT,
    TEACHER_TOP_K,
    TOKEN_REWARDS,
)
from services.common.runspec.algorithm import AlgorithmSpec
from services.common.runspec.run import RunSpec
from services.common.runspec.workers import kinds_with_own_gpus
from services.trainer.batch.columns import ADDED, TEACHER_STATES, fetched_columns, idle_columns
from services.trainer.batch.packing import PackedTokens, pack
from services.trainer.batch.prefixes import InputSpan
from services.trainer.batch.segments import Segments, on_device
from services.wire.batch import MISSING, KVBatchMeta
from services.wire.data.jagged import Jagged
from services.wire.data.model_inputs import ModelInputs


@dataclass(frozen=True, slots=True, eq=False)
class SampleInputs:
    """Model inputs of one sample."""

    prompt: ModelInputs
    """Inputs of its prompt."""
    turns: Mapping[int, ModelInputs] = field(default_factory=dict)
    """Inputs of observed turns, by the index of the turn's first token in prompt plus response."""


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The ``n`` token sequences of ``N`` samples, one sample after the other."""

    samples: Tensor
    """``[n]`` int64: position of each sequence's sample."""
    numbers: Tensor
    """``[n]`` int64: number of each sequence within its sample, from 0."""
    prompts: Jagged
    """``n`` rows of token ids."""
    responses: Jagged
    """``n`` rows of token ids."""
    is_response: Tensor
    """``[R]`` bool: True for response tokens; False for the prompts of a sample's further sequences."""
    is_observed: Tensor | None = None
    """``[r]`` bool: tokens of the sequences' responses that the policy did not sample; None if unknown."""
    experts: Jagged | None = None
    """``n`` rows ``[P + R - 1, layers, K]``; None if unknown."""
    masks: Jagged | None = None
    """``n`` rows ``[S]``: sampling masks of the responses; None if all tokens could be drawn."""

    def inputs_of(self, inputs: Sequence[SampleInputs]) -> tuple[tuple[InputSpan, ...], ...]:
        """Returns the model inputs of each sequence; empty if the run has none.

        Args:
            inputs: Inputs of each sample.
        """
        if not inputs:
            return ()
        sequence_spans, start = list[tuple[InputSpan, ...]](), 0
        rows = zip(
            self.samples.tolist(),
            self.numbers.tolist(),
            self.prompts.lengths.tolist(),
            self.responses.lengths.tolist(),
            self._observed(),
            strict=True,
        )
        for sample, number, prompt, response, observed in rows:
            start = 0 if number == 0 else start
            item, length = inputs[sample], prompt + response
            bundles = {n - start: turn for n, turn in item.turns.items() if 0 <= n - start < length}
            if number == 0:
                first = [item.prompt, *(turn for n, turn in bundles.items() if n == 0)]
                bundles = {**bundles, 0: ModelInputs.concat(first)}
            spans = []
            for first, bundle in sorted(bundles.items()):
                end = prompt
                if first >= prompt:
                    sampled = torch.nonzero(~observed[first - prompt :])
                    end = first + int(sampled[0]) if len(sampled) else length
                spans.append(InputSpan(first, end, bundle))
            sequence_spans.append(tuple(span for span in spans if span.inputs.digest))
            start += length
        return tuple(sequence_spans)

    def _observed(self) -> list[Tensor]:
        """Returns ``[R]`` bool for each sequence: response tokens that the policy may not have sampled."""
        flags = self.is_observed
        values = (
            torch.ones_like(self.responses.values, dtype=torch.bool) if flags is None else flags
        )
        return Jagged(values, self.responses.lengths).unbind()

    def of_samples(self, columns: Tensor) -> Tensor:
        """Maps values of the sequences' response tokens to those of the samples, 0 at further prompts."""
        padded = columns.new_zeros(len(self.is_response), *columns.shape[1:])
        padded[self.is_response] = columns
        return padded


def sequences_of(fields: Mapping[str, Jagged]) -> Sequences:
    """Splits samples into their sequences.

    Args:
        fields: ``prompt_ids``, ``response_ids`` and optionally ``version_runs``, ``routed_experts`` and
            ``sampling_mask``, of matching lengths. Without versions every sample is one sequence.
    """
    prompts, responses = fields["prompt_ids"], fields["response_ids"]
    experts, masks = fields.get(ROUTED_EXPERTS), fields.get(SAMPLING_MASK)
    rows = torch.arange(len(responses))
    is_prompt, is_observed = torch.zeros(len(responses.values), dtype=torch.bool), None
    if "version_runs" in fields:
        runs = fields["version_runs"].values.to(torch.int64).reshape(-1, 2)
        versions = torch.repeat_interleave(runs[:, 0], runs[:, 1])
        is_prompt, is_observed = versions == PROMPT_VERSION, versions < 0
    if not bool(is_prompt.any()):
        return Sequences(
            rows,
            torch.zeros_like(rows),
            prompts,
            responses,
            ~is_prompt,
            is_observed,
            experts,
            masks,
        )
    row_of = torch.repeat_interleave(rows, responses.lengths)
    follows = torch.zeros_like(is_prompt)
    follows[1:] = is_prompt[:-1] & (row_of[1:] == row_of[:-1])
    begins = is_prompt & ~follows
    further = torch.bincount(row_of[begins], minlength=len(rows))
    samples = torch.repeat_interleave(rows, further + 1)
    firsts = torch.cumsum(further + 1, 0) - further - 1
    sequence_of = row_of + torch.cumsum(begins, 0)
    inner, lengths = (
        torch.bincount(sequence_of[mask], minlength=len(samples))
        for mask in (is_prompt, ~is_prompt)
    )
    token_rows = Jagged(responses.values[is_prompt], inner).unbind()
    for first, prompt in zip(firsts.tolist(), prompts.unbind(), strict=True):
        token_rows[first] = prompt.to(responses.values.dtype)
    sequences = Sequences(
        samples=samples,
        numbers=torch.arange(len(samples)) - firsts[samples],
        prompts=Jagged.from_list(token_rows),
        responses=Jagged(responses.values[~is_prompt], lengths),
        is_response=~is_prompt,
        is_observed=None if is_observed is None else is_observed[~is_prompt],
    )
    if masks is not None:
        token_of = torch.cumsum(masks.values < 0, 0) - 1
        is_response = sequences.is_response[token_of]
        sizes = torch.bincount(sequence_of[token_of][is_response], minlength=len(samples))
        sequences = replace(sequences, masks=Jagged(masks.values[is_response], sizes))
    return sequences if experts is None else _with_experts(sequences, experts)


def _with_experts(sequences: Sequences, experts: Jagged) -> Sequences:
    """Splits the experts of samples by sequence; a sample has experts for all tokens but its last."""
    lengths = sequences.prompts.lengths + sequences.responses.lengths
    values, rows, position = [], experts.unbind(), 0
    for sample, number, length in zip(
        sequences.samples.tolist(), sequences.numbers.tolist(), lengths.tolist(), strict=True
    ):
        position = 0 if number == 0 else position
        values.append(rows[sample][position : position + length - 1])
        position += length
    return replace(sequences, experts=Jagged.from_list(values))


_CORRECTION_FIELDS = ("rollout_logprobs", "version_runs")
_REQUIRED_FIELDS = ("prompt_ids", "response_ids", "response_mask", "rewards")


class IncompleteBatchError(InternalError):
    """A batch lacks what other workers add and the algorithm needs; no setting of the run is at fault."""

    reason = "INCOMPLETE_BATCH"


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """The ``n`` token sequences of one rank's samples, or of a micro-batch; most samples are one sequence."""

    rows: Tensor
    """``[n]`` int64: index of each sequence's sample in the whole batch."""
    numbers: Tensor
    """``[n]`` int64: number of each sequence within its sample, from 0."""
    prompts: Jagged
    """``n`` rows of token ids."""
    responses: Jagged
    """``n`` rows of token ids."""
    rewards: Tensor
    """``[n]`` float32 task rewards of the samples."""
    tokens: Mapping[str, Tensor]
    """Columns ``[R, ...]`` over all response tokens: ``response_mask``, ``loss_mask`` and others."""
    experts: Jagged | None = None
    """``n`` rows ``[P + R - 1, layers, K]``: experts that the engine chose, as in the data dictionary."""
    masks: Jagged | None = None
    """``n`` rows ``[S]``: tokens that could be drawn for each response token, as in the data dictionary."""
    teacher_prompts: Jagged | None = None
    """``n`` rows of token ids: what the teacher sees in place of the prompt; None if it sees the prompt."""
    inputs: tuple[tuple[InputSpan, ...], ...] = ()
    """Model inputs of each sequence, in the order of their tokens; empty if the run has none."""
    groups: Tensor | None = None
    """``[n]`` int64, group of each sequence, if the loss compares the members of a group."""

    @property
    def segments(self) -> Segments:
        """Sequences of the response tokens."""
        return Segments.from_lengths(self.responses.lengths)

    @property
    def counted(self) -> Tensor:
        """``[R]`` bool: the trained tokens whose number losses are divided by."""
        return self.tokens.get("counted", self.tokens["loss_mask"])

    @property
    def is_first(self) -> Tensor:
        """``[n]`` bool: the first sequence of each sample."""
        return self.numbers == 0

    @property
    def by_sample(self) -> Segments:
        """Samples as segments of the sequences.

        Invalid for a micro-batch, which may lack some of a sample's sequences.
        """
        ids = torch.cumsum(self.is_first, 0) - 1
        return Segments(lengths=torch.bincount(ids), ids=ids)

    def with_tokens(self, **columns: Tensor) -> "Samples":
        return replace(self, tokens={**self.tokens, **columns})

    def without_tokens(self, name: str) -> "Samples":
        return replace(self, tokens={key: v for key, v in self.tokens.items() if key != name})

    def places(self, positions: Sequence[int]) -> Tensor:
        """Returns the indexes of the response tokens of some sequences in the columns."""
        everything = torch.arange(len(self.responses.values))
        return Jagged(everything, self.responses.lengths).select(positions).values

    def select(self, positions: Sequence[int]) -> "Samples":
        indices = torch.as_tensor(positions, dtype=torch.int64)
        token_places = self.places(positions)
        return Samples(
            rows=self.rows[indices],
            numbers=self.numbers[indices],
            prompts=self.prompts.select(indices),
            responses=self.responses.select(indices),
            rewards=self.rewards[indices],
            tokens={name: column[token_places] for name, column in self.tokens.items()},
            experts=None if self.experts is None else self.experts.select(indices),
            masks=None if self.masks is None else self.masks.select(indices),
            teacher_prompts=None
            if self.teacher_prompts is None
            else self.teacher_prompts.select(indices),
            inputs=tuple(self.inputs[index] for index in positions) if self.inputs else (),
            groups=None if self.groups is None else self.groups[indices],
        )

    @property
    def distributions(self) -> Tensor | None:
        """``[R, ...]`` distributions of the teacher or the sampler; None if the run compares none."""
        names = (TEACHER_TOP_K, TEACHER_STATES, SAMPLER_TOP_K)
        return next((self.tokens[name] for name in names if name in self.tokens), None)

    @property
    def of_teacher(self) -> "Samples":
        """The samples as the teacher sees them."""
        prompts = self.prompts if self.teacher_prompts is None else self.teacher_prompts
        return replace(self, prompts=prompts)

    def to(self, device: torch.device) -> "Samples":
        """Returns the samples with their columns ``[R]`` on ``device``; no other tensors are moved."""
        columns = {
            name: on_device(column, device)
            for name, column in self.tokens.items()
            if column.ndim == 1
        }
        return self.with_tokens(**columns)


def pack_samples(samples: Samples, device: torch.device, *, shares_prefixes: bool) -> PackedTokens:
    """Packs samples into a micro-batch, with known experts and the prompts' model inputs."""
    return pack(
        samples.prompts,
        samples.responses,
        device=device,
        shares_prefixes=shares_prefixes,
        experts=samples.experts,
        masks=samples.masks,
        distributions=samples.distributions,
        inputs=samples.inputs,
    )


def empty_samples(fields: Sequence[str]) -> Samples:
    """Returns the samples of a rank that has none in a step.

    Args:
        fields: Fields that the other ranks fetch; this one must have the same columns.
    """
    no_rows = Jagged(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    nothing, no = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    tokens = dict.fromkeys(fetched_columns(fields), nothing)
    if "version_runs" in fields:
        tokens["token_versions"] = torch.zeros(0, dtype=torch.int64)
    return Samples(
        rows=torch.zeros(0, dtype=torch.int64),
        numbers=torch.zeros(0, dtype=torch.int64),
        prompts=no_rows,
        responses=no_rows,
        rewards=nothing,
        tokens={"response_mask": no, "loss_mask": no, **tokens},
    )


def idle_samples() -> Samples:
    """Returns one untrained token, with which a rank without work joins the collectives of the others.

    It belongs to no sample: its row is -1.
    """
    one_row = Jagged(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
    return Samples(
        rows=torch.full((1,), -1),
        numbers=torch.zeros(1, dtype=torch.int64),
        prompts=one_row,
        responses=one_row,
        rewards=torch.zeros(1),
        tokens=idle_columns(),
        groups=torch.zeros(1, dtype=torch.int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class BatchFacts:
    """Facts about the whole batch that every rank knows, from its metadata alone."""

    groups: Tensor
    """``[N]`` int64 index of each sample's group, in order of appearance."""
    lengths: tuple[int, ...]
    """Tokens of each sample, prompt and response."""
    prompt_lengths: tuple[int, ...]
    """Tokens of each sample's prompt."""
    is_truncated: Tensor
    """``[N]`` bool: the response reached its limit."""
    is_member: Tensor
    """``[N]`` bool: the sample counts in its group; greedy baselines and failed samples do not."""
    is_greedy: Tensor
    """``[N]`` bool: the response was decoded greedily, as a baseline."""
    is_failed: Tensor
    """``[N]`` bool: the sample has no reward."""
    keys: tuple[str, ...] = ()
    """Keys of the samples."""
    terms: tuple[str, ...] = ()
    """Terms of each sample's reward as JSON, as in the tag; empty if the batch has none."""

    @property
    def lost_baseline(self) -> Tensor:
        """``[N]`` bool: the greedy response of the sample's group failed, so its baseline is unknown."""
        has_lost = torch.zeros(int(self.groups.max()) + 1, dtype=torch.bool)
        has_lost[self.groups[self.is_greedy & self.is_failed]] = True
        return has_lost[self.groups]

    @classmethod
    def from_meta(cls, meta: KVBatchMeta) -> "BatchFacts":
        """Reads the tags and lengths of a batch."""
        names = list(dict.fromkeys(meta.tag("group_id")))
        numbers = {name: index for index, name in enumerate(names)}
        prompts, responses = meta.column("prompt_ids"), meta.column("response_ids")
        reasons = meta.tag("finish_reason")
        greedy = torch.tensor([bool(value) for value in meta.tag("greedy")])
        failed = torch.tensor([reason == "failed" for reason in reasons])
        return cls(
            keys=meta.keys,
            terms=tuple(map(str, meta.tags.get("terms", ()))),
            groups=torch.tensor([numbers[name] for name in meta.tag("group_id")]),
            lengths=tuple(p + r for p, r in zip(prompts.lengths, responses.lengths, strict=True)),
            prompt_lengths=prompts.lengths,
            is_truncated=torch.tensor([reason == "length" for reason in reasons]),
            is_member=~(greedy | failed),
            is_greedy=greedy,
            is_failed=failed,
        )


def wanted_fields(meta: KVBatchMeta, spec: RunSpec) -> tuple[str, ...]:
    """Returns the fields to fetch for a step.

    Raises:
        IncompleteBatchError: If the batch lacks a field that the algorithm needs.
    """
    present = {column.name for column in meta.fields if MISSING not in column.blob_indexes}
    correction = spec.algorithm.correction
    required: tuple[str, ...] = _REQUIRED_FIELDS
    # No policy sampled a demonstration.
    optional: tuple[str, ...] = () if spec.algorithm.num_demonstrations else _CORRECTION_FIELDS
    if correction != "none":
        required += _CORRECTION_FIELDS
    missing_fields = [name for name in required if name not in present]
    if missing_fields:
        raise IncompleteBatchError(
            f"the batch lacks {', '.join(missing_fields)}, which algorithm.correction "
            f"{correction!r} needs; check the rollouts' logs, or set algorithm.correction "
            "to 'none' (synchronous training only)",
            missing=", ".join(missing_fields),
        )
    for role, kind in kinds_with_own_gpus(spec.topology).items():
        for name in kind.adds:
            if name not in present:
                raise IncompleteBatchError(
                    f"the batch lacks {name}, which the workers of the role {role} add; check their logs",
                    missing=name,
                )
    if spec.rollout.routing_replay != "off":
        optional += (ROUTED_EXPERTS,)
    for name, use in _fields_of_rollouts(spec).items():
        optional += (name,)
        if name not in present:
            raise IncompleteBatchError(f"the batch lacks {name}, which {use}", missing=name)
    names = (*_REQUIRED_FIELDS, *optional, *ADDED, "proximal_version", TOKEN_REWARDS)
    return tuple(name for name in dict.fromkeys(names) if name in present)


def _fields_of_rollouts(spec: RunSpec) -> dict[str, str]:
    """Returns the fields that rollouts must add for this run, with what needs each."""
    providers = dict.fromkeys(
        spec.teacher_fields, "rollouts add for the run's teacher; check their logs"
    )
    providers |= dict.fromkeys(spec.reward_columns, "a reward fills; check the rollouts' logs")
    if spec.algorithm.score_centering is not None:
        providers[SAMPLER_TOP_K] = (
            "algorithm.score_centering needs; let the rollouts write it, or set the key to null"
        )
    if spec.rollout.sampling.is_truncated:
        providers[SAMPLING_MASK] = (
            "rollout.sampling.top_k needs; let the rollouts write it, or set top_p to 1 and top_k to 0"
        )
    return providers


def build_samples(
    fields: Mapping[str, Jagged],
    rows: Sequence[int],
    facts: BatchFacts,
    *,
    spec: AlgorithmSpec,
    weight_version: int,
    inputs: Sequence[SampleInputs] = (),
) -> Samples:
    """Builds sequences from fetched fields, with the mask of the tokens that train.

    A token trains if the policy sampled it, unless it is staler than allowed, older than its response's
    newest tokens under ``mask_older_tokens``, its response was truncated under ``overlong.mask_truncated``,
    its sample is not a member of the group, or ReMax has no score of the group's greedy response.

    Args:
        rows: Indexes of the samples in the whole batch.
        weight_version: Version of the trainer at the start of the step.
        inputs: Model inputs of each sample; empty if the run has none.

    Raises:
        IncompleteBatchError: If the lengths of the fields do not match.
    """
    _check_lengths(fields)
    sequences = sequences_of(fields)
    sample_rows = torch.as_tensor(rows, dtype=torch.int64)[sequences.samples]
    tokens = {"response_mask": fields["response_mask"].values.bool()}
    for name in fetched_columns(fields):
        tokens[name] = fields[name].values.float()
    if "version_runs" in fields:
        runs = fields["version_runs"].values.to(torch.int64)
        tokens["token_versions"] = torch.repeat_interleave(runs[:, 0], runs[:, 1])
    tokens = {name: column[sequences.is_response] for name, column in tokens.items()}
    samples = Samples(
        rows=sample_rows,
        numbers=sequences.numbers,
        prompts=sequences.prompts,
        responses=sequences.responses,
        rewards=fields["rewards"].values.float()[sequences.samples],
        tokens=tokens,
        experts=sequences.experts,
        masks=sequences.masks,
        inputs=sequences.inputs_of(inputs),
        groups=facts.groups[sample_rows] if spec.loss_kind.compares_members else None,
    )
    trains = facts.is_member[sample_rows]
    if TEACHER_PROMPT in fields:
        samples = replace(
            samples, teacher_prompts=_teacher_prompts(fields[TEACHER_PROMPT], sequences)
        )
        # A sample without a teacher prompt has no teacher: no other response of its group was good enough.
        trains = trains & (fields[TEACHER_PROMPT].lengths > 0)[sequences.samples]
    if spec.advantage_kind.needs_greedy:
        trains = trains & ~facts.lost_baseline[sample_rows]
    if spec.overlong.mask_truncated:
        trains = trains & ~facts.is_truncated[sample_rows]
    loss_mask = tokens["response_mask"] & samples.segments.expand(trains)
    if "token_versions" in tokens:
        versions = tokens["token_versions"]
        loss_mask &= weight_version - versions <= spec.max_staleness
        if spec.mask_older_tokens:
            newest = samples.segments.max(versions.double(), tokens["response_mask"])
            loss_mask &= versions.double() == samples.segments.expand(newest)
    return samples.with_tokens(loss_mask=loss_mask)


def _teacher_prompts(teacher_prompts: Jagged, sequences: Sequences) -> Jagged:
    """Returns the prompt that the teacher sees for each sequence.

    It is the given one for the first sequence of a sample, unless that is empty, otherwise the sequence's.
    """
    teacher_ids, prompts = teacher_prompts.unbind(), sequences.prompts.unbind()
    for index, sample in enumerate(sequences.samples.tolist()):
        if sequences.numbers[index] == 0 and len(teacher_ids[sample]):
            prompts[index] = teacher_ids[sample].to(prompts[index])
    return Jagged.from_list(prompts)


def _check_lengths(fields: Mapping[str, Jagged]) -> None:
    """Checks that every row of a field matches its response; a shift between rows would go unnoticed."""
    response_lengths = fields["response_ids"].lengths
    sizes = {name: fields[name].lengths for name in fetched_columns(fields)}
    sizes["response_mask"] = fields["response_mask"].lengths
    if "version_runs" in fields:
        runs = fields["version_runs"]
        counts = runs.values.reshape(-1, 2)[:, 1].to(torch.int64)
        sizes["version_runs"] = Segments.from_lengths(runs.lengths).sum(counts)
    if ROUTED_EXPERTS in fields:
        # The engine has experts for every token except the last, including those of the prompt.
        sizes[ROUTED_EXPERTS] = fields[ROUTED_EXPERTS].lengths - fields["prompt_ids"].lengths + 1
    if SAMPLING_MASK in fields:
        masks = fields[SAMPLING_MASK]
        sizes[SAMPLING_MASK] = Segments.from_lengths(masks.lengths).sum((masks.values < 0).long())
    for name, lengths in sizes.items():
        for row in torch.nonzero(lengths != response_lengths).flatten().tolist():
            raise IncompleteBatchError(
                f"{name} covers {lengths[row]} tokens of sample {row}, but its response has "
                f"{response_lengths[row]}; every response token needs one entry",
                field=name,
            )
    if bool((fields["prompt_ids"].lengths < 1).any()):
        raise IncompleteBatchError(
            "a prompt has no token; a response needs at least one to follow", field="prompt_ids"
        )
