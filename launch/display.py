"""What a user sees of a run: a progress bar, a line for each evaluation, a table at the end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from compare.throughput import samples_per_second
from launch.config import RunConfig
from launch.progress import ProgressReader
from launch.record import RECORD_NAME, RunRecord


def console() -> Console:
    """The terminal, or plain lines of a fixed width where there is none."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


class RunDisplay:
    """Shows a run's news as they come; without a terminal, only evaluations are printed."""

    def __init__(self, config: RunConfig, terminal: Console) -> None:
        self._config = config
        self._terminal = terminal
        self._news = ProgressReader(config.output_dir)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=terminal,
            transient=True,
            auto_refresh=False,  # no thread beside the one that starts processes
            disable=not terminal.is_terminal,
        )
        self._task: TaskID | None = None
        self._first: tuple[int, float] | None = None

    def __enter__(self) -> RunDisplay:
        self._bar.start()
        self._task = self._bar.add_task("starting ranks", total=None, facts="")
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def refresh(self) -> None:
        """Shows what the run has reported since the last call."""
        for fact in self._news.news():
            if fact["event"] == "step":
                self._show_step(fact)
            else:
                self._show_evaluation(fact)
        self._bar.refresh()

    def _show_step(self, fact: dict[str, Any]) -> None:
        assert self._task is not None
        step, now = fact["step"], fact["time"]
        if self._first is None:
            self._first = (step, now)
        facts = f"loss {fact['loss']:.4f}" if fact["loss"] is not None else "loss not finite"
        first_step, first_time = self._first
        if step > first_step:
            rate = (step - first_step) * self._config.global_batch_size / (now - first_time)
            facts += f"  {rate:.0f} samples/s"
        self._bar.update(self._task, description="training", total=fact["num_steps"], completed=step, facts=facts)

    def _show_evaluation(self, fact: dict[str, Any]) -> None:
        self._terminal.print(f"epoch {fact['epoch'] + 1}, step {fact['step']}: {format_metrics(fact['metrics'])}")
        self._first = None  # the next rate leaves the evaluation out


def show_start(config: RunConfig, terminal: Console) -> None:
    """Says in a line what is about to run."""
    terminal.print(
        f"[bold]{config.backend}[/bold]: {config.num_processes} x {config.device}, {config.precision}, "
        f"batch {config.global_batch_size} = {config.num_processes} ranks x {config.micro_batch_size} samples x "
        f"{config.gradient_accumulation_steps} micro-steps, started by {config.start_method}"
    )


def show_summary(record: RunRecord, directory: Path, terminal: Console) -> None:
    """Shows what was run, what was in force, how well and how fast it did, and where the results lie."""
    config = record.config
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    facts = record.task
    table.add_row("task", f"{config['task']}: {facts.get('model', '')} on {facts.get('data', 'its own data')}")
    table.add_row("result", format_metrics(record.quality))
    if "majority_share" in facts:
        table.add_row("", f"always the most frequent label: accuracy {facts['majority_share']['validation']:.4f}")
    skipped = sum(step.skipped for step in record.steps)
    table.add_row("steps", f"{len(record.steps)}" + (f", {skipped} of them skipped (fp16 overflow)" if skipped else ""))
    rate = samples_per_second(record)
    table.add_row("speed", f"{rate:.1f} samples/s" if rate else "too short to tell")
    first_step = f"{record.seconds_to_first_step:.1f} s to the first step, " if record.seconds_to_first_step else ""
    table.add_row("time", f"{first_step}{record.seconds:.1f} s in all")
    memory = max(rank.peak_memory_bytes for rank in record.ranks) / 2**20
    settings = record.ranks[0].effective_settings
    table.add_row("ranks", f"{len(record.ranks)} with {record.ranks[0].num_threads} threads, at most {memory:.0f} MiB")
    table.add_row("in force", ", ".join(f"{name} {value}" for name, value in settings.items()))
    table.add_row("weights", f"{record.ranks[0].weights_sha256[:16]} on every rank")
    table.add_row("results", f"{directory} (model, {RECORD_NAME}, logs/)")
    terminal.print(table)


def format_metrics(metrics: dict[str, float | None]) -> str:
    """Formats metrics for one line."""
    return "  ".join(f"{name} {'undefined' if value is None else f'{value:.4f}'}" for name, value in metrics.items())
