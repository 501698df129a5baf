"""What each kind of batches computes: ``python -m tests.layouts DIRECTORY``.

The directory holds train.csv and validation.csv, such as ``python -m tests.reviews`` writes. The command prints, for
packed, sorted and padded batches of an epoch, how many positions are computed for each real token, and how much more
the rank with most to compute has than the mean. Nothing is trained.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean
from typing import cast, get_args

from records.config import Batching
from tasks.interface import PackedData
from tasks.text.classification import TextClassification
from tasks.text.settings import TextClassificationSettings
from training.plan import Layout, Plan

_WORLD_SIZES = (2, 4, 8)


def main(arguments: list[str]) -> None:
    """Prints a line for each kind of batches."""
    parser = argparse.ArgumentParser(prog="python -m tests.layouts", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default="bert-tiny", help="a preset or a pretrained model (default: bert-tiny)")
    parser.add_argument("--batch-size", type=int, default=16, help="samples of a rank and step (default: 16)")
    asked = parser.parse_args(arguments)
    files = {f"{split}_file": asked.directory / f"{split}.csv" for split in ("train", "validation")}
    task = TextClassification(TextClassificationSettings(model=asked.model, **files))
    task.prepare()
    print(f"{asked.batch_size} samples for each rank: positions per token, imbalance of ranks")
    for batching in get_args(Batching):
        seen = [_seen(task, batching, asked.batch_size, world_size) for world_size in _WORLD_SIZES]
        words = (f"{size} ranks {one[0]:.3f} {one[1]:.3f}" for size, one in zip(_WORLD_SIZES, seen, strict=True))
        print(f"{batching}: {'; '.join(words)}")


def _seen(task: TextClassification, batching: Batching, batch_size: int, world_size: int) -> tuple[float, float]:
    """Returns positions per token, and the positions of the rank with most over the mean, as a mean over an epoch."""
    plan = Plan(
        num_samples=task.num_samples("train"),
        global_batch_size=batch_size * world_size,
        micro_batch_size=batch_size,
        world_size=world_size,
        seed=0,
        layout=Layout(batching, task.costs("train")),
    )
    collate = cast("PackedData", task).collate_packed if batching == "packed" else task.collate
    num_positions = num_tokens = 0
    ratios = []
    for global_batch in plan.epoch(0):
        of_ranks = []
        for rank in range(world_size):
            pieces = [piece for piece in plan.micro_batches(global_batch, rank) if piece.weight]
            batches = [collate("train", piece.sample_ids.tolist()) for piece in pieces]
            of_ranks.append(sum(batch.num_positions for batch in batches))
            num_tokens += sum(batch.num_tokens for batch in batches)
        num_positions += sum(of_ranks)
        ratios.append(max(of_ranks) / fmean(of_ranks))
    return num_positions / num_tokens, fmean(ratios)


if __name__ == "__main__":
    main(sys.argv[1:])
