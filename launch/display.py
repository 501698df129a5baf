"""What a user sees of a run: a progress bar, a line for each evaluation, a table at the end."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from launch.observed import observed_rows
from launch.resume import Start
from records.config import RunConfig
from records.environment import num_cpus
from records.names import LOGS_NAME, RECORD_NAME
from records.news import Evaluated, EvaluationBegan, Resumed, SaveFailed, StepEnded, Warned
from records.notice import Notice, read_notice
from records.processor import SLOW_BF16, is_slow
from records.progress import ProgressReader
from records.record import EvaluationRecord, RunRecord, by_merit
from records.run_files import other_files
from records.throughput import samples_per_second
from tasks.interface import Overview, metric_title, shown_label

_SECONDS_BETWEEN_LINES = 30.0
_NUM_NAMES = 5
_ANY_WIDTH = 100_000


class _Terminal(Console):
    """A console that goes quiet when its reader is gone; rich would end the program."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError as error:  # as on a full disk
            self.on_broken_pipe()
            with contextlib.suppress(OSError):
                print(f"lockstep: the output cannot be written ({error.strerror})", file=sys.stderr, flush=True)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # What is left in the buffer is discarded; otherwise it would cause an error when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Lines(io.TextIOBase):
    """Standard output that is not a terminal, without the spaces that fill the cells of a table."""

    def write(self, text: str) -> int:
        return sys.stdout.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def flush(self) -> None:
        sys.stdout.flush()


def console() -> Console:
    """Returns the terminal or, where there is none, a console that writes plain lines of any length."""
    # Without markup: paths and names may contain what looks like it.
    if sys.stdout.isatty():
        return _Terminal(highlight=False, markup=False)
    file: Any = _Lines()
    return _Terminal(file=file, force_terminal=False, width=_ANY_WIDTH, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def saying(terminal: Console) -> Iterator[Callable[[str], None]]:
    """Yields a function that tells what runs now: in a line that changes on a terminal, in a line each elsewhere."""
    with terminal.status("") as status:

        def say(text: str) -> None:
            status.update(text)
            if not terminal.is_terminal:
                terminal.print(text)

        yield say


class RunDisplay:
    """Shows the news of a run as they arrive: in a progress bar or, without a terminal, as a line from time to time."""

    def __init__(self, config: RunConfig, terminal: Console, positive_label: str | None = None) -> None:
        self._config = config
        self._terminal = terminal
        self._positive_label = positive_label
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
        self._notice = Notice()

    def __enter__(self) -> RunDisplay:
        self._bar.start()
        self._task = self._bar.add_task("starting ranks", total=None, facts="")
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            self._bar.stop()

    def refresh(self) -> None:
        """Shows what the run has reported since the last call, until the output is closed."""
        if self._is_watched:
            try:
                self._show_news()
            except OSError:  # the terminal, or the program at the other end of a pipe, is gone; the run continues
                self._is_watched = False

    def _show_news(self) -> None:
        for news in self._news.news():
            match news:
                case StepEnded():
                    self._show_step(news)
                case EvaluationBegan(step=step, num_steps=num_steps):
                    assert self._task is not None
                    self._bar.update(self._task, description="evaluating", completed=step, total=num_steps)
                case Evaluated(evaluation=evaluation):
                    self._show_evaluation(evaluation)
                case SaveFailed(step=step, why=why):
                    self._terminal.print(f"step {step}: the checkpoint could NOT be saved ({why})")
                case Resumed(origin=origin, worlds=worlds) if self._config.min_nodes is not None:
                    world = _count(worlds[-1].num_processes, "rank")
                    self._terminal.print(f"going on after step {origin.step} on {world}")
                case Warned(text=text):
                    self._terminal.print(f"WARNING: {text}")
        notice = read_notice(self._config.output_dir)
        if notice.text and notice != self._notice:
            self._notice = notice
            self._terminal.print(notice.text)
        self._bar.refresh()

    def _show_step(self, news: StepEnded) -> None:
        assert self._task is not None
        step, now = news.step, news.time
        if self._first is None:
            self._first = (step, now)
        facts = f"loss {_format_number(news.loss)}" if news.loss is not None else "loss not finite"
        first_step, first_time = self._first
        if step > first_step:
            rate = (step - first_step) * self._config.global_batch_size / (now - first_time)
            facts += f"  {rate:.0f} samples/s"
        self._bar.update(self._task, description="training", total=news.num_steps, completed=step, facts=facts)
        if not self._terminal.is_terminal and now - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._terminal.print(f"step {step} of {news.num_steps}: {facts}")

    def _show_evaluation(self, evaluation: EvaluationRecord) -> None:
        metrics = format_metrics(evaluation.metrics, self._positive_label)
        rows = _Rows()
        rows.add_row(f"epoch {evaluation.epoch + 1}, step {evaluation.step}:", metrics)
        rows.show(self._terminal)
        assert self._task is not None
        self._bar.update(self._task, description="training")
        self._first = None  # the next rate leaves the evaluation out


def show_start(config: RunConfig, start: Start | None, terminal: Console) -> None:
    """Shows what is about to run, and from where."""
    terminal.print(f"{config.backend}: {describe_world(config)}, started by {config.start_method}")
    kept = other_files(config.output_dir) if config.overwrite else []
    if kept:
        names = ", ".join(kept[:_NUM_NAMES]) + (", ..." if len(kept) > _NUM_NAMES else "")
        terminal.print(f"kept {_count(len(kept), 'file')} that no run wrote: {names}")
    num_ranks, num_cores = config.num_processes // config.num_nodes, num_cpus()
    if num_ranks > num_cores:
        terminal.print(
            f"{num_ranks} ranks share {_count(num_cores, 'core')}, so every step is slow; use at most "
            f"{_count(num_cores, 'rank')} on this machine"
        )
    if is_slow(config.precision, config.device):
        terminal.print(f"bf16: {SLOW_BF16}")
    for damage in start.damaged if start else ():
        terminal.print(f"skipped an unusable checkpoint: {damage}")
    if start is not None:
        terminal.print(f"resuming after step {start.state.step}, from {start.path}")
        for note in _what_is_different(config, start):
            terminal.print(note)
    elif config.resume is not None:
        terminal.print("there is no checkpoint yet; starting from the beginning")


def show_overview(overview: Overview, terminal: Console) -> None:
    """Shows what a task says of its data, its warnings last."""
    rows = _Rows()
    for heading, text in overview.rows:
        rows.add_row(heading, text)
    for warning in overview.warnings:
        rows.add_row("WARNING", warning)
    rows.show(terminal)


class _Rows:
    """Headings in one column, and texts beside them."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str]] = []

    def add_row(self, heading: str, text: str) -> None:
        self._rows.append((heading, text))

    def show(self, terminal: Console) -> None:
        indent = max((len(heading) for heading, _ in self._rows), default=0) + 2
        for heading, text in self._rows:
            style = "bold" if heading.isupper() else "dim"
            for number, line in enumerate(_filled(text, terminal, indent)):
                first = Text(f"{heading if number == 0 else '':{indent}}", style)
                terminal.print(first.append(line, "default"), soft_wrap=True)


def _filled(text: str, terminal: Console, indent: int) -> list[str]:
    """Breaks a text where the terminal ends, after a word or, if it has columns (two spaces), after a column."""
    parts = re.findall(r" *\S+(?: \S+)*" if "  " in text.strip() else r" *\S+", text)
    lines = [""]
    for part in parts:
        if terminal.is_terminal and lines[-1] and indent + len(lines[-1]) + len(part) > terminal.width:
            lines.append(part.lstrip())
        else:
            lines[-1] += part
    return lines


def _what_is_different(config: RunConfig, start: Start) -> Iterator[str]:
    """Yields the reasons why a resumed run may not end with the bits, or the model, of an uninterrupted one."""
    before = start.config
    if (config.backend, config.num_processes) == (before.backend, before.num_processes):
        for name in ("device", "threads_per_rank"):
            now, then = getattr(config, name), getattr(before, name)
            if now != then:
                option = name.replace("_", "-")
                yield f"--{option} is {now} and was {then}: results are equal up to rounding, not bit for bit"
    steps_now, steps_before = config.gradient_accumulation_steps, before.gradient_accumulation_steps
    if config.sync_batchnorm and steps_now != steps_before:
        yield (
            f"a step has {steps_now} micro-step(s) and had {steps_before}: BatchNorm takes statistics of other "
            "samples; choose another --micro-batch-size"
        )
    if start.best_path is not None and not start.best_path.exists():
        yield f"the best model so far is missing ({start.best_path}); the best of the remaining evaluations is kept"


def show_summary(record: RunRecord, directory: Path, terminal: Console) -> None:
    """Shows what was run, with which settings, its quality and speed, and where the results are."""
    config = record.config
    table = _Rows()
    task = record.task
    model = f"{task['model']} on {task['data']}, " if "model" in task else ""
    schedule = f"{config.optimizer} at {config.learning_rate:g}, {config.lr_scheduler}"
    table.add_row("task", f"{config.task}: {model}{schedule}, seed {config.seed}")
    table.add_row("run", f"{config.backend}: {describe_world(config)}")
    if record.resumed_from is not None:
        origin = record.resumed_from
        began = f"after step {origin.step} of {origin.backend} on {_count(origin.num_processes, 'rank')}"
        table.add_row("resumed", began + (f", {_count(record.restarts, 'restart')}" if record.restarts else ""))
    _add_result(table, record, config)
    num_epochs = record.steps[-1].epoch + 1
    table.add_row("steps", f"{len(record.steps)} in {_count(num_epochs, 'epoch')}" + _describe_exceptions(record))
    rate = samples_per_second(record)
    table.add_row("speed", f"{rate:.1f} samples/s" if rate else "the run is too short to tell")
    first_step = f"{record.seconds_to_first_step:.1f} s to the first step, " if record.seconds_to_first_step else ""
    table.add_row("time", f"{first_step}{record.seconds:.1f} s in all")
    memory = max(rank.peak_memory_bytes for rank in record.ranks) / 2**20
    table.add_row("ranks", f"{_count(record.ranks[0].num_threads, 'thread')} each, at most {memory:.0f} MiB")
    table.add_row("batches", _describe_batches(record))
    for heading, text in observed_rows(record):
        table.add_row(heading, text)
    _add_problems(table, record)
    settings = record.ranks[0].effective_settings
    table.add_row("in force", ", ".join(f"{name} {value}" for name, value in settings.items()))
    digests = {rank.weights_sha256 for rank in record.ranks}
    owner = "every rank" if len(digests) == 1 else "rank 0"
    is_last = record.best_step in (None, record.steps[-1].step)
    when = "" if is_last else f" after the last step; the saved model has the weights of step {record.best_step}"
    table.add_row("weights", f"{record.ranks[0].weights_sha256[:16]} on {owner}{when}")
    if record.model_directory is None:
        table.add_row("results", f"{directory} (model, {RECORD_NAME}, logs/)")
    else:
        table.add_row("MODEL IN", record.model_directory)
        table.add_row("record", f"{directory} ({RECORD_NAME})")
        table.add_row("logs", f"{config.output_dir / LOGS_NAME}")
    table.show(terminal)


def _add_result(table: _Rows, record: RunRecord, config: RunConfig) -> None:
    """Adds the metrics of the saved model, and those of a model that always gives the same answer."""
    if not config.evaluate:
        return
    better = _lost_best(record)
    kept = f" ({'' if better else 'the best, '}of step {record.best_step})" if record.best_step else ""
    positive_label, baseline = record.task.get("positive_label"), record.task.get("baseline")
    table.add_row("result", format_metrics(record.quality, positive_label) + kept)
    if better is not None:
        table.add_row(
            "NOT BEST", f"the better weights of step {better} are lost: their checkpoint is missing or damaged"
        )
    if baseline is not None:
        values = format_metrics(baseline["metrics"], positive_label)
        table.add_row("baseline", f"always {shown_label(baseline['answer'])!r} gives  {values}")
        if no_better := _no_better(record.quality, baseline["metrics"]):
            table.add_row("NO BETTER", f"than the baseline in {', '.join(no_better)}")


def _add_problems(table: _Rows, record: RunRecord) -> None:
    """Adds what went wrong or deserves attention."""
    for straggler in record.stragglers:
        who = f"rank {straggler.rank} ({straggler.hostname})"
        table.add_row(
            "STRAGGLER", f"{who} takes {straggler.times_slower:g} times as long as the others to compute a step"
        )
    if record.failed_saves:
        steps = ", ".join(map(str, record.failed_saves))
        noun = "checkpoint" if len(record.failed_saves) == 1 else "checkpoints"
        table.add_row("NOT SAVED", f"{noun} of step {steps}")
    if record.disagreement is not None:
        table.add_row("DIVERGED", f"{record.error}; {describe_diverged_model(record)}")
    if record.differing_buffers:
        number, first = len(record.differing_buffers), record.differing_buffers[0]
        table.add_row("buffers", f"{number} differed between ranks ({first}, ...); rank 0's were saved")
    for warning in record.warnings:
        table.add_row("WARNING", warning)


def describe_diverged_model(record: RunRecord) -> str:
    """Returns which weights were saved of a run whose ranks diverged."""
    agreed = record.disagreement.agreed_step if record.disagreement is not None else None
    if record.best_step is not None and agreed is not None and record.best_step <= agreed:
        return f"the model is that of step {record.best_step}, when all ranks still had equal weights"
    return "the model is that of rank 0"


def _lost_best(record: RunRecord) -> int | None:
    """The step of the best evaluation, if the weights that were saved are not its own."""
    ranking = by_merit(record.evaluations, record.config)
    return ranking[0].step if ranking and ranking[0].step != record.best_step else None


def describe_world(config: RunConfig) -> str:
    """Returns a run's ranks, precision and batch in words."""
    return (
        f"{config.num_processes} x {config.device}, {config.precision}, batch {config.global_batch_size} = "
        f"{_count(config.num_processes, 'rank')} x {_count(config.micro_batch_size, 'sample')} x "
        f"{_count(config.gradient_accumulation_steps, 'micro-step')}"
    )


def _count(number: int, noun: str) -> str:
    """Writes a number with its noun, in the plural unless the number is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _describe_batches(record: RunRecord) -> str:
    parts: list[str] = [record.config.batching]
    if record.positions_per_token is not None:
        parts.append(f"{record.positions_per_token:.2f} positions computed for each token")
    if record.imbalance is not None and len(record.ranks) > 1:
        parts.append(f"the rank with most has {record.imbalance:.2f} times the mean")
    return ", ".join(parts)


def _describe_exceptions(record: RunRecord) -> str:
    skipped = sum(step.skipped for step in record.steps)
    not_finite = sum(step.loss is None for step in record.steps)
    text = f", {skipped} skipped (gradient not finite)" if skipped else ""
    return text + (f", {not_finite} with a loss that is NOT FINITE" if not_finite else "")


def _format_number(value: float | None) -> str:
    if value is None:
        return "undefined"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"


def format_metrics(metrics: Mapping[str, float | None], positive_label: str | None) -> str:
    """Formats metrics for one line, each with the class that it is about."""
    return "  ".join(f"{metric_title(name, positive_label)} {_format_number(value)}" for name, value in metrics.items())


def _no_better(quality: dict[str, float | None], baseline: dict[str, float]) -> list[str]:
    """The metrics in which a model is no better than one without any skill."""
    return [name for name, value in baseline.items() if (own := quality.get(name)) is not None and own <= value]
