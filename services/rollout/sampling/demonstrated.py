"""Samples of rows that bring their own answers: nothing is generated for them."""

from collections.abc import Sequence

from services.common.runspec.rollout import RolloutSpec
from services.rollout import metrics
from services.rollout.data.demonstrations import Demonstration
from services.rollout.data.prompts import Prompt
from services.rollout.engines.base import Engine
from services.rollout.failures import GroupError
from services.rollout.rewards.base import Score
from services.rollout.sampling.samples import Sample, answer_digest
from services.rollout.workflows.turns import shown


async def demonstration_sample(
    prompt: Prompt, member: int, spec: RolloutSpec, engine: Engine, *, is_training: bool
) -> Sample:
    """A sample of an answer that a row has.

    Args:
        prompt: With a demonstration for each member.
        member: Which of them is meant.
        spec: Bounds the response.
        engine: Bounds it with its prompt; says how likely a held-out answer is.
        is_training: Whether it is to be learned. Otherwise its score is the mean log-probability of its
            tokens, and the term ``loss`` that with the other sign; of a pair, ``preferred`` is 1 where the
            first is likelier than the second.

    Raises:
        GroupError: If it does not fit, and may not be cut. Another try would not help.
    """
    shows = prompt.demonstrations[member]
    most = min(spec.max_response_tokens, engine.max_tokens - len(shows.prompt_ids))
    is_cut = shows.num_tokens > most
    if is_cut and not (prompt.may_be_cut and most > 0):
        raise GroupError(
            "demonstration_too_long",
            f"an answer has {shows.num_tokens} tokens, but {most} fit behind its prompt of "
            f"{len(shows.prompt_ids)} (rollout.max_response_tokens is {spec.max_response_tokens}, the model "
            f"holds {engine.max_tokens}); raise it, set data.demonstration.too_long to 'cut', or remove the "
            "row",
            retryable=False,
        )
    shows = shows.cut(most)
    turns = [shown(part.token_ids, is_answer=part.is_answer) for part in shows.stretches]
    # Of a pair the first is preferred.
    score = Score(float(member == 0))
    if not is_training:
        score = await _likelihood([shows, *prompt.demonstrations[1:]], engine)
    sample = Sample(
        member=member,
        prompt_ids=shows.prompt_ids,
        turns=tuple(turns),
        score=score,
        finish_reason="length" if is_cut else "stop",
        is_greedy=not is_training,
        answer="" if is_training else answer_digest(shows.text, ""),
    )
    metrics.SAMPLES.labels(finish_reason=sample.finish_reason).inc()
    metrics.RESPONSE_TOKENS.observe(shows.num_tokens)
    return sample


async def _likelihood(every: Sequence[Demonstration], engine: Engine) -> Score:
    first, *others = [await _logprobs(shows, engine) for shows in every]
    mean = sum(first) / len(first)
    terms = {"loss": -mean}
    if others:
        terms["preferred"] = float(sum(first) > sum(others[0]))
    return Score(mean, terms)


async def _logprobs(shows: Demonstration, engine: Engine) -> list[float]:
    """Those of the tokens that answer."""
    response = [token for part in shows.stretches for token in part.token_ids]
    trains = [part.is_answer for part in shows.stretches for _ in part.token_ids]
    try:
        logprobs = await engine.score([*shows.prompt_ids, *response])
    except ValueError as error:
        raise GroupError("request_refused", str(error), retryable=False) from error
    own = logprobs[len(shows.prompt_ids) - 1 :]
    return [value for value, is_answer in zip(own, trains, strict=True) if is_answer]
