"""``launch/run.sh contract ADAPTER --task TASK``: the same proof on a task, a model and data of the user's own.

The clauses of the contract are about tasks that are awkward on purpose. Here N ranks train the task that the user
names, with and without accumulation, and one process trains it on whole global batches. Rounding is measured, not
assumed, since a model of any size and precision has its own (see `parity.judge`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from backends.capabilities import PRECISIONS, BackendSettings, UnsupportedError
from backends.devices import count_gpus
from backends.registry import BackendRow, find_backend
from contract.case import INIT_LOSS_SCALE
from contract.options import ContractOptions
from launch.display import saying
from launch.errors import UsageError
from launch.options import Options, check_settings
from launch.resolve import resolve
from parity.report import as_facts, describe
from parity.trial import NUM_STEPS, Outcome, Trial, TrialFailed, Trials, trial_of
from records.config import RunOptions
from tasks.interface import Task

_WORLD_SIZES = (1, 2, 3, 4)
_ACCUMULATION = (1, 2)
_SMALLEST_BATCH = 16


class OwnTask(NamedTuple):
    """The task that a user wants to be sure of.

    Attributes:
        name: Its name, or "module:Class".
        task: It, prepared.
    """

    name: str
    task: Task


class Proof(NamedTuple):
    """One training, and what came of it.

    Attributes:
        place: Under which conditions, in words.
        state: "passed", "failed", "unknown" or "unsupported".
        lines: Why, in sentences.
        facts: The same for a file.
    """

    place: str
    state: str
    lines: list[str]
    facts: dict[str, Any]


_STYLES = {"passed": "green", "failed": "bold red", "unknown": "yellow", "unsupported": "cyan"}


def global_batch_size(world_size: int) -> int:
    """Returns the smallest size of at least 16 that so many ranks can take in two micro-steps."""
    step = world_size * max(_ACCUMULATION)
    return -(-_SMALLEST_BATCH // step) * step


def world_sizes(row: BackendRow, options: ContractOptions) -> list[int]:
    """Returns the numbers of ranks to prove a task with: those asked for, or 1 to 4 as far as the backend goes."""
    most = row.capabilities.max_world_size or max(_WORLD_SIZES)
    if options.num_processes:
        return [size for size in options.num_processes if row.capabilities.max_world_size is None or size <= most]
    if options.device != "cpu" and count_gpus() and not row.capabilities.ranks_may_share_gpu:
        most = min(most, count_gpus())
    return [size for size in _WORLD_SIZES if size <= most]


def prove_task(
    adapter: str, settings: BackendSettings, own: OwnTask, options: ContractOptions, directory: Path, terminal: Console
) -> list[Proof]:
    """Proves a task under an adapter, and shows a row for each training.

    Args:
        adapter: The adapter.
        settings: Its own options.
        own: The task.
        options: Numbers of ranks, precisions and device; all of the adapter's where they are left open.
        directory: An empty directory, for what the trainings leave.
        terminal: Where to show it.

    Raises:
        UsageError, UnsupportedError, TaskInputError: The task cannot be trained.
    """
    row = find_backend(adapter)
    sizes = world_sizes(row, options)
    if not sizes:
        raise UsageError(
            f"--num-processes {','.join(map(str, options.num_processes))}: {adapter} runs at most "
            f"{row.capabilities.max_world_size} process(es); choose another number, or another adapter"
        )
    needed = max(map(global_batch_size, sizes))
    if own.task.num_samples("train") < needed:
        raise UsageError(
            f"--task {own.name}: it has only {own.task.num_samples('train')} training samples, and the proof takes "
            f"{needed} in a step; give it more"
        )
    proofs = []
    with saying(terminal) as say:
        trials = Trials(directory, say)
        for proof in _proofs(adapter, settings, own, options, sizes, trials):
            state = Text(f"{proof.state:12}", style=_STYLES[proof.state])
            terminal.print(Text.assemble(f"{proof.place:28}", state, proof.lines[0]))
            for line in proof.lines[1:]:
                terminal.print(f"    {line}")
            proofs.append(proof)
    return proofs


def _proofs(
    adapter: str,
    settings: BackendSettings,
    own: OwnTask,
    options: ContractOptions,
    sizes: Sequence[int],
    trials: Trials,
) -> Iterator[Proof]:
    for precision in options.precision or PRECISIONS:
        for size in sizes:
            for accumulation in _ACCUMULATION:
                batch_size = global_batch_size(size)
                asked = RunOptions.model_validate(
                    {
                        "task": own.name,
                        "num_processes": size,
                        "precision": precision,
                        "device": options.device,
                        "global_batch_size": batch_size,
                        "micro_batch_size": batch_size // (size * accumulation),
                        "init_loss_scale": INIT_LOSS_SCALE,
                    }
                )
                place = (
                    f"{size} rank{'s' * (size > 1)}, {precision}, {accumulation} micro-step{'s' * (accumulation > 1)}"
                )
                yield _prove(place, adapter, settings, own, asked, trials)


def _prove(
    place: str, adapter: str, settings: BackendSettings, own: OwnTask, asked: RunOptions, trials: Trials
) -> Proof:
    try:
        check_settings(settings, asked)
        request = Options(asked, settings, type(own.task), own.task.settings)
        resolved = resolve(adapter, find_backend(adapter), request, started_at=time.time())
    except UnsupportedError as refusal:
        return Proof(place, "unsupported", [str(refusal)], {"place": place, "detail": str(refusal)})
    trial = trial_of(resolved.config, resolved.task, num_steps=NUM_STEPS)
    try:
        outcome = trials.outcome(trial)
    except TrialFailed as failure:
        return Proof(place, "failed", [str(failure)], {"place": place, "detail": str(failure)})
    return _judged(place, trial, outcome, own)


def _judged(place: str, trial: Trial, outcome: Outcome, own: OwnTask) -> Proof:
    from parity.causes import causes_of, in_view_of  # it imports torch, which takes seconds

    causes = causes_of(trial, own.task)
    outcome = in_view_of(outcome, causes)
    facts = {"place": place, **as_facts(trial, outcome, causes)}
    if outcome.is_same:
        return Proof(place, "passed", [outcome.parity.detail], facts)
    state = "unknown" if outcome.parity.verdict == "unknown" else "failed"
    return Proof(place, state, describe(trial, outcome, causes), facts)
