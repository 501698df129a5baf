"""What groups of runs are called, and in which order a report shows them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
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
    """Names groups, if there are several machines with that of their own; no two groups have the same name."""
    samples = [sample_of(entrants) for entrants in grouped]
    several = several_machines(samples)
    keys = [_key(sample, with_machine=several) for sample in samples]
    return told_apart(keys, [dict(leaves(condition(sample))) for sample in samples])


def told_apart(names: Sequence[str], facts: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns names, of which those that would be equal also say in what they differ.

    Args:
        names: The names.
        facts: What is known of each, by the names of facts.
    """
    return [
        f"{name}; {difference}" if difference else name
        for name, difference in zip(names, differences(names, facts), strict=True)
    ]


def differences(names: Sequence[Hashable], facts: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns, for each of several things, the facts in which it differs from others of the same name; often none.

    Args:
        names: What they are called.
        facts: What is known of each, by the names of facts.
    """
    places: dict[Hashable, list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        places[name].append(index)
    found = [""] * len(names)
    for together in places.values():
        known = dict.fromkeys(fact for index in together for fact in facts[index])
        differing = [fact for fact in known if len({facts[index].get(fact) for index in together}) > 1]
        for index in together:
            found[index] = ", ".join(f"{fact} {facts[index].get(fact, 'not set')}" for fact in differing)
    return found


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
