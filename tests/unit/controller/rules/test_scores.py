"""Scores of an evaluation, per data source."""

import pytest

from services.controller.rules.scores import Scored, evaluate, majority


def sampled(prompt, *rewards, answers="", source="math"):
    answers = answers or [f"answer {reward}" for reward in rewards]
    return [
        Scored(prompt, source, reward, answer, False)
        for reward, answer in zip(rewards, answers, strict=True)
    ]


def evaluation(samples):
    return evaluate(samples, version=3, reason="periodic", status="ok", seconds=1.0)


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
        {"greedy": 0.5, "sampled": 0.5, "best": 1.0, "maj": 0.5}
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
    # Three wrong answers, each another one, do not outvote the two equal right ones.
    votes = sampled("v0", 1.0, 1.0, 0.0, 0.0, 0.0, answers=["7", "7", "1", "2", "3"])
    assert majority(votes) == 1.0
    assert majority(sampled("v0", 1.0, 0.0, 0.0, answers=["7", "1", "1"])) == 0.0


def test_of_equally_frequent_answers_the_one_that_is_worth_least_counts():
    assert majority(sampled("v0", 0.0, 1.0)) == 0.0


def test_an_evaluation_without_samples_has_no_scores():
    result = evaluation([])
    assert (result.greedy, result.sampled, result.by_source) == (None, None, {})
