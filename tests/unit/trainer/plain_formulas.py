"""Formulas of docs/algorithms.md token by token in plain Python, and random batches to test them with."""

import math
import random
from statistics import mean, variance
from typing import Any

import torch
from torch import Tensor

from services.common.runspec.algorithm import AlgorithmSpec
from services.trainer.batch.samples import BatchFacts, Samples
from services.wire.data.jagged import Jagged

HORIZON = 12
POISON = (0.0, math.nan, math.inf, -math.inf, 1e30)
Rows = list[list[Any]]


class Batch:
    """Random groups of 1 to 4 responses of 0 to 12 tokens, some masked, with poison in unused values."""

    def __init__(self, seed: int) -> None:
        pick = random.Random(seed)
        self.groups = [g for g in range(pick.randint(1, 4)) for _ in range(pick.randint(1, 4))]
        self.lengths = [pick.choice((0, 1, 2, 5, HORIZON)) for _ in self.groups]
        kind = pick.choice(("binary", "equal", "real", "large"))
        self.rewards = [
            {"binary": float(pick.random() < 0.5), "equal": 0.1, "real": pick.gauss(0, 1)}.get(
                kind, 1e5 + pick.random()
            )
            for _ in self.groups
        ]
        share = pick.choice((0.0, 0.5, 1.0, 1.0))
        self.sampled = self._rows(lambda: pick.random() < share)
        self.trained = [[s and pick.random() < 0.8 for s in row] for row in self.sampled]
        spread = pick.choice((0.0, 0.1, 1.0, 30.0))

        def column(counts: Rows, scale: float) -> Rows:
            return [
                [-2.0 + pick.gauss(0, scale) if c else pick.choice(POISON) for c in row]
                for row in counts
            ]

        self.logprobs = column(self.trained, 0.5)
        self.rollout = column(self.trained, spread)
        self.proximal = column(self.sampled, 0.5)
        self.reference = column(self.sampled, 0.5)
        self.values = column(self.sampled, 1.0)
        self.entropy = column(self.trained, 0.1)

    def _rows(self, draw: Any) -> Rows:
        return [[draw() for _ in range(length)] for length in self.lengths]

    def samples(self) -> Samples:
        def flat(rows: Rows, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor([x for row in rows for x in row], dtype=dtype)

        count = len(self.groups)
        lengths = torch.tensor(self.lengths)
        ones = torch.ones(count, dtype=torch.int64)
        return Samples(
            rows=torch.arange(count),
            numbers=torch.zeros(count, dtype=torch.int64),
            prompts=Jagged(ones, ones),
            responses=Jagged(torch.zeros(int(lengths.sum()), dtype=torch.int64), lengths),
            rewards=torch.tensor(self.rewards, dtype=torch.float64),
            tokens={
                "response_mask": flat(self.sampled, torch.bool),
                "loss_mask": flat(self.trained, torch.bool),
                "rollout_logprobs": flat(self.rollout),
                "proximal_logprobs": flat(self.proximal),
                "ref_logprobs": flat(self.reference),
                "values": flat(self.values),
            },
        )

    def facts(self) -> BatchFacts:
        no = torch.zeros(len(self.groups), dtype=torch.bool)
        return BatchFacts(
            groups=torch.tensor(self.groups),
            lengths=tuple(length + 1 for length in self.lengths),
            prompt_lengths=(1,) * len(self.lengths),
            is_truncated=no,
            is_member=~no,
            is_failed=no,
            is_greedy=no,
        )


def plain_advantages(batch: Batch, name: str, *, kl: float, gamma: float, decay: float) -> Rows:
    rewards = []
    for i, row in enumerate(batch.sampled):
        last = max((t for t, s in enumerate(row) if s), default=-1)
        rewards.append(
            [
                (batch.rewards[i] if t == last else 0.0)
                - (kl * k3(batch.proximal[i][t], batch.reference[i][t]) if s and kl else 0.0)
                for t, s in enumerate(row)
            ]
        )
    penalties = [
        sum(kl * k3(batch.proximal[i][t], batch.reference[i][t]) for t, s in enumerate(row) if s)
        if kl
        else 0.0
        for i, row in enumerate(batch.sampled)
    ]
    scores = [reward - penalty for reward, penalty in zip(batch.rewards, penalties, strict=True)]
    if name in ("gae", "reinforce_pp"):
        rows: Rows = []
        for i, row in enumerate(batch.sampled):
            state, following, result = 0.0, 0.0, [0.0] * len(row)
            for t in reversed(range(len(row))):
                if not row[t]:
                    continue
                if name == "reinforce_pp":
                    state = rewards[i][t] + gamma * state
                else:
                    delta = rewards[i][t] + gamma * following - batch.values[i][t]
                    state, following = delta + gamma * decay * state, batch.values[i][t]
                result[t] = state
            rows.append(result)
        return whitened(rows, batch.trained)
    result = []
    for i, group in enumerate(batch.groups):
        members = [j for j, g in enumerate(batch.groups) if g == group]
        group_scores = [scores[j] for j in members]
        result.append(plain_group_advantage(batch, name, scores[i], members, group_scores, i))
    rows = [[a if s else 0.0 for s in row] for a, row in zip(result, batch.sampled, strict=True)]
    return whitened(rows, batch.trained) if name == "reinforce_pp_baseline" else rows


def plain_group_advantage(
    batch: Batch, name: str, score: float, members: list[int], group_scores: list[float], i: int
) -> float:
    if len(group_scores) == 1:
        return score if name in ("opo", "reinforce_pp_baseline") else 0.0
    deviation = 0.0 if max(group_scores) == min(group_scores) else math.sqrt(variance(group_scores))
    centred = 0.0 if max(group_scores) == min(group_scores) else score - mean(group_scores)
    if name == "grpo":
        return centred / (deviation + 1e-6)
    if name == "rloo":
        return centred * len(group_scores) / (len(group_scores) - 1)
    if name == "maxrl":
        return centred / mean(group_scores) if mean(group_scores) > 0 else 0.0
    if name == "opo":
        lengths = [sum(batch.sampled[j]) for j in members]
        return score - sum(n * r for n, r in zip(lengths, group_scores, strict=True)) / max(
            1, sum(lengths)
        )
    if name == "pass_at_k":
        best, second = sorted(group_scores, reverse=True)[:2]
        is_winner = i == members[group_scores.index(best)]
        return (best - second) / (deviation + 1e-6) if is_winner else 0.0
    return centred


def whitened(rows: Rows, mask: Rows) -> Rows:
    values_kept = [
        x for row, m in zip(rows, mask, strict=True) for x, k in zip(row, m, strict=True) if k
    ]
    if not values_kept:
        return [[0.0] * len(row) for row in rows]
    centre = math.fsum(values_kept) / len(values_kept)
    spread = math.fsum((x - centre) ** 2 for x in values_kept) / max(1, len(values_kept) - 1)
    return [
        [(x - centre) / math.sqrt(spread + 1e-8) if k else 0.0 for x, k in zip(row, m, strict=True)]
        for row, m in zip(rows, mask, strict=True)
    ]


def k3(logprob: float, reference: float) -> float:
    difference = max(-20.0, min(20.0, reference - logprob))
    return max(-10.0, min(10.0, math.exp(difference) - difference - 1.0))


def plain_objective(
    batch: Batch, spec: AlgorithmSpec, correction: str, logprobs: list[list[Tensor]], rows: Rows
) -> Tensor:
    """Returns the loss as a sum over tokens, differentiable with respect to ``logprobs``."""
    total = torch.zeros((), dtype=torch.float64)
    num_tokens = max(1, sum(map(sum, batch.trained)))
    num_sequences = max(1, sum(map(any, batch.trained)))
    for i, row in enumerate(batch.trained):
        trained_tokens = [t for t, k in enumerate(row) if k]
        old = {
            t: (batch.rollout if correction == "bypass" else batch.proximal)[i][t]
            for t in trained_tokens
        }
        losses = []
        for t in trained_tokens:
            lp, a = logprobs[i][t], rows[i][t]
            weight = plain_weight(batch, spec, correction, i, t, trained_tokens, logprobs[i])
            if spec.loss == "gspo":
                log_s = sum(logprobs[i][k].detach() - old[k] for k in trained_tokens) / len(
                    trained_tokens
                )
                ratio = torch.exp(torch.clamp(log_s + lp - lp.detach(), max=10.0))
            elif spec.loss == "gmpo":
                ratio = plain_geometric_mean(spec, logprobs[i], old, rows[i], trained_tokens)
            else:
                base = batch.rollout[i][t] if spec.loss == "aipo" else old[t]
                ratio = torch.exp(torch.clamp(lp - base, -20.0, 20.0))
            loss = plain_token_loss(spec, ratio, lp, a, old[t])
            if spec.loss == "vespo":
                loss = (
                    -plain_kernel(spec, logprobs[i], batch.rollout[i], a, trained_tokens) * a * lp
                )
            if correction == "decoupled" and spec.loss not in ("aipo", "vespo"):
                loss = loss * weight
            if correction == "bypass" and spec.loss == "reinforce":
                loss = loss * weight
            if not plain_accepts(batch, spec, i, t, trained_tokens, a):
                loss = loss * 0.0
            distance = 0.5 * (lp - batch.reference[i][t]) ** 2
            penalty = k3(lp.item(), batch.reference[i][t]) + distance - distance.detach()
            loss = loss + spec.kl.coefficient * penalty * (1.0 if correction == "none" else weight)
            losses.append(loss - spec.entropy_coefficient * batch.entropy[i][t])
        share = sum(losses, torch.zeros((), dtype=torch.float64))
        divisor = {
            "token-mean": num_tokens,
            "token-sum": 1,
            "seq-mean-token-sum": num_sequences,
            "seq-mean-token-sum-norm": num_sequences * HORIZON,
            "seq-mean-token-mean": num_sequences * max(1, len(trained_tokens)),
        }[spec.aggregation]
        total = total + share / divisor
    return total


def plain_geometric_mean(
    spec: AlgorithmSpec, logprobs: Any, old: Any, advantages: list[float], trained: list[int]
) -> Tensor:
    terms = []
    for t in trained:
        term = torch.clamp(logprobs[t] - old[t], -20.0, 20.0)
        if advantages[t] > 0:
            term = torch.clamp(term, max=spec.clip_high)
        if advantages[t] < 0:
            term = torch.clamp(term, min=-spec.clip_low)
        terms.append(term)
    return torch.exp(torch.stack(terms).mean())


def plain_kernel(
    spec: AlgorithmSpec, logprobs: Any, rollout: Any, advantage: float, trained: list[int]
) -> float:
    arguments_of_loss = spec.arguments_of_loss
    sign = "negative" if advantage < 0 else "positive"
    k, decay = arguments_of_loss[f"k_{sign}"], arguments_of_loss[f"lambda_{sign}"]
    log_weight = sum(max(-20.0, min(20.0, logprobs[t].item() - rollout[t])) for t in trained)
    weight = math.exp(max(-20.0, min(20.0, log_weight)))
    return float(weight**k * math.exp(decay * (1.0 - weight)))


def plain_leaves_trust_region(spec: AlgorithmSpec, lp: float, old: float, a: float) -> bool:
    p, q = math.exp(lp), math.exp(old)
    if spec.loss_arguments["divergence"] == "tv":
        distance = abs(p - q)
    else:
        smallest = 2.0**-52
        rest, old_rest = (math.log(max(-math.expm1(x), smallest)) for x in (lp, old))
        distance = q * (old - lp) + (1.0 - q) * (old_rest - rest)
    if a > 0:
        return p > q and distance > spec.clip_high
    return p <= q and distance > spec.clip_low


def plain_token_loss(
    spec: AlgorithmSpec, ratio: Tensor, lp: Tensor, a: float, old: float
) -> Tensor:
    low, high = 1.0 - spec.clip_low, 1.0 + spec.clip_high
    if spec.loss == "gmpo":
        return -a * ratio
    if spec.loss == "dppo":
        if plain_leaves_trust_region(spec, lp.item(), old, a):
            return 0.0 * lp
        return -ratio.detach().clamp(max=spec.loss_arguments["ratio_max"]) * a * lp
    if spec.loss == "cispo":
        return -ratio.detach().clamp(low, high) * a * lp
    if spec.loss == "aipo":
        return -ratio.detach().clamp(max=spec.ratio_max) * a * lp
    if spec.loss == "reinforce":
        return -a * lp
    if spec.loss == "sapo":
        tau = spec.sapo_temperature_positive if a > 0 else spec.sapo_temperature_negative
        return -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * a
    surrogate = torch.maximum(-a * ratio, -a * ratio.clamp(low, high))
    if spec.loss == "ppo" and spec.dual_clip is not None and a < 0:
        return torch.minimum(surrogate, torch.tensor(-a * spec.dual_clip, dtype=lp.dtype))
    return surrogate


def plain_weight(
    batch: Batch, spec: AlgorithmSpec, correction: str, i: int, t: int, trained: list[int], row: Any
) -> float:
    def log_ratio(k: int) -> float:
        above = row[k].item() if correction == "bypass" else batch.proximal[i][k]
        return above - batch.rollout[i][k]

    chosen = trained if spec.correction_level == "sequence" else [t]
    ratio = math.exp(max(-20.0, min(20.0, sum(log_ratio(k) for k in chosen))))
    if spec.correction_cap_mode == "mask":
        return ratio if spec.correction_floor <= ratio <= spec.correction_cap else 0.0
    return min(ratio, spec.correction_cap)


def plain_accepts(
    batch: Batch, spec: AlgorithmSpec, i: int, t: int, trained: list[int], a: float
) -> bool:
    for rule in spec.rejection:
        terms = {}
        for k in trained:
            x = max(-20.0, min(20.0, batch.proximal[i][k] - batch.rollout[i][k]))
            terms[k] = {"k1": x, "k2": 0.5 * x * x, "k3": math.exp(x) - 1.0 - x}[rule.statistic]
        ratio = {
            "token": terms[t],
            "seq_sum": sum(terms.values()),
            "seq_mean": sum(terms.values()) / len(trained),
            "seq_max": max(terms.values()),
        }[rule.level]
        if rule.statistic == "k1":
            ratio = math.exp(max(-20.0, min(20.0, ratio)))
        is_low = rule.lower is not None and ratio < rule.lower
        is_high = rule.upper is not None and ratio > rule.upper
        if (is_low or is_high) and not (rule.negative_only and a >= 0):
            return False
    return True
