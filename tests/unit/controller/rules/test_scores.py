"""Scores of an evaluation, per data source."""

import itertools
from dataclasses import replace

import pytest

from services.common.runspec.trainer import BestSpec
from services.controller.rules.evaluation import (
    EvaluationState,
    Scored,
    StartedEvaluation,
    evaluate,
    majority,
    pass_at_k,
    score_of,
)


def sampled(prompt, *rewards, answers="", source="math"):
    answers = answers or [f"answer {reward}" for reward in rewards]
    return [
        Scored(prompt, source, reward, answer, False)
        for reward, answer in zip(rewards, answers, strict=True)
    ]


def evaluation(samples):
    return evaluate(
        samples,
        StartedEvaluation(3, 3, "periodic"),
        status=EvaluationState.OK,
        seconds=1.0,
    )


def test_scores_are_means_over_prompts_of_each_source():
    samples = [
        *sampled("v0", 1.0, 0.0, 1.0),
        *sampled("v1", 0.0, 0.0, 1.0),
        Scored("v0", "math", 1.0, "a", True),
        Scored("v1", "math", 0.0, "b", True),
        Scored("v2", "code", 0.5, "c", True),
    ]
    result = evaluation(samples)
    assert result.by_source["math"] == pytest.approx(
        {
            "greedy": 0.5,
            "sampled": 0.5,
            "best": 1.0,
            "maj": 0.5,
            "pass@1": 0.5,
            "pass@2": 5 / 6,
            "pass@3": 1.0,
        }
    )
    assert result.by_source["code"] == {"greedy": 0.5}
    assert (result.num_samples, result.sampled) == (9, 0.5)


def test_named_terms_of_rewards_are_means_over_what_was_sampled():
    samples = [
        Scored("v0", "math", 1.0, "a", False, '{"right": 1, "short": 0.5}'),
        Scored("v0", "math", 0.0, "b", False, '{"right": 0}'),
        Scored("v0", "math", 0.0, "b", True, '{"right": 0}'),
        Scored("v2", "code", 0.5, "c", True, '{"right": 0.25}'),
    ]
    result = evaluation(samples)
    assert result.by_source["math"]["reward/right"] == 0.5
    assert result.by_source["math"]["reward/short"] == 0.5
    assert result.by_source["code"]["reward/right"] == 0.25


def test_a_prompt_of_which_samples_are_missing_counts_as_much_as_any_other():
    result = evaluation([*sampled("v0", 1.0), *sampled("v1", 0.0, 0.0, 0.0)])
    assert result.sampled == result.by_source["math"]["sampled"] == 0.5


def test_a_majority_is_one_of_answers_not_of_rewards():
    # Three different wrong answers do not outvote two equal correct ones.
    votes = sampled("v0", 1.0, 1.0, 0.0, 0.0, 0.0, answers=["7", "7", "1", "2", "3"])
    assert majority(votes) == 1.0
    assert majority(sampled("v0", 1.0, 0.0, 0.0, answers=["7", "1", "1"])) == 0.0


def test_of_equally_frequent_answers_the_one_that_is_worth_least_counts():
    assert majority(sampled("v0", 0.0, 1.0)) == 0.0


def test_an_evaluation_without_samples_has_no_scores():
    result = evaluation([])
    assert (result.greedy, result.sampled, result.by_source) == (None, None, {})


def test_pass_at_k_is_the_chance_of_a_right_one_among_k_drawn():
    # Of the 6 pairs of 4 samples, 3 contain a correct sample if 1 sample is correct, and 5 if 2 are.
    solved = [(4, 1), (4, 2), (4, 0), (2, 1)]
    assert pass_at_k(solved) == pytest.approx(
        {
            "pass@1": (1 / 4 + 1 / 2 + 0 + 1 / 2) / 4,
            "pass@2": (1 / 2 + 5 / 6 + 0 + 1) / 4,
            "pass@4": 2 / 3,
        }
    )
    drawn = [any(pair) for pair in itertools.combinations([True, True, False, False, False], 2)]
    assert pass_at_k([(5, 2)])["pass@2"] == pytest.approx(sum(drawn) / len(drawn))


def test_a_response_is_right_from_a_reward_on():
    samples = sampled("v0", 0.9, 0.4)
    result = evaluate(
        samples,
        StartedEvaluation(1, 1, "final"),
        status=EvaluationState.OK,
        seconds=1.0,
        solved_from=0.5,
    )
    assert result.by_set["heldout"]["pass@1"] == 0.5
    assert evaluation(samples).by_set["heldout"]["pass@1"] == 0.0


def test_each_set_has_separate_scores():
    easy = [replace(sample, set_name="easy") for sample in sampled("v0", 1.0, 1.0)]
    result = evaluation([*easy, *[replace(s, set_name="hard") for s in sampled("v1", 0.0, 1.0)]])
    assert [
        (name, scores["sampled"], scores["prompts"]) for name, scores in result.by_set.items()
    ] == [
        ("easy", 1.0, 1),
        ("hard", 0.5, 1),
    ]
    assert result.sampled == 0.75
    assert score_of(result, BestSpec(set="hard", metric="pass@2")) == 1.0
    assert score_of(result, BestSpec(metric="sampled")) == 0.75
    assert score_of(result, BestSpec(set="hard", metric="reward/style")) is None
    assert score_of(result, BestSpec(set="gone")) is None


def test_the_only_set_needs_no_name_where_versions_are_compared():
    result = evaluation(sampled("v0", 1.0, 0.0))
    assert score_of(result, BestSpec(metric="best")) == 1.0
    assert score_of(result, BestSpec()) is None
    assert score_of(evaluation([]), BestSpec()) is None
