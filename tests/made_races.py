"""Races made of one real record for each entrant: the same run again and again, with the times that a test wants."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from compare.race.options import RaceOptions
from compare.race.plan import Entrant, RacePlan, Schedule
from compare.report.reading import PLAN_NAME
from compare.report.runs import RaceFacts, TurnFacts, race_file
from records.record import RunRecord

NUM_STEPS = 12
OPTIONS = ["--task", "token-tagging", "--max-steps", str(NUM_STEPS), "--threads-per-rank", "1"]
OPTIONS += ["--global-batch-size", "16"]
# Round 0 warms up with the first five steps; then come two turns, the first step of which is not timed.
_TURNS = ((0, 0, 2, 4), (1, 1, 7, 2), (2, 0, 10, 3))
# By what the starts of an entrant differ.
STARTS = (0.99, 1.0, 1.01)


def made_record(
    content: str, *, start: int, step_seconds: float, spread: float = 1.0, change: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """One start of an entrant, whose steps take turns at being shorter and longer.

    Args:
        content: A real record.
        start: The number of the start.
        step_seconds: The mean time of a step.
        spread: By how much longer this start takes.
        change: What to put in place of parts of the environment.
    """
    record: dict[str, Any] = json.loads(content)
    record["config"]["started_at"] += start
    record["environment"] |= {"boot_id": "made", "cpu": "AMD EPYC", "num_cpus": 2, **(change or {})}
    for rank in record["ranks"]:
        rank["hostname"] = "made"
        factor = step_seconds * spread * (1 + 0.001 * rank["rank"])
        rank["step_seconds"] = [factor * (1.1 if step % 2 else 0.9) for step in range(NUM_STEPS)]
    return record


def made_race(
    directory: Path, contents: Mapping[str, str], step_seconds: Mapping[str, float], *, change: Any = None
) -> Path:
    """Writes the directory of a race, as the race would leave it before it writes its report.

    Args:
        directory: The directory.
        contents: A real record of each entrant, by its name.
        step_seconds: How long a step takes under each.
        change: What to put in place of parts of the environment.
    """
    (directory / "records").mkdir(parents=True)
    for name, content in contents.items():
        for block, spread in enumerate(STARTS, start=1):
            record = made_record(content, start=block, step_seconds=step_seconds[name], spread=spread, change=change)
            path = directory / "records" / f"timed-{block:03d}-00-{name}.json"
            path.write_text(json.dumps(record))
            facts = made_facts(record, block=block, race=directory.name, entrant=name)
            race_file(path).write_text(facts.model_dump_json())
    plan = _plan([RunRecord.model_validate_json(content) for content in contents.values()], directory.name)
    (directory / PLAN_NAME).write_text(plan.model_dump_json())
    return directory


def made_facts(record: Mapping[str, Any], *, block: int, race: str, entrant: str) -> RaceFacts:
    """What a race knows of such a start."""
    slowest = record["ranks"][-1]["step_seconds"]
    turns = [
        TurnFacts(
            round=round_,
            position=position,
            first_step=first,
            num_steps=number,
            step_seconds=slowest[first - 1 : first - 1 + number],
            cpu_seconds=1.0,
            instructions=None,
            foreign_share=0.01 * round_,
        )
        for round_, position, first, number in _TURNS
    ]
    return RaceFacts(
        race=race,
        entrant=entrant,
        purpose="timed",
        block=block,
        position=0,
        busy_share=0.0,
        gpu_processes=0,
        foreign_share=0.02,
        matmul_flops_per_second=None,
        turns=turns,
    )


def _plan(records: Sequence[RunRecord], race: str) -> RacePlan:
    entrants = [
        Entrant(
            backend=record.config.backend,
            num_processes=record.config.num_processes,
            precision=record.config.precision,
            accumulation=record.gradient_accumulation_steps,
            global_batch_size=record.config.global_batch_size,
        )
        for record in records
    ]
    made = plan_of(RaceOptions(target_accuracy=0.75), entrants)
    made.run_options.append("--task=token-tagging")
    made.left_out.append("apex, 2 rank(s): left out, no GPU")
    return made.model_copy(update={"command": f"{made.command} --task token-tagging", "race": race})


def plan_of(options: RaceOptions, entrants: list[Entrant]) -> RacePlan:
    """Returns the plan of a race that nobody runs."""
    return RacePlan(
        schema_version=get_args(RacePlan.model_fields["schema_version"].annotation)[0],
        options=options,
        schedule=Schedule(repeats=len(STARTS), most_repeats=len(STARTS), timed_steps=NUM_STEPS, seconds=60),
        costs=None,
        entrants=entrants,
        run_options=[],
        diagnosis_options=[],
        left_out=[],
        command="launch/run.sh compare",
        race="r",
    )
