"""The runs that a report is made of: each run's record and, if a race made it, what the race wrote beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from compare.machine_facts import Machine
from compare.results import Role
from records.record import RunRecord
from records.throughput import NUM_WARMUP_STEPS, training_seconds

Purpose = Literal["timed", "diagnosis", "whole"]


class TurnFacts(BaseModel):
    """One turn of an entrant that took turns with others.

    All entrants of a heat take the same steps in the same round. A step begins when the last rank has ended the step
    before it, and ends when the last rank has.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    round: int = Field(ge=0, description="entrants are compared within a round; round 0 is the warm-up")
    position: int = Field(ge=0, description="place in the random order of its round, from 0")
    first_step: int = Field(ge=1, description="the first step that was timed")
    num_steps: int = Field(ge=1, description="how many steps were timed")
    step_seconds: list[float] = Field(
        min_length=1, description="wall time of each of these steps; on a GPU, of all of them in one value"
    )
    cpu_seconds: float = Field(ge=0, description="processor time of all threads of all ranks in these steps")
    instructions: int | None = Field(ge=0, description="their instructions in user mode; null where none are counted")
    foreign_share: float = Field(
        description="share of the machine's cores that other programs or the hypervisor took during the turn; it may "
        "lie below 0, since the kernel counts in hundredths of a second"
    )
    cores: list[int] = Field(
        default=[], description="the cores that its ranks were moved to for this turn; empty where they stay"
    )


class RaceFacts(BaseModel):
    """What a race knows of one of its runs. The file `NAME.race.json` beside the record `NAME.json` holds it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    schema_version: Literal[1] = 1
    kind: Literal["race"] = "race"
    race: str = Field(description="the same for all runs of a race")
    boot_id: str | None = Field(
        None, description="what tells the machine that ran the race from others, until it restarts"
    )
    purpose: Purpose
    entrant: str | None = Field(None, description="what the race calls the entrant; null: its backend")
    role: Role = Field("backend", description="what the entrant stands for")
    own_settings: list[str] | None = Field(
        None, description="options and variables that the entrant alone has, as a user writes them; null in older races"
    )
    block: int = Field(ge=0, description="runs of one block are compared in pairs")
    position: int = Field(ge=0, description="place in the random order of its block, from 0")
    heat: int = Field(
        default=0, ge=0, description="which part of its block it took turns in, where memory did not hold all"
    )
    busy_share: float = Field(ge=0, description="share of the machine's cores that were busy just before the run")
    gpu_processes: int = Field(ge=0, description="processes that used a GPU just before the run")
    foreign_share: float = Field(
        ge=0, description="share of the machine's cores that other programs or the hypervisor took during the run"
    )
    matmul_flops_per_second: float | None = Field(
        gt=0, description="what square matrix products reach on all cores in the precision of the run"
    )
    core_slowdown: float | None = Field(
        default=None,
        gt=0,
        description="how many times as long what needs no memory takes when as many cores are busy as ranks with their "
        "threads take, instead of one; null where it was not measured",
    )
    turns: list[TurnFacts] = Field(
        default_factory=list, description="what a timed run measured while it took turns with others"
    )


def name_of_loop(adapter: str) -> str:
    """Returns what a race calls the loop written by hand beside the adapter that it calls so."""
    return f"{adapter} (by hand)"


class TimedSteps(NamedTuple):
    """Consecutive steps of a run that were timed together.

    Attributes:
        first: The first of them, from 1.
        number: How many they are.
        seconds: Their wall time, for all ranks together: of each step, or of all of them in one value.
    """

    first: int
    number: int
    seconds: list[float]

    def of(self, values: Sequence[int]) -> int:
        """Sums the values of these steps, of which a record has one for each step of the run."""
        return sum(values[self.first - 1 : self.first - 1 + self.number])


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: What messages call it.
        record: What the run itself wrote.
        race: What the race wrote beside it; None for a run that no race started.
        machine: Where it took place, which `compare.report.machines.located` finds out.
    """

    name: str
    record: RunRecord
    race: RaceFacts | None
    machine: Machine | None = None

    @property
    def purpose(self) -> Purpose:
        """What the run was made for."""
        if self.race is not None:
            return self.race.purpose
        return "diagnosis" if self.record.config.diagnose else "timed"

    @property
    def entrant(self) -> str:
        """What the entrant is called."""
        return (self.race.entrant if self.race else None) or self.record.config.backend

    @property
    def role(self) -> Role:
        """What the entrant stands for."""
        return self.race.role if self.race else "backend"

    @property
    def timed_steps(self) -> list[TimedSteps]:
        """The steps that tell how fast the run was, without those that warm it up.

        They are the turns of an entrant that took turns, or else one span: all steps but the first ones.
        """
        if self.race is not None and self.race.turns:
            return [
                TimedSteps(turn.first_step, turn.num_steps, turn.step_seconds)
                for turn in self.race.turns
                if turn.round > 0
            ]
        seconds = training_seconds(self.record)
        number = len(self.record.steps) - NUM_WARMUP_STEPS
        return [TimedSteps(NUM_WARMUP_STEPS + 1, number, [seconds])] if seconds > 0 else []

    @property
    def is_usable(self) -> bool:
        """Whether the run completed and was timed from its beginning."""
        return self.record.status == "completed" and bool(self.record.ranks) and self.record.resumed_from is None

    @property
    def why_unusable(self) -> str:
        """Says why a run that is not usable is not."""
        if self.record.error is None and self.record.resumed_from is not None:
            step = self.record.resumed_from.step
            return f"it was resumed after step {step}, so that its time is not the time of a whole run"
        return str(self.record.error)


def spent(runs: Sequence[Run], what: Literal["cpu_seconds", "instructions"]) -> float | None:
    """Sums what the timed steps of runs cost the processor, over all ranks.

    Args:
        runs: The runs.
        what: The processor time in seconds, or the number of instructions in user mode.

    Returns:
        The sum; None where a part of it was not counted, or nothing was timed.
    """
    costs: list[float | None] = []
    for run in runs:
        if run.race is not None and run.race.turns:
            costs += [getattr(turn, what) for turn in run.race.turns if turn.round > 0]
        else:
            lists = [getattr(rank, f"step_{what}") for rank in run.record.ranks]
            costs += [sum(span.of(one) for one in lists) if all(lists) else None for span in run.timed_steps]
    counted = [cost for cost in costs if cost is not None]
    return sum(counted) if counted and len(counted) == len(costs) else None


def per_second(run: Run, what: Literal["samples", "tokens"]) -> float:
    """Returns the samples or the real tokens of all ranks in the timed steps, divided by their time."""
    done = sum(span.of(getattr(rank, what)) for span in run.timed_steps for rank in run.record.ranks)
    return done / sum(sum(span.seconds) for span in run.timed_steps)


def race_file(record: Path) -> Path:
    """Returns where a race writes what it knows of the run with this record."""
    return record.with_name(f"{record.stem}.race.json")
