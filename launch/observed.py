"""What the summary of a run says of its ranks, its memory, its energy and its traces."""

from __future__ import annotations

from collections.abc import Iterator

from records.names import TRACES_NAME
from records.record import RunRecord


def observed_rows(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yields headings and texts; a heading in capitals is about something that went wrong."""
    if len(record.worlds) > 1:
        yield "world size", ", ".join(f"{one.num_processes} from step {one.first_step}" for one in record.worlds)
    memory = record.ranks[0].memory
    if memory is not None:
        parts = {
            "parameters": memory.parameter_bytes,
            "gradients": memory.gradient_bytes,
            "optimizer": memory.optimizer_bytes,
            "activations": memory.activation_bytes,
        }
        shown = [f"{name} {size / 2**20:.1f} MiB" for name, size in parts.items() if size is not None]
        yield "tensors", ", ".join(shown)
    if joules := record.joules:
        used = ", ".join(f"{number:.0f} J by the {name}" for name, number in joules.items())
        yield "energy", f"{used} in {max(rank.energy.seconds for rank in record.ranks if rank.energy):.1f} s"
    for rank in record.ranks:
        if rank.trace is not None and rank.trace.error is not None:
            yield "NOT TRACED", f"rank {rank.rank}: {rank.trace.error}"
    trace = record.ranks[0].trace
    if trace is not None and trace.files:
        yield "traces", f"steps {trace.steps[0]} to {trace.steps[-1]}, in {TRACES_NAME}/ (for https://ui.perfetto.dev)"
