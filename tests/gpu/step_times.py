"""How long a step of one process takes on one GPU, and which kernels it runs: ``python -m tests.gpu.step_times``.

BERT-base with fresh weights trains on texts that are all longer than a sequence may be, so that no layout computes any
padding. The command prints, for each layout of a batch, the milliseconds of a step, those in which Python asks for
its kernels, the model FLOP/s, and the kernels that take longest.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import get_args

import torch
from torch.profiler import ProfilerActivity, profile

from backends.capabilities import PRECISIONS
from backends.single import SingleBackend
from compare.report.flops import peak_flops_per_second, training_flops_per_token
from records.config import Batching
from tasks.text.classification import TextClassification
from tasks.text.settings import TextClassificationSettings
from tests.gpu.long_texts import write_long_texts
from tests.launching import run_config
from training.loop import Trainer

_WARM_UP, _TIMED, _PROFILED = 5, 10, 2
_BERT_BASE = {"num_layers": 12, "hidden_size": 768, "intermediate_size": 3072}


def main(arguments: list[str]) -> int:
    """Prints two lines and a table for each layout; returns 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.step_times", description=__doc__, allow_abbrev=False)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=256, help="samples of a step (default: %(default)s)")
    parser.add_argument("--sequence-length", type=int, default=128, help="tokens of a sample (default: %(default)s)")
    parser.add_argument("--torch-compile", action="store_true", help="compile the model")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("step_times: no GPU is visible here; run it on a machine with one", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, {asked}")
    with tempfile.TemporaryDirectory() as directory:
        texts = Path(directory) / "texts.csv"
        # A review has more than three tokens.
        reviews_per_text = 1 + asked.sequence_length // 3
        write_long_texts(texts, num_texts=2 * asked.batch_size, reviews_per_text=reviews_per_text, seed=1)
        task = TextClassification(
            TextClassificationSettings(
                model="bert-base", train_file=texts, validation_file=texts, max_seq_length=asked.sequence_length
            )
        )
        task.prepare()
        for batching in get_args(Batching):
            seconds, seconds_of_python, kernels = _measure(task, Path(directory), batching, asked)
            tokens = asked.batch_size * asked.sequence_length
            flops = training_flops_per_token(**_BERT_BASE, sequence_length=asked.sequence_length) * tokens / seconds
            peak = peak_flops_per_second(name, asked.precision)
            share = f", {flops / peak:.1%} of the data sheet" if peak else ""
            print(f"{batching}: {1000 * seconds:.1f} ms a step, Python {1000 * seconds_of_python:.1f} ms")
            print(f"{batching}: {asked.batch_size / seconds:.0f} samples/s, {flops / 1e12:.1f} TFLOP/s{share}")
            print(kernels, flush=True)
    return 0


def _measure(
    task: TextClassification, directory: Path, batching: str, asked: argparse.Namespace
) -> tuple[float, float, str]:
    """Returns the seconds of a step, those until its last kernel was asked for, and a table of its kernels."""
    torch.compiler.reset()  # what was compiled for another layout would be compiled anew, for any shape
    settled = {"global_batch_size": asked.batch_size, "micro_batch_size": asked.batch_size, "max_grad_norm": 1.0}
    settled |= {"task": "text-classification", "device": "cuda", "precision": asked.precision, "optimizer": "adamw"}
    settled |= {"learning_rate": 1e-5, "batching": batching, "torch_compile": asked.torch_compile}
    config = run_config("single", 1, directory, **settled)
    trainer = Trainer(config, task, SingleBackend(config.backend_options(SingleBackend.Settings)))
    trainer.state.model.train()
    num_steps = _WARM_UP + _TIMED + _PROFILED
    epochs = -(-num_steps // trainer.plan.steps_per_epoch)
    steps = [step for epoch in range(epochs) for step in trainer.plan.epoch(epoch)][:num_steps]
    batches = trainer.loader.load(steps)
    for step in steps[:_WARM_UP]:
        trainer.train_step(0, step, batches)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for step in steps[_WARM_UP : _WARM_UP + _TIMED]:
        trainer.train_step(0, step, batches)
    seconds_of_python = (time.perf_counter() - began) / _TIMED
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / _TIMED
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for step in steps[-_PROFILED:]:
            trainer.train_step(0, step, batches)
        torch.cuda.synchronize()
    table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=20, max_name_column_width=70)
    return seconds, seconds_of_python, table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
