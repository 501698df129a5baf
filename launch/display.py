"""What a user sees of a run: a progress bar, a line for each evaluation, a table at the end."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from compare.throughput import samples_per_second
from launch.config import RunConfig
from launch.progress import ProgressReader
from launch.record import RECORD_NAME, RunRecord, by_merit
from launch.resume import Start

_SECONDS_BETWEEN_LINES = 30.0


class _Terminal(Console):
    """A console that falls silent when nobody reads it any more, where rich would end the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # What is still in its buffer goes nowhere, instead of into an error at the end of the interpreter.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console() -> Console:
    """The terminal, or plain lines of a fixed width where there is none."""
    # Without markup: paths and names may contain what looks like it.
    return _Terminal(highlight=False, markup=False, soft_wrap=not sys.stdout.isatty())


class RunDisplay:
    """Shows a run's news as they come: in a bar, or without a terminal in a line now and then."""

    def __init__(self, config: RunConfig, terminal: Console) -> None:
        self._config = config
        self._terminal = terminal
        self._news = ProgressReader(config.output_dir)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            TimeRemainingColumn(),
            console=terminal,
            transient=True,
            auto_refresh=False,  # no thread beside the one that starts processes
            disable=not terminal.is_terminal,
        )
        self._task: TaskID | None = None
        self._first: tuple[int, float] | None = None
        self._last_line = time.time()
        self._is_watched = True

    def __enter__(self) -> RunDisplay:
        self._bar.start()
        self._task = self._bar.add_task("starting ranks", total=None, facts="")
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            self._bar.stop()

    def refresh(self) -> None:
        """Shows what the run has reported since the last call, as long as anybody looks."""
        if self._is_watched:
            try:
                self._show_news()
            except OSError:  # the terminal, or the program at the other end of a pipe, has gone: the run goes on
                self._is_watched = False

    def _show_news(self) -> None:
        for fact in self._news.news():
            if fact["event"] == "step":
                self._show_step(fact)
            elif fact["event"] == "evaluation":
                self._show_evaluation(fact["evaluation"])
            elif fact["event"] == "save-failed":
                self._terminal.print(f"step {fact['step']}: the checkpoint could NOT be saved ({fact['why']})")
        self._bar.refresh()

    def _show_step(self, fact: dict[str, Any]) -> None:
        assert self._task is not None
        step, now = fact["step"], fact["time"]
        if self._first is None:
            self._first = (step, now)
        facts = f"loss {_format_number(fact['loss'])}" if fact["loss"] is not None else "loss not finite"
        first_step, first_time = self._first
        if step > first_step:
            rate = (step - first_step) * self._config.global_batch_size / (now - first_time)
            facts += f"  {rate:.0f} samples/s"
        self._bar.update(self._task, description="training", total=fact["num_steps"], completed=step, facts=facts)
        if not self._terminal.is_terminal and now - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._terminal.print(f"step {step} of {fact['num_steps']}: {facts}")

    def _show_evaluation(self, evaluation: dict[str, Any]) -> None:
        where = f"epoch {evaluation['epoch'] + 1}, step {evaluation['step']}"
        self._terminal.print(f"{where}: {format_metrics(evaluation['metrics'])}")
        self._first = None  # the next rate leaves the evaluation out


def show_start(config: RunConfig, start: Start | None, terminal: Console) -> None:
    """Says in a line what is about to run, and where it begins."""
    terminal.print(f"{config.backend}: {_describe_world(config)}, started by {config.start_method}")
    for damage in start.damaged if start else ():
        terminal.print(f"passed over: {damage}")
    if start is not None:
        terminal.print(f"going on after step {start.state.step}, from {start.path}")
        for note in _what_is_different(config, start):
            terminal.print(note)
    elif config.resume is not None:
        terminal.print("no checkpoint yet: starting from the beginning")


def _what_is_different(config: RunConfig, start: Start) -> Iterator[str]:
    """What keeps a resumed run from ending with the bits, or with the model, of the unbroken one."""
    before = start.config
    if (config.backend, config.num_processes) == (before.backend, before.num_processes):
        for name in ("device", "threads_per_rank"):
            now, then = getattr(config, name), getattr(before, name)
            if now != then:
                option = name.replace("_", "-")
                yield f"--{option} {now}, where it had {then}: the same to rounding, not to the last bit"
    if start.best_path is not None and not start.best_path.exists():
        yield f"the best model so far is not there ({start.best_path}): the best of what comes will be kept"


def show_summary(record: RunRecord, directory: Path, terminal: Console) -> None:
    """Shows what was run, what was in force, how well and how fast it did, and where the results lie."""
    config = RunConfig.model_validate(record.config)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    task = record.task
    model = f"{task['model']} on {task['data']}, " if "model" in task else ""
    schedule = f"{config.optimizer} at {config.learning_rate:g}, {config.lr_scheduler}"
    table.add_row("task", f"{config.task}: {model}{schedule}, seed {config.seed}")
    table.add_row("run", f"{config.backend}: {_describe_world(config)}")
    if record.resumed_from is not None:
        origin = record.resumed_from
        began = f"after step {origin.step} of {origin.backend} on {origin.num_processes} rank(s)"
        table.add_row("resumed", began + (f", {record.restarts} restart(s)" if record.restarts else ""))
    best = f" (the best, of step {record.best_step})" if record.best_step else ""
    table.add_row("result", format_metrics(record.quality) + best)
    if config.metric_for_best_model is not None:
        ranking = by_merit(record.evaluations, config.metric_for_best_model)
        if ranking and ranking[0].step != record.best_step:
            table.add_row("NOT BEST", f"the weights of step {ranking[0].step}, which were better, have been lost")
    if "majority_share" in task:
        table.add_row("", f"(always the most frequent label: accuracy {task['majority_share']['validation']:.4f})")
    num_epochs = record.steps[-1].epoch + 1
    table.add_row("steps", f"{len(record.steps)} in {num_epochs} epoch(s)" + _describe_exceptions(record))
    rate = samples_per_second(record)
    table.add_row("speed", f"{rate:.1f} samples/s" if rate else "too short to tell")
    first_step = f"{record.seconds_to_first_step:.1f} s to the first step, " if record.seconds_to_first_step else ""
    table.add_row("time", f"{first_step}{record.seconds:.1f} s in all")
    memory = max(rank.peak_memory_bytes for rank in record.ranks) / 2**20
    table.add_row("ranks", f"{record.ranks[0].num_threads} thread(s) each, at most {memory:.0f} MiB")
    for straggler in record.stragglers:
        who = f"rank {straggler.rank} ({straggler.hostname})"
        table.add_row("STRAGGLER", f"{who} computes {straggler.times_slower:g} times as long as the others")
    if record.failed_saves:
        table.add_row("NOT SAVED", f"checkpoint(s) of step {', '.join(map(str, record.failed_saves))}")
    settings = record.ranks[0].effective_settings
    table.add_row("in force", ", ".join(f"{name} {value}" for name, value in settings.items()))
    table.add_row("weights", f"{record.ranks[0].weights_sha256[:16]} on every rank")
    table.add_row("results", f"{directory} (model, {RECORD_NAME}, logs/)")
    terminal.print(table)


def _describe_world(config: RunConfig) -> str:
    return (
        f"{config.num_processes} x {config.device}, {config.precision}, batch {config.global_batch_size} = "
        f"{config.num_processes} rank(s) x {config.micro_batch_size} samples x "
        f"{config.gradient_accumulation_steps} micro-step(s)"
    )


def _describe_exceptions(record: RunRecord) -> str:
    skipped = sum(step.skipped for step in record.steps)
    not_finite = sum(step.loss is None for step in record.steps)
    text = f", {skipped} skipped (gradient not finite)" if skipped else ""
    return text + (f", {not_finite} with a loss that is NOT FINITE" if not_finite else "")


def _format_number(value: float | None) -> str:
    if value is None:
        return "undefined"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"


def format_metrics(metrics: dict[str, float | None]) -> str:
    """Formats metrics for one line."""
    return "  ".join(f"{name} {_format_number(value)}" for name, value in metrics.items())
