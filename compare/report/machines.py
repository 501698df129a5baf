"""On which machine each run took place, so that runs of different machines are never compared.

A record names the processor, the cores, the GPUs, the hosts of its ranks and, if it is not older than this field, the
boot of the machine. Two runs took place on the same machine if they had the same hardware, and the same hosts or the
same boot: a host keeps its name when it is started anew, and each container has another name, but the boot of its host.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from compare.machine_facts import Machine
from compare.report.runs import Run
from compare.results import CollectiveSeries
from records.record import Environment


@dataclass
class _Found:
    """A machine, while runs are assigned to it."""

    environment: Environment
    marks: set[str]
    hosts: list[str]
    runs: list[int]


def located(runs: Sequence[Run]) -> list[Run]:
    """Returns the runs, each with its machine."""
    found: list[_Found] = []
    for index, run in enumerate(runs):
        if run.record.ranks:
            _assign(index, run, found)
    num_proper = len(found)
    for index, run in enumerate(runs):
        if not run.record.ranks:
            _assign_failed(index, run, found, num_proper)
    machines = dict(zip((one.runs[0] for one in found), _labelled(found), strict=True))
    of_run = {index: machines[one.runs[0]] for one in found for index in one.runs}
    return [dataclasses.replace(run, machine=of_run[index]) for index, run in enumerate(runs)]


def placed(collectives: Iterable[CollectiveSeries], runs: Iterable[Run]) -> list[CollectiveSeries]:
    """Returns measurements of collectives with the machines of these runs, as far as they were made there.

    Args:
        collectives: The measurements.
        runs: The runs, which have been located.
    """
    known = list({run.machine.label: run.machine for run in runs if run.machine is not None}.values())
    found = []
    for series in collectives:
        if (own := series.machine) is not None:
            alike = [machine for machine in known if _is_alike(machine, own)]
            same = [machine for machine in alike if same_machine(machine, own)]
            if not same and (own.marks or len(alike) != 1):
                namesakes = sum(machine.label.startswith(own.label) for machine in known)
                same = [own if not namesakes else own.model_copy(update={"label": f"{own.label} #{namesakes + 1}"})]
                known += same
            series = series.model_copy(update={"machine": (same or alike)[0]})  # noqa: PLW2901 (the same, placed)
        found.append(series)
    return found


def several_machines(runs: Iterable[Run]) -> bool:
    """Tells whether the runs, which have been located, took place on more than one machine."""
    return len({run.machine.label for run in runs if run.machine is not None}) > 1


def describe_machine(environment: Environment, hosts: Sequence[str]) -> Machine:
    """Describes one machine.

    Args:
        environment: What a record, or this process, says of it.
        hosts: The names of its hosts, as far as they are known.
    """
    return Machine(
        label=_words(environment),
        cpu=environment.cpu,
        num_cpus=environment.num_cpus,
        gpus=environment.gpus,
        marks=sorted(_marks(environment, hosts)),
    )


def same_machine(one: Machine, other: Machine) -> bool:
    """Tells whether two descriptions are of the same machine."""
    return _is_alike(one, other) and bool(set(one.marks) & set(other.marks))


def _is_alike(one: Machine, other: Machine) -> bool:
    return (one.cpu, one.num_cpus, one.gpus) == (other.cpu, other.num_cpus, other.gpus)


def _assign(index: int, run: Run, found: list[_Found]) -> None:
    environment, hosts = run.record.environment, _hosts(run)
    own = _Found(environment, _marks(environment, hosts) | _mark_of_race(run), hosts, [index])
    for other in [one for one in found if _hardware(one.environment) == _hardware(environment)]:
        if other.marks & own.marks:
            # What has been told apart until now turns out to be one machine with two names.
            found.remove(other)
            own = _Found(other.environment, other.marks | own.marks, other.hosts, sorted([*other.runs, *own.runs]))
    found.append(own)


def _assign_failed(index: int, run: Run, found: list[_Found], num_proper: int) -> None:
    """Assigns a run that failed before its ranks could say where they are, and whether they have GPUs."""
    environment = run.record.environment
    marks = _marks(environment, [])
    # A boot is only known together with the number of hosts, which is one but for runs of several nodes.
    fitting = [one for one in found if one.marks & marks] or (found[:1] if not marks and num_proper == 1 else [])
    if fitting:
        fitting[0].runs.append(index)
    else:
        found.append(_Found(environment, marks, [], [index]))


def _labelled(found: Sequence[_Found]) -> list[Machine]:
    """Describes machines; those in the same words are told apart by the names of their hosts, or else by numbers."""
    machines = [describe_machine(one.environment, one.hosts) for one in found]
    words = Counter(machine.label for machine in machines)
    named = [
        f"{machine.label} ({', '.join(one.hosts)})" if words[machine.label] > 1 and one.hosts else machine.label
        for machine, one in zip(machines, found, strict=True)
    ]
    met: Counter[str] = Counter()
    labels = []
    for name in named:
        met[name] += 1
        labels.append(name if met[name] == 1 else f"{name} #{met[name]}")
    return [
        machine.model_copy(update={"label": label, "marks": sorted(one.marks)})
        for machine, label, one in zip(machines, labels, found, strict=True)
    ]


def _hosts(run: Run) -> list[str]:
    """Returns the names of the hosts; those that an engine has made on one machine are no names of it."""
    if run.record.environment.network is not None:
        return []
    return sorted({rank.hostname for rank in run.record.ranks})


def _hardware(environment: Environment) -> tuple[str, int, tuple[str, ...]]:
    return environment.cpu, environment.num_cpus, tuple(environment.gpus)


def _marks(environment: Environment, hosts: Sequence[str]) -> set[str]:
    known = {f"hosts {' '.join(hosts)}"} if hosts else set()
    if environment.boot_id is not None:
        known.add(f"boot {environment.boot_id} of {max(1, len(hosts))}")
    return set(map(_short, known))


def _mark_of_race(run: Run) -> set[str]:
    """What runs of a race have in common, some of which are on this machine and others on several."""
    if run.race is None or run.race.boot_id is None:
        return set()
    return {_short(f"race {run.race.race} on {run.race.boot_id}")}


def _short(mark: str) -> str:
    return hashlib.sha256(mark.encode()).hexdigest()[:12]


def _words(environment: Environment) -> str:
    if environment.gpus:
        return ", ".join(f"{number} x {name}" for name, number in Counter(environment.gpus).items())
    return f"{environment.cpu}, {environment.num_cpus} core{'s' * (environment.num_cpus > 1)}"
