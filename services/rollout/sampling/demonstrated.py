"""Samples made from answers in the data, without generation."""

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
    """Returns a sample whose response is an answer of the prompt's row.

    Args:
        prompt: Prompt with a demonstration for each member.
        member: Index of the demonstration.
        spec: Limits the response's length.
        engine: Limits the length of prompt and response; computes log-probabilities of held-out answers.
        is_training: True if the answer is trained. Otherwise the sample's score is the mean
            log-probability of the answer's tokens and the term ``loss`` is its negative; for a
            pair, the term ``preferred`` is 1 if the first answer is likelier than the second.

    Raises:
        GroupError: If the answer does not fit and may not be cut; a retry would not help.
    """
    shows = prompt.demonstrations[member]
    most = min(spec.max_response_tokens, engine.max_tokens - len(shows.prompt_ids))
    is_cut = shows.num_tokens > most
    if is_cut and not (prompt.may_be_cut and most > 0):
        raise GroupError(
            "demonstration_too_long",
            f"an answer has {shows.num_tokens} tokens, but only {most} fit after its prompt of "
            f"{len(shows.prompt_ids)} tokens (rollout.max_response_tokens is {spec.max_response_tokens}, the "
            f"model's context {engine.max_tokens}); raise it, set data.demonstration.too_long to 'cut', or "
            "remove the row",
            retryable=False,
        )
    shows = shows.cut(most)
    turns = [shown(part.token_ids, is_answer=part.is_answer) for part in shows.stretches]
    # The first answer of a pair is the preferred one.
    score = Score(float(member == 0))
    if not is_training:
        score = await _likelihood([shows, *prompt.demonstrations[1:]], prompt, engine)
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


async def _likelihood(every: Sequence[Demonstration], prompt: Prompt, engine: Engine) -> Score:
    first, *others = [await _logprobs(shows, prompt, engine) for shows in every]
    mean = sum(first) / len(first)
    terms = {"loss": -mean}
    if others:
        terms["preferred"] = float(sum(first) > sum(others[0]))
    return Score(mean, terms)


async def _logprobs(shows: Demonstration, prompt: Prompt, engine: Engine) -> list[float]:
    """Returns the log-probabilities of the tokens that belong to the answer."""
    response = [token for part in shows.stretches for token in part.token_ids]
    trains = [part.is_answer for part in shows.stretches for _ in part.token_ids]
    try:
        logprobs = await engine.score([*shows.prompt_ids, *response], prompt.model_inputs)
    except ValueError as error:
        raise GroupError("request_refused", str(error), retryable=False) from error
    own = logprobs[len(shows.prompt_ids) - 1 :]
    return [value for value, is_answer in zip(own, trains, strict=True) if is_answer]
