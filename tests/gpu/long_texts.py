"""Texts that fill any sequence, so that none is padded."""

from __future__ import annotations

import csv
from pathlib import Path

from tasks.text.grammar import generate


def write_long_texts(path: Path, *, num_texts: int, reviews_per_text: int, seed: int) -> None:
    """Writes generated reviews, so many of them put together in each text, with the label of one of them."""
    reviews = generate(num_texts * reviews_per_text, seed=seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for number in range(num_texts):
            some = reviews[number * reviews_per_text : (number + 1) * reviews_per_text]
            writer.writerow([" ".join(review["text"] for review in some), reviews[number]["label"]])
