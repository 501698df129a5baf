"""What attention and dropout of a model cost beside those of transformers: ``python -m tests.model_costs DIRECTORY``.

The directory holds train.csv and validation.csv, such as ``python -m tests.reviews`` writes. Forward and backward
passes of the same samples take turns, in one process with one thread: of the model as transformers has it, on padded
batches, and of the task's model on padded and packed ones; each with dropout of 0.1 and without. The command prints
the seconds of all batches in all rounds together, and how many times those of the first row they are.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tasks.interface import Batch, Split
from tasks.text.batches import MODEL_INPUTS
from tasks.text.classification import TextClassification
from tasks.text.packing import row_options
from tasks.text.settings import TextClassificationSettings

_DROPOUTS = (0.0, 0.1)
# Makes a batch, which is not timed, and computes it.
Pass = tuple[Callable[[Split, list[int]], Batch], Callable[[Batch], None]]


def main(arguments: Sequence[str]) -> None:
    """Prints a line for each model and layout."""
    parser = argparse.ArgumentParser(prog="python -m tests.model_costs", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default="bert-mini", help="a preset or a pretrained model (default: bert-mini)")
    parser.add_argument("--batch-size", type=int, default=16, help="samples of a batch (default: 16)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each batch is computed (default: 3)")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    files = {f"{split}_file": asked.directory / f"{split}.csv" for split in ("train", "validation")}
    passes: dict[str, Pass] = {}
    for dropout in _DROPOUTS:
        task = TextClassification(TextClassificationSettings(model=asked.model, dropout=dropout, **files))
        task.prepare()
        passes |= {f"{name}, dropout {dropout:g}": one for name, one in _passes(task).items()}
    batches = [
        list(range(first, first + asked.batch_size)) for first in range(0, 20 * asked.batch_size, asked.batch_size)
    ]
    seconds = dict.fromkeys(passes, 0.0)
    for number in range(asked.rounds + 1):
        for sample_ids in batches:
            for name, (collate, compute) in passes.items():
                batch = collate("train", sample_ids)
                begin = time.perf_counter()
                compute(batch)
                seconds[name] += time.perf_counter() - begin if number else 0.0  # the first round warms up
    first = next(iter(seconds.values()))
    for name, of_all in seconds.items():
        print(f"{name:50} {of_all:6.2f} s  {of_all / first:.2f}")


def _passes(task: TextClassification) -> dict[str, Pass]:
    stock, own = task.hugging_face_model().train(), task.build_model().train()

    def compute(model: torch.nn.Module, batch: Batch, *, is_own: bool) -> None:
        inputs = {name: batch.tensors[name] for name in MODEL_INPUTS if name in batch.tensors}
        options = row_options(replace(batch, seed=5), is_training=True) if is_own else {}
        logits = model(**inputs, **options)["logits"]
        torch.nn.functional.cross_entropy(logits, batch.tensors["labels"], reduction="sum").backward()
        model.zero_grad()

    return {
        "transformers, padded": (task.collate, partial(compute, stock, is_own=False)),
        "the task's, padded": (task.collate, partial(compute, own, is_own=True)),
        "the task's, packed": (task.collate_packed, partial(compute, own, is_own=True)),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
