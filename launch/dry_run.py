"""``launch/run.sh BACKEND --dry-run``: what a run would take, at any size, without starting a rank.

Nothing is created. One process takes a few steps as rank 0 of the run (training/sizes.py), so that this one, like the
command line of a run, does not load torch.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from backends.devices import count_gpus
from backends.registry import BackendRow
from launch.display import console, saying, show_start
from launch.errors import one_line, tell
from launch.guardian import guarded
from launch.options import Options
from launch.resolve import settle
from launch.starters.environment import EXACT_FLOAT32, command_environment
from records.config import RunConfig
from records.names import CONFIG_NAME
from records.sizes import SIZES_NAME, RankSizes
from records.traffic import needed_bytes, sent_bytes
from tasks.interface import Task
from training.plan import Plan, expected_imbalance

_MIB = 2**20


class Measured(NamedTuple):
    """What a step took, or why none could be taken."""

    sizes: RankSizes | None
    device: str
    error: str = ""


def dry_run(backend: str, row: BackendRow, asked: Options, *, started_at: float) -> int:
    """Shows what a run would take, and what this machine would refuse.

    Args:
        backend: The backend.
        row: Its row in the registry.
        asked: The options.
        started_at: When the user's command began, in seconds since 1970.

    Returns:
        The exit code: 0, or 1 if a rank could not take a step.

    Raises:
        UsageError, UnsupportedError, TaskInputError: No machine can start the run.
    """
    refused_here: list[str] = []
    config, task, _ = settle(backend, row, asked, started_at=started_at, noted=refused_here)
    terminal = console()
    show_start(config, asked.start, terminal)
    with saying(terminal) as say:
        say("a dry run: one process takes a few steps of a rank")
        measured = measure_in_a_process(config)
    show(config, task, measured, refused_here, terminal)
    if measured.sizes is None:
        tell(f"a step of this run failed: {measured.error}")
        return 1
    return 0


def measure_in_a_process(config: RunConfig) -> Measured:
    """Has a process of its own take steps as rank 0, on a GPU only if there is one here."""
    device = config.device if count_gpus() else "cpu"
    with tempfile.TemporaryDirectory(prefix="lockstep-sizes-") as name, guarded(name) as mark:
        directory = Path(name)
        # Of one process, which nothing starts again.
        alone = {"device": device, "trace": 0, "resume": None, "max_restarts": 0, "min_nodes": None}
        config = config.model_copy(update=alone)
        (directory / CONFIG_NAME).write_text(config.model_dump_json())
        environment = {**command_environment(), **EXACT_FLOAT32, **mark, "TOKENIZERS_PARALLELISM": "false"}
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        done = subprocess.run(
            [sys.executable, "-m", "training.sizes", name],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode == 0:
            return Measured(RankSizes.model_validate_json((directory / SIZES_NAME).read_bytes()), device)
    if done.returncode == -signal.SIGKILL:
        return Measured(None, device, "it was killed, probably for lack of memory; use a smaller --micro-batch-size")
    last = (done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"])[-1]
    return Measured(None, device, one_line(last))


def show(config: RunConfig, task: Task, measured: Measured, refused_here: list[str], terminal: Console) -> None:
    """Shows all in one table, whose texts are wrapped where a terminal ends."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for heading, text in _rows_of_plan(config, task):
        table.add_row(heading, text)
    if measured.sizes is not None:
        for heading, text in _rows_of_sizes(config, measured.sizes, measured.device):
            table.add_row(heading, text)
    for refusal in refused_here:
        table.add_row("REFUSED", refusal)
    terminal.print(table)


def _micro_steps(config: RunConfig, plan: Plan) -> str:
    """Says how many forward and backward passes a step has: more than follow from batch sizes where they are sorted."""
    number, accumulated = plan.num_micro_steps(plan.epoch(0)[0]), config.gradient_accumulation_steps
    if number <= accumulated:
        return f"{accumulated:,} (gradient_accumulation_steps)"
    return f"{number:,}, each with samples of similar lengths (gradient_accumulation_steps is {accumulated:,})"


def _rows_of_plan(config: RunConfig, task: Task) -> Iterator[tuple[str, str]]:
    """Yields what follows from the options and the number of samples."""
    plan, num_ranks = Plan.of(config, task), config.num_processes
    each = "" if config.num_nodes == 1 else f", {num_ranks // config.num_nodes:,} ranks on each"
    yield "nodes", f"{config.num_nodes:,}{each}; {config.start_method} starts the ranks"
    yield "global batch", _samples(config.global_batch_size)
    yield "micro-batch", _samples(config.micro_batch_size)
    yield "micro-steps", _micro_steps(config, plan)
    steps = plan.steps_per_epoch
    yield "epoch", f"{steps:,} steps, {plan.num_samples:,} samples, {plan.num_samples / num_ranks:,.1f} for a rank"
    yield "training", f"{config.num_steps(steps):,} steps"
    yield (
        "imbalance",
        f"{expected_imbalance(plan):.2f} (work of the rank that has most, over the mean; {config.batching})",
    )


def _rows_of_sizes(config: RunConfig, sizes: RankSizes, device: str) -> Iterator[tuple[str, str]]:
    """Yields what a rank took, and what follows from that."""
    memory, of_rank = sizes.memory, sizes.entered is not None
    where = "the CPU" if device == "cpu" else "a GPU"
    how = f"measured on {where} at the micro-batch that takes most"
    if not of_rank:
        how += f", in one process without communication; what {config.backend} needs for it comes on top"
    if config.torch_compile:
        how += ", of the model before it is compiled"
    yield "memory", f"of a rank, {how}"
    parts = {
        "weights": memory.parameter_bytes,
        "buffers": memory.buffer_bytes,
        "gradients": memory.gradient_bytes,
        "optimizer": memory.optimizer_bytes,
        "activations": memory.activation_bytes,
    }
    for name, size in parts.items():
        if size is not None:
            yield f"  {name}", _size(size)
    yield "  in all", f"{_size(sizes.peak_bytes)} of tensors at one moment"
    if device == "cpu":
        yield "  process", f"{_size(sizes.resident_bytes)}, with all libraries"
    if sizes.entered is not None:
        # Of embeddings, one rank knows which rows it uses itself, in the micro-batches that it has taken.
        at_least = "at least " if config.backend_settings.get("embedding_gradients") == "rows" else ""
        sent = f"{at_least}{_size(sent_bytes(sizes.entered, config.num_processes))}"
        yield "sends", f"{sent} in a step, by each rank, over a ring"
    elif config.backend_settings.get("transport") == "shared-memory":
        yield "sends", "nothing over a network: ranks of one node share memory"
    else:
        yield "sends", f"{_size(needed_bytes(config, sizes.payload))} in a step, by each rank, computed for a ring"
    yield "checkpoint", f"about {_size(sizes.checkpoint_bytes)}"
    yield "model", f"about {_size(sizes.model_bytes)}"


def _samples(number: int) -> str:
    return f"{number:,} sample{'' if number == 1 else 's'}"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / _MIB:,.1f} MiB" if num_bytes >= _MIB or not num_bytes else f"{num_bytes / 1024:,.1f} KiB"
