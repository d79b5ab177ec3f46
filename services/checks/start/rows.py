"""Trial of the first rows of a run's data as rollouts process them: templates, tokenizer, rewards."""

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from services.common.models.tokenizer import Tokenizer
from services.common.runspec.data import kind_of
from services.common.runspec.rollout import EARNED, REWARDS, RewardSpec, is_service
from services.common.runspec.rules import batch_bytes
from services.common.runspec.run import RunSpec
from services.common.security.confinement import CodePolicy
from services.common.task_group import TaskGroup
from services.rollout.calls.outside import AddressPolicy
from services.rollout.calls.pool import CallPool
from services.rollout.data.prompts import Curriculum, Prompt, PromptStore
from services.rollout.data.sources import PromptSource
from services.rollout.failures import CallError, GroupError
from services.rollout.rewards.base import RewardInput
from services.rollout.rewards.scorer import Comparison, Scorer
from services.wire.workers import PromptHistory

if TYPE_CHECKING:
    from services.rollout.data.images import ImageReader

MAX_ROWS = 16
TIMEOUT_S = 60.0
"""Max seconds for all calls of one function; without it, a hanging function would block the command."""
UNRELATED = (
    "The harbour was quiet, and nobody had seen the blue kite.",
    "```python\nvalue = None\n```",
)
"""A text and a program that answer no prompt."""
COMPARING = ("exact_match", "math_verify")
_QUESTION_CHARACTERS = 80
"""Twice the length from which an answer in a long prompt is its question, not a choice."""
_DERIVATION = re.compile(r"####|\\boxed\s*\{|[.!?]\s+\S+(?:\s+\S+){5}", re.DOTALL)
_SEEN = {"response": "response", "group": "responses", "pairs": "first, second"}
"""Arguments of a reward besides prompt, answer and row."""
_PROCESSES = 2
_CALL_S = 1.0
"""Seconds after which a call lets the next one begin, in another process."""
_EXAMPLES = 4


@dataclass(frozen=True, slots=True)
class RowTrialResult:
    """Findings of a trial of the first rows."""

    problems: list[str] = field(default_factory=list)
    """Reasons why no row of a set, or no call of a function, works; each begins with a key."""
    notes: list[str] = field(default_factory=list)
    """Failures of some rows only."""


def try_rows(
    spec: RunSpec, sources: Mapping[str, PromptSource], tokenizer: Tokenizer
) -> tuple[RowTrialResult, dict[str, list[Prompt]]]:
    """Makes prompts of the first rows of each set; returns the findings, and the prompts by split."""
    trial, prompts = RowTrialResult(), dict[str, list[Prompt]]()
    book = PromptStore(
        spec.data,
        sources,
        tokenizer,
        num_demonstrations=spec.algorithm.num_demonstrations,
        answers_heldout=bool(spec.rollout.rewards),
        images=_image_reader(spec, tokenizer),
        teacher_column=None if spec.teacher is None else spec.teacher.prompt_column,
    )
    for split, source in sources.items():
        examples, refused = list[Prompt](), list[str]()
        count = min(len(source), MAX_ROWS)
        for index in range(count):
            try:
                prompt = book.prompt(split, index)
                _check_demonstrations(prompt, spec, f"row {index} of data.{split}")
            except GroupError as error:
                refused.append(error.message)
            else:
                examples.append(prompt)
        prompts[split] = examples
        if spoken := sum(_is_chat_text(prompt.text) for prompt in examples):
            trial.notes.append(
                f"data.{split}: the prompt is the JSON text of chat messages in {spoken} of {len(examples)} "
                "rows, which the model gets as one text; store the messages as a list"
            )
        if refused and not examples:
            trial.problems.append(
                f"data.{split}: none of its first {count} rows can be used: {refused[0]}"
            )
        elif refused:
            trial.notes.append(
                f"data.{split}: {len(refused)} of its first {count} rows would be quarantined: {refused[0]}"
            )
    trial.problems.extend(_size_problems(spec, prompts))
    return trial, prompts


def _is_chat_text(text: str) -> bool:
    """Returns True if a prompt describes messages as JSON."""
    if not text.lstrip().startswith("["):
        return False
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return bool(messages) and all(
        isinstance(message, Mapping) and {"role", "content"} <= message.keys()
        for message in messages
    )


def _image_reader(spec: RunSpec, tokenizer: Tokenizer) -> "ImageReader | None":
    """Returns the reader of a run's images, which may be anywhere: the user's machine has no restrictions."""
    if not spec.model.images:
        return None
    # Imported here, because most runs have no images.
    from services.rollout.data.images import ImageReader

    return ImageReader(
        spec.model, spec.data, tokenizer, allowance=CodePolicy(), reach=AddressPolicy()
    )


def _size_problems(spec: RunSpec, prompts: Mapping[str, Sequence[Prompt]]) -> Iterator[str]:
    """Yields a problem if a batch whose prompts have inputs as large as the tried ones exceeds the quota."""
    bundles = [prompt.model_inputs for examples in prompts.values() for prompt in examples]
    largest = max((len(bundle.encoded) for bundle in bundles if bundle is not None), default=0)
    needed_bytes = batch_bytes(spec) + spec.trainer.prompts_per_step * largest
    quota = spec.transferqueue.quota_bytes
    if largest and needed_bytes > quota:
        yield (
            f"transferqueue.quota_bytes is {quota:,}, but a batch may take {needed_bytes:,}: the first rows "
            f"have up to {largest:,} bytes of model inputs (images, or data.model_inputs_column) each, and a "
            f"step has trainer.prompts_per_step ({spec.trainer.prompts_per_step}) prompts; raise the quota, "
            f"to {2 * needed_bytes} if the next batch is to have room beside it"
        )


def _check_demonstrations(prompt: Prompt, spec: RunSpec, location: str) -> None:
    """Rejects an answer that the run would not train, as ``rollout/sampling/sample.py`` does."""
    max_tokens = spec.rollout.max_response_tokens
    longest = max((demonstration.num_tokens for demonstration in prompt.demonstrations), default=0)
    if longest > max_tokens and not prompt.may_be_cut:
        raise GroupError(
            "demonstration_too_long",
            f"{location} has an answer of {longest} tokens, more than rollout.max_response_tokens "
            f"({max_tokens}); raise it, set data.demonstration.too_long to 'cut', or remove the row",
            retryable=False,
        )


def try_functions(
    spec: RunSpec, prompts: Mapping[str, Sequence[Prompt]], tokenizer: Tokenizer
) -> RowTrialResult:
    """Calls the user's functions with the first rows, in separate processes, each with a deadline.

    Args:
        prompts: Prompts of the first rows, by split.
    """
    return asyncio.run(_try_functions(spec, prompts, tokenizer))


async def _try_functions(
    spec: RunSpec, prompts: Mapping[str, Sequence[Prompt]], tokenizer: Tokenizer
) -> RowTrialResult:
    trial = RowTrialResult()
    async with CallPool(_PROCESSES) as pool:
        for model_key, model in (("model", spec.model), ("teacher", spec.teacher)):
            if model is not None and model.warm_start is not None:
                key = f"{model_key}.warm_start.examples"
                await _try_examples(trial, pool, key, model.warm_start.examples, tokenizer)
        if spec.data.curriculum is not None and spec.data.curriculum.function is not None:
            await _try_curriculum(trial, pool, spec, prompts)
        for key, rewards in spec.rewards.items():
            inputs = [_input(prompt, split) for split, prompt in _scored_by(key, spec, prompts)]
            for index, reward in enumerate(rewards):
                if inputs and _is_tried(reward, spec):
                    await _try_reward(trial, pool, reward, inputs, key=f"{key}.{index}.name")
    return trial


def _scored_by(
    key: str, spec: RunSpec, prompts: Mapping[str, Sequence[Prompt]]
) -> Iterator[tuple[str, Prompt]]:
    """Yields ``(split, prompt)`` of the first prompts that a key's rewards score, at most ``MAX_ROWS``."""
    is_sampled = not spec.algorithm.num_demonstrations
    scored_prompts = [
        (split, prompt)
        for split, examples in prompts.items()
        for prompt in examples
        if (is_sampled or kind_of(split) == "heldout")
        and spec.data.sets[split].source != "environment"
        and key == (f"data.{split}.rewards" if spec.data.sets[split].rewards else "rollout.rewards")
    ]
    yield from scored_prompts[:MAX_ROWS]


def _is_tried(reward: RewardSpec, spec: RunSpec) -> bool:
    """Returns True if a row suffices to call a reward, without an episode or a call to a service."""
    is_here = reward.name != EARNED and not is_service(reward.name)
    is_played = spec.rollout.workflow in ("agent", "environment")
    # The number of turns or tokens of an episode is unknown before it is played.
    is_whole = reward.per == "response" or (
        reward.per == "turn" and spec.rollout.workflow == "single_turn"
    )
    return is_here and is_whole and not reward.sees_episode and not is_played


def _input(prompt: Prompt, split: str) -> RewardInput:
    """Returns the reward input for a response that equals the expected answer."""
    answer = prompt.answer if isinstance(prompt.answer, str | int | float) else ""
    return RewardInput(
        prompt=prompt.text,
        response=str(answer),
        answer=prompt.answer,
        row=prompt.row,
        split=split,
        turn_lengths=(1,),
    )


async def _try_reward(
    trial: RowTrialResult,
    pool: CallPool,
    reward: RewardSpec,
    inputs: Sequence[RewardInput],
    *,
    key: str,
) -> None:
    if not await _is_loaded(trial, pool, REWARDS.get(reward.name, reward.name), key=key):
        return
    if reward.sees != "response":
        comparison = Comparison([reward], pool)
        comparisons = [partial(comparison.score, [item, item]) for item in inputs]
        await _judge(
            trial, comparisons, key=key, name=reward.name, argument_names=_SEEN[reward.sees]
        )
        return
    scorer = Scorer([reward.model_copy(update={"weight": 1.0})], pool)
    scores = dict[tuple[int, str], float]()

    async def call(row: int, response: str) -> None:
        score = await scorer.score(replace(inputs[row], response=response))
        scores[row, response] = score.value

    calls = [partial(call, row, item.response) for row, item in enumerate(inputs)]
    calls += [partial(call, row, text) for row in range(len(inputs)) for text in UNRELATED]
    # Early in training, many responses contain no answer.
    calls.append(partial(call, 0, ""))
    await _judge(trial, calls, key=key, name=reward.name, argument_names=_SEEN[reward.sees])
    for note in (*score_notes(reward, inputs, scores), *answer_notes(reward, inputs)):
        trial.notes.append(f"{key}: {reward.name!r}: {note}")


def score_notes(
    reward: RewardSpec, inputs: Sequence[RewardInput], scores: Mapping[tuple[int, str], float]
) -> Iterator[str]:
    """Yields what the scores of the expected answers and of unrelated responses say about a reward.

    Args:
        inputs: Inputs whose responses are the expected answers.
        scores: Score by row and response, where there is one.
    """
    baselines = {
        row: max(row_scores)
        for row in range(len(inputs))
        if (row_scores := [scores[row, text] for text in UNRELATED if (row, text) in scores])
    }
    # The tests of a program are no program.
    answer_scores = {
        row: scores[row, item.response]
        for row, item in enumerate(inputs)
        if (row, item.response) in scores and item.response and reward.name != "code_tests"
    }
    wrong = [score for score in baselines.values() if score >= 1.0]
    better = [row for row in answer_scores if baselines.get(row, -math.inf) > answer_scores[row]]
    if wrong:
        yield f"a wrong answer scores {max(wrong):g} in {len(wrong)} of {len(baselines)} rows"
    elif better:
        row = better[0]
        yield (
            f"an unrelated text scores more ({baselines[row]:g}) than the expected answer "
            f"({answer_scores[row]:g}) in {len(better)} of {len(answer_scores)} rows"
        )
    unscored_rows = [
        row
        for row in answer_scores
        if answer_scores[row] <= 0.0 and baselines.get(row, 0.0) >= answer_scores[row]
    ]
    if unscored_rows:
        yield f"the expected answer itself scores 0 in {len(unscored_rows)} of {len(answer_scores)} rows"


def answer_notes(reward: RewardSpec, inputs: Sequence[RewardInput]) -> Iterator[str]:
    """Yields why no response will equal the answers of a reward that compares them."""
    if reward.name not in COMPARING:
        return
    answers = [item.response.strip() for item in inputs]
    repeated = [
        answer
        for answer, item in zip(answers, inputs, strict=True)
        if answer in item.prompt and 2 * len(answer) >= min(len(item.prompt), _QUESTION_CHARACTERS)
    ]
    if 2 * len(repeated) > len(inputs):
        yield (
            f"the answer is text of the prompt in {len(repeated)} of {len(inputs)} rows; set "
            "data.answer_column to the column with the answer"
        )
    derived = [answer for answer in answers if _DERIVATION.search(answer)]
    if reward.name == "exact_match" and derived:
        yield (
            f"the answer is a derivation in {len(derived)} of {len(inputs)} rows, which no response equals; "
            "use math_verify, or a column with the final answer"
        )


async def _try_curriculum(
    trial: RowTrialResult, pool: CallPool, spec: RunSpec, prompts: Mapping[str, Sequence[Prompt]]
) -> None:
    assert spec.data.curriculum is not None
    curriculum = Curriculum(spec.data.curriculum, pool)
    untried = PromptHistory(step=0, tries=0, mean_reward=0.0)

    async def call(prompt: Prompt) -> None:
        try:
            await curriculum.check(prompt.row, untried)
        except GroupError as error:
            if error.reason.startswith("curriculum_"):
                raise CallError("exception", error.message.partition(": ")[2]) from error

    rows = [
        row_prompt
        for split, examples in prompts.items()
        if kind_of(split) == "train"
        for row_prompt in examples
    ]
    calls = [lambda row_prompt=row_prompt: call(row_prompt) for row_prompt in rows[:MAX_ROWS]]
    name = spec.data.curriculum.function or ""
    await _judge(trial, calls, key="data.curriculum.function", name=name)


async def _try_examples(
    trial: RowTrialResult, pool: CallPool, key: str, reference: str, tokenizer: Tokenizer
) -> None:
    async def call() -> None:
        pairs = await pool.call(reference, (_EXAMPLES, 0), timeout_s=TIMEOUT_S)
        is_list = isinstance(pairs, list) and all(map(_is_pair, pairs))
        if not is_list or len(pairs) != _EXAMPLES:
            raise CallError(
                "invalid_value",
                f"{reference!r}, called with ({_EXAMPLES}, 0), must return {_EXAMPLES} pairs of non-empty "
                f"prompt and response, but returned {pairs!r:.80}",
            )
        for pair in pairs:
            for text in pair:
                try:
                    tokenizer.encode(text)
                except ValueError as error:
                    raise CallError("invalid_value", str(error)) from error

    await _judge(trial, [call], key=key, name=reference)


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(text, str) and text for text in value)
    )


async def _is_loaded(trial: RowTrialResult, pool: CallPool, reference: str, *, key: str) -> bool:
    """Loads a function, whose imports take as long as they need; reports a problem if that fails."""
    try:
        await pool.check(reference)
    except CallError as error:
        _, name, reason = error.message.partition(f"{reference!r}: ")
        trial.problems.append(
            f"{key}: loading {name + reason or f'{reference!r} failed: {error.message}'}"
        )
        return False
    return True


async def _judge(
    trial: RowTrialResult,
    calls: Sequence[Callable[[], Awaitable[object]]],
    *,
    key: str,
    name: str,
    argument_names: str = "",
) -> None:
    """Makes calls until a deadline; reports a problem if all fail, a note if some fail.

    Args:
        argument_names: Arguments besides prompt, answer and row, for a message about a reward.
    """
    failed, num_succeeded = list[str](), 0

    async def make(call: Callable[[], Awaitable[object]]) -> None:
        nonlocal num_succeeded
        try:
            await call()
        except CallError as error:
            failed.append(error.message)
        else:
            num_succeeded += 1

    try:
        async with asyncio.timeout(TIMEOUT_S):
            # Not gather, which does not wait for the calls that it cancels.
            async with TaskGroup() as tasks:
                for call in calls:
                    # Starting another process takes longer than most functions.
                    await asyncio.wait([tasks.create_task(make(call))], timeout=_CALL_S)
    except TimeoutError:
        if not failed and not num_succeeded:
            trial.notes.append(
                f"{key}: {name!r} was not tested: it did not respond within {TIMEOUT_S:g} s; call it with a "
                "row of the data yourself"
            )
    if failed and argument_names and "raised TypeError" in failed[0] and "argument" in failed[0]:
        failed[0] += (
            f"; it is called with (prompt, {argument_names}, answer, row) and must return a number"
        )
    if failed and not num_succeeded:
        trial.problems.append(
            f"{key}: {name!r} failed in all {len(failed)} tests with the first rows: {failed[0]}"
        )
    elif failed:
        trial.notes.append(
            f"{key}: {name!r} failed in {len(failed)} of {len(failed) + num_succeeded} tests with the first "
            f"rows: {failed[0]}"
        )
