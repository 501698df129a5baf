"""Which runs make a race, and in which order.

Blocks are rounds in which every entrant runs once, in an order drawn anew for each: what the machine
does in the course of an hour then falls on all of them alike. Before the timed blocks each entrant
is diagnosed, beside the reference that it must be in lockstep with; after them each backend may
train once to the end.
"""

from __future__ import annotations

import random
import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from backends.devices import count_gpus
from backends.interface import PRECISIONS
from records.config import DEFAULT_CPU_PROCESSES

Purpose = Literal["timed", "diagnosis", "whole"]

_MOST_RUNS = 10_000


class RaceOptions(BaseModel):
    """What a user may ask of a race; all other options are those of every run."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    backends: list[str] | None = Field(None, description="who takes part, by commas (default: all that run here)")
    repeats: int = Field(5, ge=1, le=1000, description="timed runs of each, one a block")
    num_processes: list[int] = Field(
        default_factory=lambda: [count_gpus() or DEFAULT_CPU_PROCESSES],
        description="numbers of ranks, by commas; single runs with one (default: one per GPU; without GPU 2)",
    )
    precision: list[str] = Field(["fp32"], description="precisions, by commas")
    accumulation: list[int] = Field([1], description="gradient accumulation steps, by commas")
    global_batch_size: int = Field(32, ge=1, le=10**9, description="samples of one optimizer step, over all ranks")
    weak_scaling: bool = Field(False, description="also grow the global batch with the number of ranks")
    timed_steps: int = Field(100, ge=10, le=10**9, description="optimizer steps of a timed run, warm-up included")
    diagnosis_steps: int = Field(25, ge=10, le=1000, description="optimizer steps of a diagnosis run")
    whole_runs: bool = Field(True, description="train each backend once to the end: curves and time to accuracy")
    target_accuracy: float = Field(0.9, gt=0, le=1, description="the accuracy whose time is reported")
    collectives: bool = Field(True, description="also measure the libraries' collectives")
    wait_for_idle: bool = Field(
        True, description="wait for an idle machine before each run, and repeat runs that others disturbed"
    )
    order_seed: int = Field(0, ge=0, lt=2**32, description="draws the order of runs within blocks")

    @field_validator("backends", "num_processes", "precision", "accumulation", mode="before")
    @classmethod
    def _by_commas(cls, value: object) -> object:
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    @field_validator("num_processes", "accumulation")
    @classmethod
    def _positive(cls, values: list[int]) -> list[int]:
        if not values or min(values) < 1 or max(values) > 1024:
            raise ValueError("give numbers from 1 to 1024, by commas")
        return sorted(set(values))

    @field_validator("precision")
    @classmethod
    def _known(cls, values: list[str]) -> list[str]:
        if not values or not set(values) <= set(PRECISIONS):
            raise ValueError(f"choose of {', '.join(PRECISIONS)}, by commas")
        return list(dict.fromkeys(values))

    @field_validator("backends")
    @classmethod
    def _named(cls, values: list[str] | None) -> list[str] | None:
        if values is not None and not all(values):
            raise ValueError("an empty name; give names of backends, by commas")
        return list(dict.fromkeys(values)) if values is not None else None

    @model_validator(mode="after")
    def _not_endless(self) -> RaceOptions:
        cells = len(self.num_processes) * len(self.precision) * len(self.accumulation) * (1 + self.weak_scaling)
        if cells * self.repeats > _MOST_RUNS:
            raise ValueError(f"--repeats {self.repeats} of {cells} combinations would take weeks; ask for less")
        return self


class Entrant(BaseModel):
    """One backend under one set of conditions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: str
    num_processes: int
    precision: str
    accumulation: int
    global_batch_size: int

    @property
    def micro_batch_size(self) -> int:
        return self.global_batch_size // (self.num_processes * self.accumulation)

    @property
    def divides(self) -> bool:
        """Whether the global batch is a whole number of micro-batches."""
        return self.micro_batch_size * self.num_processes * self.accumulation == self.global_batch_size

    @property
    def label(self) -> str:
        return (
            f"{self.backend}, {self.num_processes} rank(s), {self.precision}, "
            f"{self.micro_batch_size} x {self.accumulation}"
        )


class PlannedRun(BaseModel):
    """One run of a race."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    entrant: Entrant
    purpose: Purpose
    block: int
    position: int

    @property
    def name(self) -> str:
        """Fit for a file."""
        who = self.entrant
        backend = re.sub(r"[^A-Za-z0-9]+", "-", who.backend)
        conditions = f"{who.num_processes}x-{who.precision}-a{who.accumulation}-g{who.global_batch_size}"
        return f"{self.purpose}-{self.block:03d}-{self.position:02d}-{backend}-{conditions}"


def reference_of(entrant: Entrant) -> Entrant:
    """The single process on the whole batch that the entrant must be in lockstep with."""
    return entrant.model_copy(update={"backend": "single", "num_processes": 1, "accumulation": 1})


def yardstick_of(entrant: Entrant) -> Entrant:
    """The single process again, on the entrant's own micro-batches: how far rounding alone leads away.

    Where the whole batch is the entrant's one micro-batch, halves of it.
    """
    accumulation = entrant.global_batch_size // entrant.micro_batch_size
    return reference_of(entrant).model_copy(update={"accumulation": max(2, accumulation)})


def draw_plan(entrants: list[Entrant], options: RaceOptions) -> list[PlannedRun]:
    """Returns all runs of a race in their order."""
    order = random.Random(options.order_seed)
    judged = [other for entrant in entrants for other in (reference_of(entrant), yardstick_of(entrant))]
    diagnosed = list(dict.fromkeys([*(entrant for entrant in judged if entrant.divides), *entrants]))
    runs = _block(diagnosed, "diagnosis", 0, order)
    for block in range(1, options.repeats + 1):
        runs += _block(entrants, "timed", block, order)
    if options.whole_runs:
        # One condition of each backend and number of ranks, the first that was asked for.
        firsts = {(entrant.backend, entrant.num_processes): entrant for entrant in reversed(entrants)}
        runs += _block(list(reversed(firsts.values())), "whole", options.repeats + 1, order)
    return runs


def _block(entrants: list[Entrant], purpose: Purpose, block: int, order: random.Random) -> list[PlannedRun]:
    drawn = order.sample(entrants, len(entrants))
    return [
        PlannedRun(entrant=entrant, purpose=purpose, block=block, position=position)
        for position, entrant in enumerate(drawn)
    ]
