"""Sorting two to six digits, from lengths that the base model nearly masters to lengths that it cannot sort.

Without a curriculum, most groups of short inputs are all correct and most groups of long inputs all wrong,
and give no gradient. The curriculum defers both until the model has changed.
"""

import random
from collections.abc import Iterator

Row = dict[str, str]

LENGTHS = (2, 3, 4, 5, 6)
HELDOUT_PROMPTS = 48
_SEED = 20_260_115


def train(length: int, count: int) -> list[Row]:
    """Returns inputs of a length that are not held out; short inputs are repeated."""
    held = {row["prompt"] for row in heldout(length)}
    rng = random.Random(_SEED + length)
    rows = (_row(rng, length) for _ in range(100 * count))
    kept = [row for row in rows if row["prompt"] not in held]
    return kept[:count]


def heldout(length: int) -> list[Row]:
    """Returns inputs of a length that neither the warm start nor training sees."""
    rng = random.Random(_SEED - length)
    rows = [_row(rng, length) for _ in range(100 * HELDOUT_PROMPTS)]
    return list({row["prompt"]: row for row in rows}.values())[:HELDOUT_PROMPTS]


def warm_start(count: int, seed: int) -> list[tuple[str, str]]:
    """Returns examples ``(prompt, response)`` of the base model, which mostly copies long inputs."""
    rng = random.Random(seed)
    return list(_examples(rng, count))


def _examples(rng: random.Random, count: int) -> Iterator[tuple[str, str]]:
    held = {row["prompt"] for length in LENGTHS for row in heldout(length)}
    while count > 0:
        length = rng.choice(LENGTHS)
        row = _row(rng, length)
        if row["prompt"] in held:
            continue
        is_sorted = rng.random() < 0.9 / length
        yield row["prompt"], row["answer"] if is_sorted else row["prompt"].removesuffix("=")
        count -= 1


def _row(rng: random.Random, length: int) -> Row:
    digits = "".join(rng.choice("0123456789") for _ in range(length))
    return {"prompt": f"{digits}=", "answer": "".join(sorted(digits))}
