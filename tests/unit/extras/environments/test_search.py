"""Tests of the game of `examples/search`."""

from pathlib import Path
from typing import Any

import pytest

from services.common.callables import load_callable
from services.common.runspec.loader import load_spec

EXAMPLE = Path(__file__).parents[4] / "examples" / "search"


def play(policy: Any, *, seed: int) -> tuple[float, int]:
    """Plays a game and returns its reward and number of moves."""
    game = load_callable(f"{EXAMPLE / 'search.py'}:Search")()
    observation, earned, moves = game.reset({"index": 0}, seed=seed), 0.0, 0
    while not observation.get("done"):
        way = observation["messages"][-1]
        observation = game.step({"role": "assistant", "content": policy(way)})
        earned, moves = earned + sum(observation["reward"].values()), moves + 1
    return earned, moves


def test_the_way_to_the_treasure_is_worth_most_and_nothing_is_worth_least() -> None:
    for seed in range(20):
        best, moves = play({"<": "l", ">": "r"}.__getitem__, seed=seed)
        assert best == pytest.approx(1 - 0.05 * moves)
        assert moves <= 5
        worst, moves = play(lambda way: "?", seed=seed)
        assert (worst, moves) == (pytest.approx(-1.2), 8)


def test_its_specification_names_the_game_wherever_it_is_read_from() -> None:
    spec = load_spec(EXAMPLE / "search.yaml")
    reference = spec.rollout.workflow_arguments["environment"]
    assert reference == f"{EXAMPLE / 'search.py'}:Search"
