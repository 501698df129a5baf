"""What groups of runs are called, and in which order a report shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from compare.report.grouping import EntrantRuns, condition, group_runs
from compare.report.machines import several_machines
from compare.report.references import sample_of
from compare.report.runs import Run
from compare.report.words import describe_batch, ranks

_MAX_VALUE = 60


def ordered_groups(runs: Sequence[Run]) -> list[list[EntrantRuns]]:
    """Returns the groups in the order in which a report shows them: machine by machine, the most ranks first.

    Args:
        runs: The runs, which have been located.
    """
    grouped = group_runs(runs)
    machines = list(dict.fromkeys(condition(sample_of(entrants))["machine"] for entrants in grouped))
    return sorted(grouped, key=lambda entrants: _order(sample_of(entrants), machines))


def keys_of(grouped: Sequence[list[EntrantRuns]]) -> list[str]:
    """Names groups, if there are several machines with that of their own; no two groups have the same name.

    Those that would have the same name also say in what they differ.
    """
    samples = [sample_of(entrants) for entrants in grouped]
    several = several_machines(samples)
    keys = [_key(sample, with_machine=several) for sample in samples]
    number_of = Counter(keys)
    for key in [key for key, number in number_of.items() if number > 1]:
        places = [index for index, other in enumerate(keys) if other == key]
        conditions = [dict(leaves(condition(samples[index]))) for index in places]
        names = dict.fromkeys(name for one in conditions for name in one)
        differing = [name for name in names if len({one.get(name) for one in conditions}) > 1]
        for index, one in zip(places, conditions, strict=True):
            keys[index] = f"{key}; " + ", ".join(f"{name} {one.get(name, 'not set')}" for name in differing)
    return keys


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields the values within a value as people write them, each with its name.

    Args:
        value: A value of JSON.
        name: Its name, with which those of the values in it begin.
    """
    if isinstance(value, dict):
        for inner, part in value.items():
            yield from leaves(part, f"{name} {inner.replace('_', ' ')}".strip())
    elif isinstance(value, list):
        yield name, ", ".join(map(str, value))[:_MAX_VALUE] or "none"
    else:
        yield name, "not set" if value is None else str(value)[:_MAX_VALUE]


def _order(sample: Run, machines: list[str]) -> tuple[Any, ...]:
    record, config = sample.record, sample.record.config
    machine = machines.index(condition(sample)["machine"])
    return (machine, -config.num_processes, config.precision != "fp32", record.gradient_accumulation_steps,
            config.global_batch_size, config.precision, config.started_at)  # fmt: skip


def _key(sample: Run, *, with_machine: bool) -> str:
    record, config = sample.record, sample.record.config
    network = condition(sample).get("network")
    place = ("" if config.device == "cpu" else f" on {config.device}") + (f" ({network})" if network else "")
    machine = f"; {condition(sample)['machine']}" if with_machine else ""
    return f"{ranks(config.num_processes)}{place}, {config.precision}, batch {describe_batch(record)}{machine}"
