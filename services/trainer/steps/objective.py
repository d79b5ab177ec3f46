"""Loss of the policy: compares a micro-batch with the policies that sampled it, corrects and aggregates."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from services.common.callables import bind_callable
from services.common.fields import SAMPLER_TOP_K
from services.common.runspec.algorithm import AlgorithmSpec
from services.trainer.algorithm import correction, diagnostics, loss
from services.trainer.algorithm.centering import head_mass
from services.trainer.algorithm.own import OwnFunction
from services.trainer.batch import columns
from services.trainer.batch.samples import Samples, idle_samples
from services.trainer.batch.segments import Segments, on_device
from services.trainer.collectives import MetricTotals, Ranks
from services.trainer.engines.base import Micros

Correction = Literal["bypass", "decoupled", "none"]
MAX_AGE = 4
"""Max staleness that metrics distinguish; they count older tokens at this staleness."""


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Logprobs and weights that the loss is computed from, all ``[R]`` and without gradient."""

    old: Tensor
    proximal: Tensor
    rollout: Tensor
    weights: Tensor | None
    accepted: Tensor


class Objective:
    """Computes the loss of a micro-batch.

    Raises:
        ValueError: If the loss is a user's function that does not load or rejects its arguments.
    """

    def __init__(self, spec: AlgorithmSpec, *, correction: Correction, horizon: int) -> None:
        self._spec = spec
        is_compared = correction != "none" and not spec.num_demonstrations
        self._ages = range(min(spec.max_staleness, MAX_AGE) + 1 if is_compared else 0)
        self._correction = correction
        self._horizon = horizon
        self._mean_weight = 1.0
        self.entropy_coefficient = spec.entropy_coefficient
        """Weight of the entropy bonus in the next step."""
        self.columns: tuple[str, ...] = ()
        """Columns that a loss of the user's own declares."""
        bind = OwnFunction if spec.loss_kind.is_own else bind_callable
        self._loss = bind(spec.loss_kind.function, spec.arguments_of_loss, key="algorithm.loss")
        if isinstance(self._loss, OwnFunction):
            self.columns = self._loss.columns
        weighted = {
            "decoupled": {"decoupled"},
            "corrected": {"decoupled", "bypass"},
            "never": set(),
        }
        self._is_weighted = correction in weighted[spec.loss_kind.weighted]
        if spec.loss_kind.is_own:
            self._try()

    def denominators(self, tokens: Tensor, sequences: Tensor) -> loss.Denominators:
        """Returns the denominators of an update from its counts over all ranks."""
        return loss.Denominators(tokens=tokens, sequences=sequences, horizon=self._horizon)

    def look_ahead(self, samples: Samples, ranks: Ranks) -> Samples:
        """Computes the values that the losses of a batch share, if the algorithm needs them.

        These are the mean importance weight and the mask of accepted tokens. All ranks must call it.

        Args:
            samples: This rank's part of the whole batch, with proximal logprobs and advantages.

        Returns:
            The samples, whose :attr:`~Samples.counted` are the accepted tokens if rejection changes the
            denominator.
        """
        if not self._spec.looks_ahead:
            return samples
        self._mean_weight = 1.0
        mask, segments = samples.tokens["loss_mask"], samples.segments
        compared = self._compare(samples.tokens["proximal_logprobs"], samples, segments)
        if self._spec.correction_normalize and compared.weights is not None:
            level = self._spec.correction_level
            terms = correction.mean_terms(compared.weights, mask, segments, level=level)
            total, count = ranks.sum(terms.double()).tolist()
            self._mean_weight = total / count if total > 0 else 1.0
        if self._spec.rejection_denominator == "original":
            return samples
        return samples.with_tokens(counted=compared.accepted)

    def rescaling(self, unit: Tensor, counts: Tensor) -> Tensor:
        """Returns the factor that turns a loss divided by ``unit`` into one divided by ``counts``.

        Both arguments are ``[2]``: tokens and sequences. The factor is a scalar.
        """
        before, now = (
            loss.divisor(self._spec.aggregation, self.denominators(*counters.unbind()))
            for counters in (unit, counts)
        )
        return before / now

    def early_weight(self, counts: Tensor, unit: Tensor, *, sample_share: float) -> Tensor:
        """Returns the weight of some groups of an update in a mean over its micro-batches.

        :meth:`rescaling` later turns it into these groups' share of the update.

        Args:
            counts: ``[2]`` tokens and sequences of these groups.
            unit: ``[2]`` counts that the loss is divided by meanwhile.
            sample_share: Share of the update's samples that are in these groups.
        """
        mode = self._spec.aggregation
        if mode == "token-sum":  # is not rescaled
            return torch.tensor(sample_share)
        unit_of_mode = 0 if mode == "token-mean" else 1
        return counts[unit_of_mode] / unit[unit_of_mode].clamp(min=1)

    def __call__(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        samples: Samples,
        *,
        divergence: Tensor | None = None,
        denominators: loss.Denominators,
        kl_coefficient: float,
        tally: MetricTotals,
    ) -> Tensor:
        """Returns this micro-batch's share of the update's loss.

        Args:
            logprobs: ``[R]`` float32, current policy.
            entropy: ``[R]`` float32.
            samples: The micro-batch, with ``advantages`` and ``loss_mask``, on the same device.
            divergence: ``[R]`` float32, from the teacher's distributions, or the term of score centering;
                None without them.

        Returns:
            Scalar with gradient.
        """
        spec, mask = self._spec, samples.tokens["loss_mask"]
        # Masked values may be infinite or NaN, and 0 times a gradient that is not finite is NaN.
        logprobs, entropy = torch.where(mask, logprobs, 0.0), torch.where(mask, entropy, 0.0)
        if spec.loss_kind.distills:
            # A rank without work has no teacher, but joins the backward pass of the others.
            divergence = torch.where(mask, logprobs if divergence is None else divergence, 0.0)
        segments = samples.segments.to(mask.device)
        compared = self._compare(logprobs.detach(), samples, segments)
        policy = self._policy_loss(logprobs, compared, samples, segments, divergence)
        values = policy.values
        if self._is_weighted and compared.weights is not None:
            values = values * compared.weights
        if spec.score_centering is not None and divergence is not None:
            # The term has its own weights: those of the tokens that could have been drawn.
            values = values + samples.tokens["advantages"] * torch.where(mask, divergence, 0.0)
        values = torch.where(compared.accepted, values, 0.0)
        if kl_coefficient > 0:
            penalty = loss.kl_penalty(
                logprobs, samples.tokens["ref_logprobs"], estimator=spec.kl.estimator
            )
            # Not weighted: bounded weights would change the divergence that the coefficient follows.
            tally.mean("kl_ref", penalty, mask)
            if spec.kl.importance_weighted and compared.weights is not None:
                penalty = penalty * compared.weights
            values = values + kl_coefficient * penalty
        if self.entropy_coefficient > 0:
            values = values - self.entropy_coefficient * entropy
        for name, indicator in policy.indicators.items():
            tally.mean(name, indicator, mask)
        for name, fact in policy.of_sequences.items():
            tally.mean(name, fact, segments.count(mask) > 0)
        if spec.score_centering is not None:
            sampler = samples.tokens.get(SAMPLER_TOP_K)
            share = entropy if sampler is None else on_device(head_mass(sampler), mask.device)
            tally.mean("sampler_topk_mass", share, mask)
        staleness = samples.tokens.get("staleness", torch.zeros_like(entropy))
        self._report(logprobs, entropy, compared, mask, segments, tally, staleness=staleness)
        return loss.aggregate(
            values, samples.counted, segments, mode=spec.aggregation, denominators=denominators
        )

    def _try(self) -> None:
        """Tests the loss on one trained token, and on one untrained token as on ranks without work.

        Raises:
            ValueError: If the result is not finite or has no gradient.
        """
        idle, one_each = idle_samples(), torch.ones(1)
        for mask in (torch.tensor([True]), torch.tensor([False])):
            logprobs = torch.tensor([-0.5], requires_grad=True)
            value = self(
                logprobs,
                one_each,
                idle.with_tokens(loss_mask=mask, advantages=one_each),
                denominators=self.denominators(one_each, one_each),
                kl_coefficient=0.0,
                tally=MetricTotals(),
            )
            if not value.isfinite():
                raise ValueError(
                    f"algorithm.loss {self._spec.loss!r} is {value.item()} for one token with a logprob of "
                    f"-0.5, an old one of 0 and an advantage of 1{'' if mask else ' that does not train'}"
                )
            if mask and not value.requires_grad:
                raise ValueError(
                    f"algorithm.loss {self._spec.loss!r} has no gradient, so nothing would train: its values "
                    "must follow from tokens.logprobs, without detach() and no_grad()"
                )

    def _compare(self, current: Tensor, samples: Samples, segments: Segments) -> _Comparison:
        spec, tokens = self._spec, samples.tokens
        mask = tokens["loss_mask"]
        if "age" in tokens:
            rollout = tokens["rollout_logprobs"]
            proximal = correction.interpolated_proximal(current, rollout, tokens["age"])
        else:
            proximal = tokens.get("proximal_logprobs", current)
            rollout = tokens.get("rollout_logprobs", proximal)
        log_ratio = proximal - rollout
        weights = None
        if self._correction != "none":
            weights = correction.importance_weights(
                # Under bypass there are only two policies: the current one and that of the rollouts.
                current - rollout if self._correction == "bypass" else log_ratio,
                mask,
                segments,
                level=spec.correction_level,
                cap=spec.correction_cap,
                floor=spec.correction_floor if spec.correction_cap_mode == "mask" else 0.0,
                cap_mode=spec.correction_cap_mode,
            )
            weights = weights / self._mean_weight
        accepted = mask
        for rule in spec.rejections:
            accepted_ratios = correction.rejection_mask(
                log_ratio,
                mask,
                segments,
                level=rule.level,
                statistic=rule.statistic,
                lower=rule.lower,
                upper=rule.upper,
            )
            if rule.negative_only:
                accepted_ratios = accepted_ratios | (mask & (tokens["advantages"] >= 0))
            accepted = accepted & accepted_ratios
        old = rollout if self._correction == "bypass" else proximal
        return _Comparison(old, proximal, rollout, weights, accepted)

    def _policy_loss(
        self,
        logprobs: Tensor,
        compared: _Comparison,
        samples: Samples,
        segments: Segments,
        divergence: Tensor | None,
    ) -> loss.TokenLoss:
        mask, advantages = samples.tokens["loss_mask"], samples.tokens["advantages"]
        result = self._loss(
            loss.LossTokens(
                logprobs=logprobs,
                old_logprobs=compared.old,
                rollout_logprobs=compared.rollout,
                # NaN of a token that does not train would reach the gradients of others.
                advantages=torch.where(mask, advantages, 0.0),
                mask=mask,
                segments=segments,
                ref_logprobs=samples.tokens.get("ref_logprobs"),
                divergence=divergence,
                groups=None
                if samples.groups is None
                else on_device(samples.groups, logprobs.device),
                columns=columns.select(samples.tokens, self.columns),
            )
        )
        if not isinstance(result, loss.TokenLoss) or result.values.shape != logprobs.shape:
            raise ValueError(
                f"algorithm.loss {self._spec.loss!r} must return a TokenLoss with one value for each of "
                f"{len(logprobs)} tokens, but returned {result!r}"
            )
        return result

    def _report(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        compared: _Comparison,
        mask: Tensor,
        segments: Segments,
        tally: MetricTotals,
        *,
        staleness: Tensor,
    ) -> None:
        tally.mean("entropy", entropy, mask)
        tally.mean("ppo_kl", -loss.log_ratio_of(logprobs.detach(), compared.old), mask)
        tally.mean("ratio_mean", loss.ratio_of(logprobs.detach(), compared.old), mask)
        tally.mean("rejected_fraction", (mask & ~compared.accepted).float(), mask)
        terms = diagnostics.token_terms(compared.proximal, compared.rollout)
        for name, values in terms.items():
            tally.mean(name, values, mask)
        tally.max("prob_diff_max", terms["prob_diff"], mask)
        tally.max("rollout_logprob_abs_diff_max", terms["rollout_logprob_abs_diff"], mask)
        has_tokens = segments.count(mask) > 0
        per_sequence = diagnostics.sequence_terms(
            compared.proximal, compared.rollout, mask, segments
        )
        for name, values in per_sequence.items():
            tally.mean(name, values, has_tokens)
        raw = loss.ratio_of(compared.proximal, compared.rollout)
        tally.mean("is_weight_mean", raw, mask)
        tally.mean("is_weight_square", raw.square(), mask)
        tally.max("is_weight_max", raw, mask)
        is_clipped = (raw > self._spec.correction_cap).float()
        tally.mean("is_clipped_fraction", is_clipped, mask)
        for age in self._ages:
            # No trained token exceeds the staleness bound, so these ages cover all trained tokens.
            has_age = mask & (staleness.clamp(max=MAX_AGE) == age)
            tally.mean(f"tokens_by_staleness/{age}", has_age.float(), mask)
            tally.mean(f"kl_rollout_by_staleness/{age}", terms["kl_rollout"], has_age)
            tally.mean(f"is_weight_by_staleness/{age}", raw, has_age)
            tally.mean(f"is_weight_square_by_staleness/{age}", raw.square(), has_age)
            tally.mean(f"is_clipped_by_staleness/{age}", is_clipped, has_age)


class PolicyLoss:
    """Loss of one update of the policy.

    Args:
        counts: ``[2]`` tokens and sequences that train in the update so far, over all ranks.
        unit: ``[2]`` counts that the loss is divided by.
        num_tokens: Scalar: the tokens among ``counts`` that are of this loss's micro-batches.
        total_weight: Sum of the weights of this loss's micro-batches.
        keeps_logprobs: True if each micro-batch's logprobs are kept in :attr:`trained`.
    """

    def __init__(
        self,
        objective: Objective,
        *,
        counts: Tensor,
        unit: Tensor,
        num_tokens: Tensor,
        total_weight: Tensor | float,
        kl_coefficient: float,
        keeps_logprobs: bool,
    ) -> None:
        self.counts = counts
        self.unit = unit
        self.total_weight = total_weight
        self.tally = MetricTotals()
        self.trained: list[tuple[Samples, Tensor]] = []
        """Micro-batches with their logprobs ``[R]`` under the weights before the update."""
        self._num_tokens = num_tokens
        self._denominators: loss.Denominators | None = None
        self._objective = objective
        self._kl_coefficient = kl_coefficient
        self._keeps_logprobs = keeps_logprobs

    def weight(self, samples: Samples) -> Tensor:
        """Returns the micro-batch's part of the total weight, by its tokens."""
        return samples.counted.sum() / self._num_tokens.clamp(min=1) * self.total_weight

    def __call__(
        self,
        samples: Samples,
        scores: Tensor,
        entropy: Tensor | None = None,
        divergence: Tensor | None = None,
    ) -> Tensor:
        """Returns a micro-batch's share of the loss."""
        if entropy is None:  # a reward model has none
            entropy = torch.zeros_like(scores)
        if self._keeps_logprobs:
            self.trained.append((samples, scores.detach()))
        if self._denominators is None:
            self._denominators = self._objective.denominators(*self.unit.to(scores.device).unbind())
        return self._objective(
            scores,
            entropy,
            samples.to(scores.device),
            divergence=divergence,
            denominators=self._denominators,
            kl_coefficient=self._kl_coefficient,
            tally=self.tally,
        )


def num_counted(mask: Tensor, samples: Samples, work: Micros, ranks: Ranks) -> Tensor:
    """Counts masked tokens, and sequences that have any, in some micro-batches over all ranks: ``[2]``."""
    positions = [position for micro in work for position in micro]
    counts = samples.segments.count(mask)[positions]
    return ranks.sum(torch.stack([counts.sum(), (counts > 0).sum()]))
