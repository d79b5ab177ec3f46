"""Turns rewards into token advantages with the specified estimator, over all ranks."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.common.callables import bind_callable
from services.common.fields import TOKEN_REWARDS
from services.common.runspec.algorithm import AlgorithmSpec
from services.trainer.algorithm.advantages import overlong_penalty
from services.trainer.algorithm.estimators import ScoredBatch
from services.trainer.algorithm.loss import kl_penalty
from services.trainer.algorithm.own import OwnFunction
from services.trainer.batch import columns
from services.trainer.batch.samples import BatchFacts, Samples, idle_samples
from services.trainer.collectives import Ranks


@dataclass(frozen=True, slots=True)
class Credit:
    """Advantages and returns of each response token."""

    advantages: Tensor
    """``[R]`` float32, 0 outside the response mask."""
    returns: Tensor | None
    """``[R]`` float32 targets of the critic; None without a critic."""
    shaped_scores: Tensor
    """``[n]`` float32: for each sequence the reward of its sample, including penalties."""


class CreditAssigner:
    """Assigns advantages to this rank's tokens; group statistics and whitening cover the whole batch.

    Raises:
        ValueError: If the advantage is a user's function that does not load or does not accept its
            arguments.
    """

    def __init__(self, spec: AlgorithmSpec, ranks: Ranks, *, max_response_tokens: int) -> None:
        self._spec = spec
        self._ranks = ranks
        self._max_response_tokens = max_response_tokens
        kind, arguments, key = (
            spec.advantage_kind,
            spec.arguments_of_advantage,
            "algorithm.advantage",
        )
        self._sum_over_ranks: Callable[[Tensor], Tensor] = ranks.sum
        self.columns: tuple[str, ...] = ()
        """Columns that an advantage of the user's own declares."""
        if not kind.is_own:
            self._estimate = bind_callable(kind.function, arguments, key=key)
            return
        code = OwnFunction(kind.function, arguments, key=key)
        self.columns = code.columns
        self._estimate, self._sum_over_ranks = (
            code,
            code.checked_sum(ranks.sum, num_ranks=ranks.size),
        )
        self._try()

    def __call__(self, samples: Samples, facts: BatchFacts, *, kl_coefficient: float) -> Credit:
        """Computes the advantages of this rank's tokens. All ranks must call it.

        Args:
            samples: This rank's samples. Needs the columns ``proximal_logprobs`` and ``ref_logprobs``
                with a KL penalty in the reward, and ``values`` with a critic.
            kl_coefficient: Current weight of the KL penalty in the reward; 0 for none.

        Raises:
            IncompleteBatchError: If ReMax finds a group without a greedy response.
            ValueError: If a user's function does not return one number per token.
        """
        penalty = self._penalty(samples, kl_coefficient)
        batch, shaped = self._scored(samples, facts, self._task_scores(samples), penalty)
        estimated = self._estimate(batch)
        values, returns = estimated if isinstance(estimated, tuple) else (estimated, None)
        if not isinstance(values, Tensor) or values.shape != batch.rewards.shape:
            raise ValueError(
                f"algorithm.advantage {self._spec.advantage!r} must return one advantage for each of "
                f"{len(batch.rewards)} tokens, but returned {_described(values)}; use batch.expand for "
                "one per sequence"
            )
        return Credit(
            torch.where(batch.mask, values, 0.0).float(),
            None if returns is None else returns.float(),
            samples.by_sample.expand(shaped).float(),
        )

    def _try(self) -> None:
        """Tests the estimator on a group of two samples, which rank 0 has. All ranks must call it.

        Raises:
            ValueError: If an advantage is not finite.
        """
        samples, no = idle_samples().select([0, 0]), torch.zeros(2, dtype=torch.bool)
        samples = replace(samples, rows=torch.arange(2), rewards=torch.tensor([0.0, 1.0]))
        samples = samples.with_tokens(loss_mask=~no, response_mask=~no)
        facts = BatchFacts(
            groups=torch.zeros(2, dtype=torch.int64),
            lengths=(2, 2),
            prompt_lengths=(1, 1),
            is_truncated=no,
            is_member=~no,
            is_greedy=no,
            is_failed=no,
        )
        rank_samples = samples if self._ranks.rank == 0 else samples.select([])
        advantages = self(rank_samples, facts, kl_coefficient=0.0).advantages
        if not bool(advantages.isfinite().all()):
            raise ValueError(
                f"algorithm.advantage {self._spec.advantage!r} is {advantages.tolist()} for a group with the "
                "scores 0 and 1"
            )

    def _scored(
        self, samples: Samples, facts: BatchFacts, scores: Tensor, penalty: Tensor
    ) -> tuple[ScoredBatch, Tensor]:
        """Builds the estimator's input, and returns it with the score of each of this rank's samples."""
        segments, mask = samples.segments, samples.tokens["response_mask"]
        by_sample = samples.by_sample
        # A response counts in its group even if the policy sampled none of its tokens.
        shaped = scores - by_sample.sum(segments.sum(penalty))
        all_scores = self._gathered(shaped, samples, facts)
        lengths = self._gathered(by_sample.sum(segments.count(mask)), samples, facts)
        member = facts.is_member
        _, groups = torch.unique(facts.groups[member], return_inverse=True)
        positions = torch.where(member, member.cumsum(0) - 1, -1)
        num_prompts = int(facts.groups.max()) + 1 if len(facts.groups) else 0
        greedy_scores = all_scores.new_full((num_prompts,), torch.nan)
        greedy_scores[facts.groups[facts.is_greedy]] = all_scores[facts.is_greedy]
        # Samples of groups that lost their greedy baseline do not train.
        greedy_scores[facts.groups[facts.lost_baseline]] = 0.0
        values = samples.tokens.get("values")
        earned = samples.tokens.get(TOKEN_REWARDS, torch.zeros(len(mask))).to(torch.float64)
        rest = by_sample.expand(scores - by_sample.sum(segments.sum(earned)))
        batch = ScoredBatch(
            scores=all_scores[member],
            groups=groups,
            lengths=lengths[member],
            greedy_scores=greedy_scores,
            prompts=facts.groups[samples.rows],
            terms=_terms(facts),
            places=positions[samples.rows],
            segments=segments,
            # In each sequence, the last sampled token receives the reward that no token earned.
            rewards=earned + torch.where(segments.last(mask), segments.expand(rest), 0.0) - penalty,
            mask=mask,
            trained=samples.tokens["loss_mask"],
            values=None if values is None else values.to(torch.float64),
            columns=columns.select(samples.tokens, self.columns),
            sum_over_ranks=self._sum_over_ranks,
        )
        return batch, shaped

    def _task_scores(self, samples: Samples) -> Tensor:
        """Returns the float64 reward of each sample, with the penalty for its longest response."""
        scores = samples.rewards[samples.is_first].to(torch.float64)
        overlong, lengths = self._spec.overlong, samples.responses.lengths
        if overlong.buffer_tokens > 0:
            everything = torch.ones_like(lengths, dtype=torch.bool)
            scores = scores + overlong_penalty(
                samples.by_sample.max(lengths.double(), everything),
                max_tokens=self._max_response_tokens,
                buffer_tokens=overlong.buffer_tokens,
                factor=overlong.penalty,
            )
        return scores

    def _penalty(self, samples: Samples, kl_coefficient: float) -> Tensor:
        """Returns the ``[R]`` float64 KL penalty that is subtracted from the rewards."""
        mask = samples.tokens["response_mask"]
        if kl_coefficient == 0:
            return torch.zeros(mask.shape, dtype=torch.float64)
        penalty = kl_penalty(
            samples.tokens["proximal_logprobs"].double(),
            samples.tokens["ref_logprobs"].double(),
            estimator=self._spec.kl.estimator,
        )
        return kl_coefficient * torch.where(mask, penalty, 0.0)

    def _gathered(self, values: Tensor, samples: Samples, facts: BatchFacts) -> Tensor:
        """Combines values of each rank's samples into those of the whole batch, ``[N]``."""
        totals = torch.zeros(len(facts.groups), dtype=torch.float64)
        totals[samples.rows[samples.is_first]] = values.to(torch.float64)
        return self._ranks.sum(totals)


def _terms(facts: BatchFacts) -> dict[str, Tensor]:
    """Returns the terms that all members of a batch have, ``[M]`` float64 by name."""
    members = facts.is_member.nonzero().flatten().tolist()
    rows = [json.loads(facts.terms[row]) for row in members] if facts.terms else []
    names = [name for name in rows[0] if all(name in row for row in rows)] if rows else []
    return {name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in names}


def _described(value: object) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
