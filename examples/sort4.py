"""The sort4 task: sort the four digits of the prompt.

The base model is pretrained on a mixture in which sorting is *not* the most frequent behaviour: it copies
(40 %), reverses (35 %) or sorts (25 %). Reinforcement learning must make sorting the rule, so a lower
temperature alone cannot raise the score.
"""

import random
from collections.abc import Iterator

Row = dict[str, str]

HELDOUT_PROMPTS = 256
_SEED = 20_260_101


def train() -> list[Row]:
    """Returns every input that is not held out."""
    return [_row(digits) for digits in _inputs()[HELDOUT_PROMPTS:]]


def heldout() -> list[Row]:
    """Returns 256 inputs that neither the warm start nor training sees."""
    return [_row(digits) for digits in _inputs()[:HELDOUT_PROMPTS]]


def pairs() -> list[Row]:
    """Returns a preference pair for each input that is not held out: the sorted and a wrong answer."""
    rng = random.Random(_SEED)
    return [
        {
            "prompt": f"{digits}=",
            "chosen": _sorted(digits),
            "rejected": rng.choice((digits, digits[::-1])),
        }
        for digits in _inputs()[HELDOUT_PROMPTS:]
    ]


def comparisons() -> list[Row]:
    """Returns pairs with more kinds of wrong answers, for a reward that a policy optimizes."""
    rng = random.Random(_SEED)
    rows = []
    for digits in _inputs()[HELDOUT_PROMPTS:]:
        right = _sorted(digits)
        place = rng.randrange(4)
        changed = right[:place] + str(rng.randrange(10)) + right[place + 1 :]
        shuffled = "".join(rng.sample(digits, 4))
        wrong = (
            digits,
            digits[::-1],
            shuffled,
            _sorted(changed),
            changed,
            right[: rng.randrange(1, 4)],
        )
        rejected = rng.choice([answer for answer in wrong if answer != right])
        rows.append({"prompt": f"{digits}=", "chosen": right, "rejected": rejected})
    return rows


def warm_start(count: int, seed: int) -> list[tuple[str, str]]:
    """Returns examples ``(prompt, response)`` of the base model's three behaviours."""
    rng = random.Random(seed)
    return list(_examples(rng, count))


def sorting(count: int, seed: int) -> list[tuple[str, str]]:
    """Returns examples ``(prompt, response)`` of a teacher, which always sorts."""
    rng, inputs = random.Random(seed), _inputs()[HELDOUT_PROMPTS:]
    return [(f"{digits}=", _sorted(digits)) for digits in rng.choices(inputs, k=count)]


def places(prompt: str, response: str, answer: str, row: Row) -> float:
    """Returns the fraction of the digits that are in their place, as a second term of the reward."""
    return sum(map(str.__eq__, response.strip(), answer)) / len(answer)


def _examples(rng: random.Random, count: int) -> Iterator[tuple[str, str]]:
    inputs = _inputs()[HELDOUT_PROMPTS:]
    for _ in range(count):
        digits = rng.choice(inputs)
        behaviour = rng.choices(("copy", "reverse", "sort"), weights=(40, 35, 25))[0]
        answers = {"copy": digits, "reverse": digits[::-1], "sort": _sorted(digits)}
        yield f"{digits}=", answers[behaviour]


def _inputs() -> list[str]:
    """Returns all inputs on which the three behaviours differ, in a fixed random order."""
    inputs = [f"{number:04d}" for number in range(10_000)]
    inputs = [digits for digits in inputs if len({digits, digits[::-1], _sorted(digits)}) == 3]
    random.Random(_SEED).shuffle(inputs)
    return inputs


def _row(digits: str) -> Row:
    return {"prompt": f"{digits}=", "answer": _sorted(digits)}


def _sorted(digits: str) -> str:
    return "".join(sorted(digits))
