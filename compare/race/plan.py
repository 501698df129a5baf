"""Which runs a race consists of, and in which order they take place.

A race runs in blocks. In each block every entrant runs once, and the order is drawn anew for each block, so that what
the machine does in the course of an hour affects all entrants alike. Before the timed blocks, a diagnosis run of each
entrant is compared with runs of the reference, to see whether they compute the same. After the timed blocks, each
backend may train once to the end.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from backends.registry import REFERENCE
from compare.race.costs import Costs
from compare.race.options import RaceOptions
from compare.race.peers.table import PEER_PROGRAM
from compare.report.runs import Purpose, name_of_loop
from compare.results import RANKED, Role
from records.processor import SLOW_BF16

# Of what an entrant is called, in the name of a file. With all that stands before and behind it, also while the file is
# written, the name has less than 255 bytes, which is as much as most file systems take.
_MOST_CHARACTERS = 170


class Entrant(BaseModel):
    """One backend under one set of conditions.

    Attributes:
        backend: The backend, by its name or as "module:Class".
        num_processes: The number of its ranks.
        precision: The precision in which it computes.
        accumulation: Its gradient accumulation steps.
        global_batch_size: Samples of one optimizer step, over all ranks.
        role: What it stands for.
        variant: What tells it from other entrants of its backend, in words; "" if it is the backend as it comes.
        options: Options of a run that it alone has.
        variables: Environment variables that it alone has, with their values.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: str
    num_processes: int
    precision: str
    accumulation: int
    global_batch_size: int
    role: Role = "backend"
    variant: str = ""
    options: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """What a report calls it, beside the number of its ranks."""
        if self.role in ("limit", "peer"):  # no backend that a user could choose
            return self.variant
        adapter = f"{self.backend} ({self.variant})" if self.variant else self.backend
        return name_of_loop(adapter) if self.role == "bare" else adapter

    @property
    def own_settings(self) -> list[str]:
        """Its own options and variables, each as a user writes it."""
        return [*self.options, *(f"{name}={value}" for name, value in self.variables)]

    @property
    def rank_program(self) -> str:
        """The module that each of its ranks runs."""
        programs = {"bare": "compare.race.bare_rank", "peer": PEER_PROGRAM}
        return programs.get(self.role, "compare.race.rank")

    @property
    def micro_batch_size(self) -> int:
        """Samples of one forward pass of one rank."""
        return self.global_batch_size // (self.num_processes * self.accumulation)

    @property
    def divides(self) -> bool:
        """Whether the global batch is a whole number of micro-batches."""
        return self.micro_batch_size * self.num_processes * self.accumulation == self.global_batch_size

    @property
    def label(self) -> str:
        """The backend and its conditions, for people."""
        return (
            f"{self.name}, {self.num_processes} rank(s), {self.precision}, "
            f"{self.micro_batch_size} x {self.accumulation}"
        )


class PlannedRun(BaseModel):
    """One run of a race."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    entrant: Entrant
    purpose: Purpose
    block: int
    position: int
    heat: int = 0  # which part of its block it takes part in, where memory does not hold all

    @property
    def name(self) -> str:
        """The name of the run's files; purpose, block, position and heat make it unique."""
        who = self.entrant
        backend = re.sub(r"[^A-Za-z0-9]+", "-", who.name).strip("-")[:_MOST_CHARACTERS]
        conditions = f"{who.num_processes}x-{who.precision}-a{who.accumulation}-g{who.global_batch_size}"
        part = f"-h{self.heat}" if self.heat else ""
        return f"{self.purpose}-{self.block:03d}-{self.position:02d}-{backend}-{conditions}{part}"


def reference_of(entrant: Entrant) -> Entrant:
    """Returns one process on the whole batch, which must compute the same as the entrant."""
    return Entrant(
        backend=REFERENCE,
        num_processes=1,
        precision=entrant.precision,
        accumulation=1,
        global_batch_size=entrant.global_batch_size,
    )


def yardstick_of(entrant: Entrant) -> Entrant:
    """Returns the reference with the entrant's own micro-batches, which shows how large rounding errors are.

    If the entrant has the whole batch as one micro-batch, the yardstick has two micro-batches. If it has batches of
    another kind, so has the yardstick, since other kernels compute them.
    """
    accumulation = max(2, entrant.global_batch_size // entrant.micro_batch_size)
    update: dict[str, object] = {"accumulation": accumulation}
    for option in entrant.options:
        if option.startswith("--batching="):
            update |= {"options": (option,), "variant": option.removeprefix("--batching=")}
    return reference_of(entrant).model_copy(update=update)


class Schedule(BaseModel):
    """How the budget of a race is spent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    repeats: int = Field(description="how often each entrant is started, as expected")
    most_repeats: int = Field(description="how often at most, while there is time")
    timed_steps: int = Field(description="optimizer steps of each start")
    seconds: float = Field(description="how long the whole race is expected to take")


def draw_plan(
    entrants: list[Entrant], options: RaceOptions, *, repeats: int, costs: Costs | None = None
) -> list[PlannedRun]:
    """Returns all runs of a race in the order in which they take place.

    Args:
        entrants: Who takes part.
        options: What the user asks of the race.
        repeats: How often each entrant is started for timed runs.
        costs: What was measured on this machine, which tells how many fit into its memory together.
    """
    order = random.Random(options.order_seed)
    able = [entrant for entrant in entrants if entrant.role in RANKED]
    judged = [other for entrant in able for other in (reference_of(entrant), yardstick_of(entrant))]
    diagnosed = list(dict.fromkeys([*(entrant for entrant in judged if entrant.divides), *able]))
    runs = _block(diagnosed, "diagnosis", 0, order) if options.diagnosis else []
    for block in range(1, repeats + 1):
        drawn = _block(entrants, "timed", block, order)
        runs += [run for together in heats_of(drawn) for run in (_in_parts(together, costs) if costs else together)]
    if options.trains_to_the_end:
        # For each entrant and number of ranks, only the first conditions that the user asked for; beside peers, which
        # have no lockstep to rely on, each precision.
        whole = [entrant for entrant in entrants if entrant.role in (*RANKED, "peer")]
        firsts = {
            (entrant.name, entrant.num_processes, entrant.precision if options.peers else None): entrant
            for entrant in reversed(whole)
        }
        runs += _block(list(reversed(firsts.values())), "whole", repeats + 1, order)
    return runs


def heats_of(runs: list[PlannedRun]) -> list[list[PlannedRun]]:
    """Groups runs that take place together: the timed runs of a block under equal conditions; others are alone."""
    heats: dict[tuple[object, ...], list[PlannedRun]] = {}
    for run in runs:
        who = run.entrant
        conditions = (run.block, run.heat, who.precision, who.accumulation, who.global_batch_size)
        heats.setdefault(conditions if run.purpose == "timed" else (run,), []).append(run)
    return list(heats.values())


def _in_parts(runs: list[PlannedRun], costs: Costs) -> list[PlannedRun]:
    """Divides runs under equal conditions into heats whose entrants fit into memory together, all with one of them."""
    by_entrant = {run.entrant: run for run in runs}
    return [
        by_entrant[entrant].model_copy(update={"heat": heat})
        for heat, part in enumerate(costs.parts(list(by_entrant)))
        for entrant in part
    ]


def _block(entrants: list[Entrant], purpose: Purpose, block: int, order: random.Random) -> list[PlannedRun]:
    drawn = order.sample(entrants, len(entrants))
    return [
        PlannedRun(entrant=entrant, purpose=purpose, block=block, position=position)
        for position, entrant in enumerate(drawn)
    ]


class RacePlan(BaseModel):
    """What the directory of a race was made for; the same request resumes an interrupted race."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[8]  # without a default: plans of version 1 do not have the field
    options: RaceOptions
    schedule: Schedule
    costs: Costs | None
    entrants: list[Entrant]
    tuned: list[Entrant] = []
    core_slowdowns: dict[int, float] = {}  # by the number of ranks: how many times as long computing takes in caches
    run_options: list[str]
    diagnosis_options: list[str]
    left_out: list[str]
    slow_bf16: bool = False  # whether an entrant computes in bf16 on processors without instructions for it
    command: str
    race: str

    @property
    def remarks(self) -> list[str]:
        """What the user is told before the race begins, one line each."""
        return [*([f"bf16: {SLOW_BF16}"] if self.slow_bf16 else []), *self.left_out]

    def same_request(self, other: RacePlan) -> bool:
        """Tells whether both plans ask for the same runs."""
        names = {"options", "entrants", "run_options"}
        return self.model_dump(include=names) == other.model_dump(include=names)

    def runs(self) -> list[PlannedRun]:
        """Returns all runs in the order in which they take place, while there is time."""
        repeats = self.schedule.most_repeats
        return draw_plan([*self.entrants, *self.tuned], self.options, repeats=repeats, costs=self.costs)

    def arguments(self, run: PlannedRun, *, here: bool = False) -> list[str]:
        """Returns the command line of one run, without its output directory and its port.

        Args:
            run: The run.
            here: Only for the ranks that the race starts on this machine, without what starts those of others.
        """
        who = run.entrant
        arguments = [who.backend, *self.run_options, *who.options]  # the last of two options is the one that holds
        network = self.options.network
        nodes = (network.options_here if here else network.options)(who.num_processes)
        arguments += [f"--num-processes={who.num_processes}", *nodes]
        arguments += [f"--precision={who.precision}", f"--global-batch-size={who.global_batch_size}"]
        arguments += [f"--micro-batch-size={who.micro_batch_size}", "--save-every=never"]
        if run.purpose == "timed":
            arguments += [f"--max-steps={self.schedule.timed_steps}", "--no-evaluate"]
        elif run.purpose == "diagnosis":
            arguments += [f"--max-steps={self.options.diagnosis_steps}", "--diagnose", *self.diagnosis_options]
        return arguments

    def starting(self, run: PlannedRun, output_dir: Path) -> list[str]:
        """Returns the command line of one run that is started now, on this machine."""
        meeting = self.options.network.place_of_meeting(run.entrant.num_processes)
        return [*self.arguments(run), *meeting, f"--output-dir={output_dir}"]
