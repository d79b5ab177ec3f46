"""Tests of the tool of `examples/looking`."""

from typing import Any

from services.common.callables import load_callable
from tests.helpers.cli import REPOSITORY

LOOKING: Any = load_callable(f"{REPOSITORY}/examples/looking/looking.py:Looking")


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def shown(seed: int) -> Any:
    """Returns the picture that the tool shows for a seed, and the episode."""
    episode = LOOKING()
    assert episode.reset({}, seed=seed) == {"messages": "?"}
    (message,) = episode.step(said("l"))["messages"]
    return message["content"][0]["image"], episode


def test_the_answer_is_the_red_square_of_the_picture() -> None:
    letters = set()
    for seed in range(20):
        image, episode = shown(seed)
        middles = [(x, y) for y in (4, 12) for x in (4, 12)]
        (red,) = (
            letter
            for letter, pixel in zip("ABCD", middles, strict=True)
            if image.getpixel(pixel)[0] > 2 * max(image.getpixel(pixel)[1:])
        )
        assert episode.step(said(red)) == {"done": True, "reward": {"right": 1.0}}
        letters.add(red)
    assert letters == set("ABCD")


def test_members_of_a_group_see_the_same_picture_once() -> None:
    picture, episode = shown(3)
    other, _ = shown(3)
    assert picture == other
    assert episode.step(said("l")) == {"done": True, "reward": {"right": 0.0}}
