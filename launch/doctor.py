"""`launch/run.sh doctor`: which backends run on this machine, and what the others need; what can be measured."""

from __future__ import annotations

import platform
from collections.abc import Callable

from rich.table import Table

from backends.devices import count_gpus
from backends.registry import BACKENDS
from launch.allocator import describe_allocator, settle_allocator
from launch.arguments import Parser
from launch.display import console
from records.energy import EnergyCounter, NoCountersError, gpu_counters, processor_counters
from records.processor import SLOW_BF16, has_bf16
from training.clock import why_no_instructions


def run(arguments: list[str]) -> int:
    """Prints a row for each backend, and what energy is measured; returns the exit code, 0 as long as one backend runs.

    Raises:
        UsageError: Options were given; the command has none.
    """
    parser = Parser(
        "doctor",
        description="Shows which backends run on this machine, and what the others need; whether the processor has "
        "bf16, what ranks take memory with, and whether instructions and energy can be counted.",
    )
    parser.parse_args(arguments)
    device = "cuda" if count_gpus() else "cpu"
    terminal = console()
    terminal.print(f"Python {platform.python_version()}, {count_gpus() or 'no'} GPU(s)")
    table = Table("backend", "here", "precisions", "started by", box=None, pad_edge=False)
    reasons = {name: row.unavailable_reason() for name, row in BACKENDS.items()}
    for name, row in BACKENDS.items():
        precisions = " ".join(row.capabilities.precisions.get(device, ()))
        methods = " ".join(row.capabilities.start_methods)
        table.add_row(name, "no" if reasons[name] else "yes", precisions, methods)
    terminal.print(table)
    for name, reason in reasons.items():
        if reason is not None:
            terminal.print(f"{name}: {reason}")
    for name, row in BACKENDS.items():
        if reasons[name] is None and (remark := row.remark()) is not None:
            terminal.print(f"{name}: {remark}")
    terminal.print(f"bf16: {'the processor has it' if has_bf16() else SLOW_BF16}")
    terminal.print(_allocator())
    terminal.print(f"instructions: {why_no_instructions() or 'the processor counts them in every step of a run'}")
    terminal.print(f"energy of a run: {_energy(with_gpus=device == 'cuda')}")
    return 0 if None in reasons.values() else 1


def _allocator() -> str:
    """Says what ranks take memory with, and what is missing for another allocator."""
    name = settle_allocator("auto").name
    return describe_allocator("auto") or f"memory allocator: {name}"


def _energy(*, with_gpus: bool) -> str:
    """Says of what a run can measure the energy here, and otherwise why not."""
    parts: dict[str, Callable[[], list[EnergyCounter]]] = {"processors": processor_counters}
    if with_gpus:
        parts["GPUs"] = gpu_counters
    found = []
    for what, counters in parts.items():
        try:
            found.append(f"{what} ({', '.join(counter.name for counter in counters())})")
        except NoCountersError as error:
            found.append(f"not of {what} ({error})")
    return "; ".join(found)
