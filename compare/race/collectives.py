"""The collectives of the libraries that take part in a race, which are measured after its runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console

from backends.registry import BACKENDS
from compare.race.directory import RaceDirectory
from compare.race.options import RaceOptions
from compare.race.plan import Entrant, RacePlan
from launch import own_command
from launch.quantities import format_duration

# Of one library on one number of ranks.
_SECONDS = 28.0


def seconds_of_collectives(entrants: Iterable[Entrant], options: RaceOptions) -> float:
    """Returns the expected time of measuring the collectives of a race."""
    return sum(map(_seconds, _worlds(entrants, options).values()))


def seconds_still_to_come(plan: RacePlan, directory: RaceDirectory) -> float:
    """Returns the expected time of measuring those collectives that an earlier call has not measured."""
    return sum(map(_seconds, _still_to_come(plan, directory).values()))


def measure_collectives(
    plan: RacePlan, devices: Mapping[str, str], directory: RaceDirectory, terminal: Console
) -> None:
    """Measures the collectives of each library that takes part with more than one rank.

    Args:
        plan: The plan of the race.
        devices: The device of each backend.
        directory: The directory of the race, which keeps what was measured, or why it could not be.
        terminal: Is told what is measured, and about how long it takes.

    Raises:
        Interrupted: The user asked to stop.
    """
    for name, worlds in _still_to_come(plan, directory).items():
        terminal.print(
            f"measuring the collectives of {name} on {' and '.join(map(str, worlds))} ranks: "
            f"about {format_duration(_seconds(worlds))}"
        )
        done = own_command.run_command(
            [
                *(
                    "allreduce",
                    f"--backends={name}",
                    f"--num-processes={','.join(map(str, worlds))}",
                    f"--output={directory.collectives(name)}",
                    f"--device={devices[name]}",
                ),
                *plan.options.network.words(),
                *(() if plan.options.bandwidth is None else ("--sizes=1KiB..4MiB",)),  # larger ones would take minutes
            ]
        )
        directory.note_collectives(name, None if done.returncode == 0 else done.stderr.strip()[-300:])


def _worlds(entrants: Iterable[Entrant], options: RaceOptions) -> dict[str, list[int]]:
    """Returns the backends whose libraries have collectives of their own, each with its numbers of ranks above one."""
    worlds: dict[str, set[int]] = {}
    for one in entrants if options.collectives else ():
        has_own = one.backend in BACKENDS and BACKENDS[one.backend].has_own_collectives
        if has_own and one.role == "backend" and one.num_processes > 1:
            worlds.setdefault(one.backend, set()).add(one.num_processes)
    return {name: sorted(numbers) for name, numbers in worlds.items()}


def _still_to_come(plan: RacePlan, directory: RaceDirectory) -> dict[str, list[int]]:
    worlds = _worlds(plan.entrants, plan.options)
    return {name: numbers for name, numbers in worlds.items() if not directory.collectives(name).exists()}


def _seconds(worlds: Sequence[int]) -> float:
    """Returns the expected time of measuring the collectives of one library on so many numbers of ranks."""
    return _SECONDS * len(worlds)
