"""The options of a race."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from backends.devices import count_gpus
from compare.networks import EngineName, Hosts, Limit, RaceNetwork
from compare.race.peers.table import PEERS
from compare.results import MIN_PAIRS
from launch.comma_lists import CommaList, Names, Numbers
from launch.quantities import Duration, Share
from records.config import DEFAULT_CPU_PROCESSES, BatchSize, Precision, ProcessCount

_MAX_RUNS = 10_000


class RaceOptions(BaseModel):
    """What a user may ask of a race; all other options are those of every run."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    backends: Names | None = Field(None, description="who takes part, separated by commas (default: all that run here)")
    entrant: list[str] = Field(
        default=[],
        description='one more entrant, with options or variables of its backend: "horovod:HOROVOD_CYCLE_TIME=5", or '
        '"fast=apex:--opt-level O2" to name it; may be given several times',
        json_schema_extra={"each": "[NAME=]BACKEND:OPTIONS"},
    )
    tune: bool = Field(
        False, description="also race each backend with the fastest settings that a search among a few of them finds"
    )
    limits: bool = Field(
        True,
        description="also race what is possible here: ranks that do not communicate, one process with all cores or on "
        "one GPU",
    )
    bare: bool = Field(
        False,
        description="also race a loop written by hand for each library: what do Lockstep's loop and adapter cost?",
    )
    peers: Names | None = Field(
        None, description=f"also race trainers of other libraries, separated by commas: {', '.join(PEERS)}"
    )
    peer_accuracy: bool = Field(
        True, description="with --peers, train each entrant once, for one epoch by default, to see what it reaches"
    )
    budget: Duration = Field(
        default_factory=lambda: 600.0,
        description="how long the whole race may take, such as 90s, 10min or 2h (default: 10min, or what three starts "
        "of each entrant need)",
    )
    until: Share | None = Field(
        None, description="end as soon as every difference is known this well, such as 1% (needs three starts)"
    )
    repeats: int | None = Field(
        None, ge=1, le=1000, description="how often each entrant is started, at least 3 (default: as the budget allows)"
    )
    num_processes: Numbers[ProcessCount] = Field(
        default_factory=lambda: sorted({1, count_gpus() or DEFAULT_CPU_PROCESSES}),
        description="numbers of ranks, separated by commas; single runs with one "
        "(default: 1 and one per GPU; without a GPU 1 and 2)",
    )
    precision: CommaList[Precision] = Field(["fp32"], description="precisions, separated by commas")
    engine: EngineName = None
    bandwidth: Limit = None
    hosts: Hosts = None
    accumulation: Numbers[Annotated[int, Field(ge=1, le=1024)]] = Field(
        [1], description="gradient accumulation steps, separated by commas"
    )
    global_batch_size: BatchSize = Field(32, description="samples of one optimizer step, over all ranks")
    weak_scaling: bool = Field(False, description="also grow the global batch with the number of ranks")
    timed_steps: int | None = Field(
        None, ge=10, le=10**9, description="optimizer steps of each start (default: as the budget allows)"
    )
    diagnosis: bool = Field(
        True,
        description="first run each entrant alone: where the time of a step goes, and whether all compute the same",
    )
    diagnosis_steps: int = Field(25, ge=10, le=1000, description="optimizer steps of a diagnosis run")
    whole_runs: bool = Field(False, description="train each backend once to the end: curves and time to accuracy")
    target_accuracy: float = Field(0.9, gt=0, le=1, description="the report gives the time until this accuracy")
    collectives: bool = Field(True, description="also time each library's all-reduce and other collectives")
    wait_for_idle: bool = Field(
        True,
        description="wait for an idle machine before each start, and repeat runs that take place alone, such as a "
        "diagnosis, if other programs disturbed them",
    )
    placement: bool = Field(
        True,
        description="bind each rank to cores of its own, offer it huge pages and keep scattered memory from it, so "
        "that two starts of one program differ less",
    )
    order_seed: int = Field(0, ge=0, lt=2**32, description="seed of the order of starts and of turns")

    @field_validator("repeats")
    @classmethod
    def _can_be_compared(cls, repeats: int | None) -> int | None:
        if repeats is not None and repeats < MIN_PAIRS:
            raise ValueError(f"entrants that are started fewer than {MIN_PAIRS} times cannot be compared; ask for more")
        return repeats

    @property
    def network(self) -> RaceNetwork:
        """Where the ranks are started."""
        return RaceNetwork(self.engine, self.bandwidth, self.hosts)

    @property
    def trains_to_the_end(self) -> bool:
        """Whether each entrant also trains once to the end."""
        return self.whole_runs or (self.peers is not None and self.peer_accuracy)

    @model_validator(mode="after")
    def _has_a_network(self) -> RaceOptions:
        _ = self.network
        peers = f"--peers {','.join(self.peers or ())}"
        for option, is_given in (("--tune", self.tune), (peers, self.peers is not None)):
            if self.engine is not None and is_given:
                raise ValueError(f"{option}: cannot race on --engine {self.engine}; leave one of the two out")
        return self

    @model_validator(mode="after")
    def _has_an_end(self) -> RaceOptions:
        cells = len(self.num_processes) * len(self.precision) * len(self.accumulation) * (1 + self.weak_scaling)
        if self.repeats is not None and cells * self.repeats > _MAX_RUNS:
            raise ValueError(
                f"--repeats {self.repeats}: {self.repeats} repeats of {cells} combinations exceed the limit of "
                f"{_MAX_RUNS} runs; ask for fewer"
            )
        return self
