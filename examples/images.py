"""Images of four squares, one of which is red: the model must name it by its letter, A to D.

    A B
    C D

Run as a program, it writes the same rows as a data set of files: python images.py FOLDER
"""

import io
import json
import random
import sys
from pathlib import Path

from PIL import Image

SIDE = 8
LETTERS = "ABCD"
QUESTION = "?"


def _picture(rng: random.Random, letter: str) -> Image.Image:
    image = Image.new("RGB", (2 * SIDE, 2 * SIDE))
    for number, each in enumerate(LETTERS):
        low, high = rng.randrange(0, 80), rng.randrange(160, 256)
        # The others are green, blue or both, so that brightness does not identify the red square.
        green, blue = rng.choice([(high, low), (low, high), (high, high)])
        color = (high, low, low) if each == letter else (low, green, blue)
        place = (number % 2 * SIDE, number // 2 * SIDE)
        image.paste(color, (*place, place[0] + SIDE, place[1] + SIDE))
    return image


def _rows(count: int, seed: int) -> list[dict[str, object]]:
    rng = random.Random(seed)
    rows: list[dict[str, object]] = []
    for _ in range(count):
        letter = rng.choice(LETTERS)
        buffer = io.BytesIO()
        _picture(rng, letter).save(buffer, "PNG")
        rows.append({"prompt": QUESTION, "images": [buffer.getvalue()], "answer": letter})
    return rows


def train() -> list[dict[str, object]]:
    """Returns the training rows."""
    return _rows(1024, seed=0)


def heldout() -> list[dict[str, object]]:
    """Returns rows for evaluation."""
    return _rows(128, seed=1)


def warm_start(count: int, seed: int) -> list[tuple[str, str]]:
    """Returns examples without images, which teach that the answer is one letter."""
    rng = random.Random(seed)
    return [(QUESTION, rng.choice(LETTERS)) for _ in range(count)]


def write(folder: Path) -> None:
    """Writes ``train.jsonl`` and ``heldout.jsonl`` with paths of PNG files."""
    for name, rows in (("train", train()), ("heldout", heldout())):
        (folder / name).mkdir(parents=True)
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for number, row in enumerate(rows):
                path = f"{name}/{number:04}.png"
                (content,) = row["images"]  # type: ignore[misc]
                (folder / path).write_bytes(content)
                file.write(json.dumps({**row, "images": [path]}) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
