"""The sort4 task: four digits in, the same digits sorted out.

The base model is made by supervised training on a mixture in which sorting is *not* the most frequent
behaviour: it copies (40 %), reverses (35 %) or sorts (25 %). Reinforcement learning has to turn the third
one into the rule, so a better score cannot come from a lower temperature.
"""

import random
from collections.abc import Iterator

Row = dict[str, str]

HELDOUT_PROMPTS = 256
_SEED = 20_260_101


def train() -> list[Row]:
    """Every input that is not held out."""
    return [_row(digits) for digits in _inputs()[HELDOUT_PROMPTS:]]


def heldout() -> list[Row]:
    """256 inputs that neither the warm start nor training sees."""
    return [_row(digits) for digits in _inputs()[:HELDOUT_PROMPTS]]


def pairs() -> list[Row]:
    """Of each input that is not held out, the answer that is wanted and one of those that are not."""
    rng = random.Random(_SEED)
    return [
        {
            "prompt": f"{digits}=",
            "chosen": _sorted(digits),
            "rejected": rng.choice((digits, digits[::-1])),
        }
        for digits in _inputs()[HELDOUT_PROMPTS:]
    ]


def warm_start(count: int, seed: int) -> list[tuple[str, str]]:
    """Examples ``(prompt, response)`` of the base model's three behaviours."""
    rng = random.Random(seed)
    return list(_examples(rng, count))


def sorting(count: int, seed: int) -> list[tuple[str, str]]:
    """Examples ``(prompt, response)`` of a model that always sorts: a teacher."""
    rng, inputs = random.Random(seed), _inputs()[HELDOUT_PROMPTS:]
    return [(f"{digits}=", _sorted(digits)) for digits in rng.choices(inputs, k=count)]


def _examples(rng: random.Random, count: int) -> Iterator[tuple[str, str]]:
    inputs = _inputs()[HELDOUT_PROMPTS:]
    for _ in range(count):
        digits = rng.choice(inputs)
        behaviour = rng.choices(("copy", "reverse", "sort"), weights=(40, 35, 25))[0]
        answers = {"copy": digits, "reverse": digits[::-1], "sort": _sorted(digits)}
        yield f"{digits}=", answers[behaviour]


def _inputs() -> list[str]:
    """All inputs on which the three behaviours differ, in a fixed random order."""
    inputs = [f"{number:04d}" for number in range(10_000)]
    inputs = [digits for digits in inputs if len({digits, digits[::-1], _sorted(digits)}) == 3]
    random.Random(_SEED).shuffle(inputs)
    return inputs


def _row(digits: str) -> Row:
    return {"prompt": f"{digits}=", "answer": _sorted(digits)}


def _sorted(digits: str) -> str:
    return "".join(sorted(digits))
