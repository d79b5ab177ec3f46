"""Random samples that share prefixes in all ways that occur."""

import random

import torch

from services.wire.data.jagged import Jagged


def random_trie(
    rng: random.Random, *, vocabulary: int, most_samples: int = 12, longest: int = 24
) -> tuple[Jagged, Jagged]:
    """Returns samples with nested prefixes, one-token branches and empty responses, and equal samples."""

    def tokens(most: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(rng.randint(1, most))]

    system = tokens(longest) if rng.random() < 0.7 else []
    samples = [(system + tokens(longest), tokens(longest))]
    while len(samples) < rng.randint(2, most_samples):
        prompt, response = rng.choice(samples)
        whole = prompt + response
        match rng.randrange(7):
            case 0:
                samples.append((system + tokens(longest), tokens(longest)))
            case 1:
                samples.append((prompt, tokens(longest)))
            case 2:
                samples.append((prompt, response))
            case 3:
                samples.append((prompt, []))
            case 4:
                samples.append((prompt, response[: rng.randint(0, len(response))] + tokens(1)))
            case 5:
                samples.append((whole + tokens(2), tokens(longest)))
            case 6:
                cut = rng.randint(1, len(whole))
                samples.append((whole[:cut], whole[cut:]))
    rng.shuffle(samples)
    rows = [
        [torch.tensor(row, dtype=torch.int64) for row in rows_of_field]
        for rows_of_field in zip(*samples, strict=True)
    ]
    prompts, responses = (Jagged.from_list(rows_of_field) for rows_of_field in rows)
    return prompts, responses
