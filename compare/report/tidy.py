"""steps.csv: the steps that a report is made of, a row for each step and rank, for programs other than Lockstep.

It is CSV, since everything reads that, and a race has some ten thousand rows. docs/race-data.md describes the columns.
"""

from __future__ import annotations

import csv
import io
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from compare.report.counted import counted
from compare.report.grouping import EntrantRuns
from compare.report.headings import keys_of, ordered_groups
from compare.report.machines import located
from compare.report.runs import Run, TurnFacts
from records.record import RankRecord


class StepRow(NamedTuple):
    """One step of one rank; what is not known is None, and nothing in the file."""

    group: str
    race: str | None
    block: int | None
    part: int | None
    run: str
    purpose: str
    entrant: str
    backend: str
    num_processes: int
    precision: str
    gradient_accumulation_steps: int
    global_batch_size: int
    micro_batch_size: int
    rank: int
    step: int
    timed: str
    round: int | None
    position: int | None
    step_seconds: float
    joint_seconds: float | None
    cpu_seconds: float | None
    instructions: int | None
    samples: int
    tokens: int | None
    positions: int | None
    foreign_share: float | None
    machine: str


def steps_csv(runs: Sequence[Run]) -> str:
    """Returns the content of steps.csv: the steps of all runs that a report of these runs is made of."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(StepRow._fields)
    writer.writerows(_rows(runs))
    return text.getvalue()


def _rows(runs: Sequence[Run]) -> Iterator[StepRow]:
    counting = counted(runs)
    timed = {
        _same(run): {step for span in run.timed_steps for step in range(span.first, span.first + span.number)}
        for entrants in [*counting.groups, *counting.peers]
        for entrant in entrants
        for run in entrant.timed
    }
    grouped = ordered_groups(located(runs))  # with peers, and with the times that were measured in each part
    for key, entrants in zip(keys_of(grouped), grouped, strict=True):
        for entrant in entrants:
            for run in _runs_of(entrant):
                for rank in run.record.ranks:
                    yield from _rows_of(key, entrant, run, rank, timed.get(_same(run), set()))


def _same(run: Run) -> tuple[str, int]:
    """Returns what a run has in common with itself as it is counted, where its times may be others."""
    return run.name, id(run.record)


def _runs_of(entrant: EntrantRuns) -> list[Run]:
    """Returns each run once: one that trained to the end stands for timed ones where there are none."""
    others = [run for run in (entrant.diagnosis, entrant.whole) if run is not None]
    return list({id(run): run for run in [*entrant.timed, *others]}.values())


def _rows_of(key: str, entrant: EntrantRuns, run: Run, rank: RankRecord, timed: set[int]) -> Iterator[StepRow]:
    record, race = run.record, run.race
    turns = race.turns if race is not None else []
    last_steps = [turn.first_step + turn.num_steps - 1 for turn in turns]
    for index, seconds in enumerate(rank.step_seconds):
        step = index + 1
        turn = turns[bisect_left(last_steps, step)] if turns and step <= last_steps[-1] else None
        foreign = turn or race
        yield StepRow(
            group=key,
            race=race.race if race is not None else None,
            block=race.block if race is not None else None,
            part=race.heat if race is not None else None,
            run=run.name,
            purpose=run.purpose,
            entrant=entrant.name,
            backend=record.config.backend,
            num_processes=record.config.num_processes,
            precision=record.config.precision,
            gradient_accumulation_steps=record.gradient_accumulation_steps,
            global_batch_size=record.config.global_batch_size,
            micro_batch_size=record.config.micro_batch_size,
            rank=rank.rank,
            step=step,
            timed=str(step in timed).lower(),
            round=turn.round if turn is not None else None,
            position=turn.position if turn is not None else None,
            step_seconds=seconds,
            joint_seconds=_joint_seconds(turn, step),
            cpu_seconds=rank.step_cpu_seconds[index] if rank.step_cpu_seconds else None,
            instructions=rank.step_instructions[index] if rank.step_instructions is not None else None,
            samples=rank.samples[index],
            tokens=rank.tokens[index] if rank.tokens else None,
            positions=rank.positions[index] if rank.positions else None,
            foreign_share=foreign.foreign_share if foreign is not None else None,
            machine=run.machine.label if run.machine is not None else "",
        )


def _joint_seconds(turn: TurnFacts | None, step: int) -> float | None:
    """Returns the time of a step for all ranks together; on a GPU, the time of the turn, at its last step."""
    if turn is None or step < turn.first_step:
        return None
    if len(turn.step_seconds) == turn.num_steps:
        return turn.step_seconds[step - turn.first_step]
    return turn.step_seconds[0] if step == turn.first_step + turn.num_steps - 1 else None
