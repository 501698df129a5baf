"""What a comparison found: the content of results.json, from which every form of the report is made.

Times are in seconds and sizes in bytes; shares and ratios are plain numbers (0.04 is 4 %).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from compare.machine_facts import Idleness, Machine, Place
from compare.steps import Breakdown, HeldMemory, Wire
from compare.strict import OfBackend
from compare.strict import Strict as _Strict
from parity.verdict import Parity

RESULTS_NAME = "results.json"
# What an entrant stands for: a backend; the same training in one process with all cores, or on one GPU; what is
# possible at most, since its ranks do not communicate; a loop written by hand; another library's trainer.
Role = Literal["backend", "alternative", "limit", "bare", "peer"]
Setting = str | int | float | bool | None
# How the name of a setting begins that was asked for, beside what is in force.
ASKED = "asked_"
# The roles of entrants that must compute what the reference computes, and are then ranked.
RANKED: tuple[Role, ...] = ("backend", "alternative")
# Entrants that were started together less often are not compared.
MIN_PAIRS = 3
# A race spends a larger budget on longer starts rather than on more of them than this.
SETTLED_STARTS = 10
# A race should be able to show this difference in time.
TARGET = 0.05
# Differences of no more than this are never claimed.
SMALLEST_CLAIM = 0.005
# If other programs take a larger share of the cores than this, they disturb a race.
DISTURBED_SHARE = 0.05


class Interval(_Strict):
    """An estimate with its confidence interval, or without one if there were too few runs."""

    estimate: float
    low: float | None = None
    high: float | None = None


class Group(_Strict):
    """What the runs that are compared with each other have in common."""

    task: str = Field(description="task, model, data and everything else that decides what is computed, in words")
    device: str
    num_processes: int
    precision: str
    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    seed: int
    key: str = Field(description="short, unique in this report, for a heading: '2 ranks, bf16, batch 32 = 2 x 4 x 4'")
    machine: str | None = Field(default=None, description="label of the machine; null if the report is about one only")
    conditions: dict[str, Any] = Field(
        default={}, description="all options and facts about data and model that the runs have in common"
    )


class Entrant(_Strict):
    """One entrant within one group: all its runs."""

    name: str = Field(description="what the report calls it; unique in its group")
    backend: str
    role: Role = Field("backend", description="what it stands for; only backends and alternatives are ranked")
    own_settings: list[str] | None = Field(
        default=None, description="options and variables it alone has; null: unknown"
    )
    num_runs: int = Field(description="completed timed runs")
    failures: list[str] = Field(description="one line for each run that failed")
    parity: Parity
    ranked: bool = Field(description="whether it may take part in claims: in lockstep, and measured")
    samples_per_second: Interval | None
    tokens_per_second: Interval | None
    samples_per_second_of_runs: list[float] = Field(description="one for each timed run, by block")
    step_seconds: list[list[float]] = Field(description="every step of every timed run after warm-up, slowest rank")
    median_step_seconds: float | None
    p95_step_seconds: float | None
    mean_step_cpu_seconds: float | None = Field(
        default=None, description="processor time of all threads of all ranks in a step, as a mean over timed steps"
    )
    mean_step_instructions: float | None = Field(default=None, description="of all ranks, user mode; null: unknown")
    seconds_to_first_step: list[float]
    peak_memory_bytes: int | None = Field(description="largest resident set of a rank")
    peak_cuda_memory_bytes: int | None
    mfu: float | None = Field(description="model FLOP utilisation, where the device's peak is known")
    settings: dict[str, Setting] = Field(
        description="in force, read back from the running processes; a name that begins with asked_ was asked for"
    )
    breakdown: Breakdown | None = None
    wire: Wire | None = None
    excess: float | None = Field(default=None, description="bytes that it sends, over those that its gradients need")
    shares_of_long_steps: list[float] = Field(
        default=[], description="for each start, the share of its time that rare long steps take beyond the usual"
    )
    memory: HeldMemory | None = None


Claim = Literal["slower", "faster", "none", "too few"]


class Spread(_Strict):
    """Why the starts of a pair differ: standard deviations of the mean of one start, where 0.01 is one per cent."""

    turns: float = Field(description="the part that is due to its turns, which more turns reduce")
    starting: float = Field(
        description="the part that is due to starting, which only more starts average out; the same for all pairs of a "
        "group, but for one whose starts clearly differ more"
    )


class Comparison(_Strict):
    """Two entrants of a group, named `first` and `second`, compared in pairs of turns or runs of the same block."""

    first: str
    second: str
    num_pairs: int
    slowdown: Interval | None = Field(description="time of second over time of first, minus 1")
    claim: Claim = Field(description="what may be said of the second")
    text: str = Field(description="the sentence for people")
    detectable: float | None = Field(description="smallest difference that 4 races of 5 would claim")
    more_repeats: int | None = Field(description="how many more repeats would detect the target difference")
    spread: Spread | None = Field(default=None, description="null where starts have a single value, or are too few")


class GroupResult(_Strict):
    """One group: who took part, and who is faster than whom."""

    group: Group
    entrants: list[Entrant]
    comparisons: list[Comparison]
    differing_settings: list[str] = Field(description="names of `settings` in which entrants differ")


class Placing(_Strict):
    """One entrant of a standing."""

    label: str = Field(description="the entrant and the number of ranks")
    name: str = Field(description="the name of the entrant in its group")
    group: str = Field(description="the key of its group")
    num_processes: int
    samples_per_second: Interval
    longer: Interval | None = Field(
        description="time of a step, relative to the opponent's: 0.1 is a tenth longer; null for the opponent, and "
        "where both were started together too seldom"
    )
    claim: Claim | None = Field(description="what may be claimed of it; null for the opponent")
    detectable: float | None = Field(
        default=None, description="smallest difference from the opponent that 4 races of 5 would claim"
    )
    spread: Spread | None = Field(
        default=None, description="why starts differ beside the opponent; null where that is not known"
    )

    @property
    def relative(self) -> float | None:
        """The time of a step where that of the opponent is 1; None if it is not known."""
        if self.claim is None:
            return 1.0
        return None if self.longer is None else 1 + self.longer.estimate


class Standing(_Strict):
    """All backends that did the same work, whatever their number of ranks, compared with one of them.

    The opponent is the one that a user named, or else the fastest with the most ranks under the first conditions.
    """

    conditions: str = Field(description="precision, batch and accumulation in words")
    network: str | None = Field(default=None, description="what connects nodes, in words; null: all ranks are on one")
    opponent: str = Field(description="the label of the entrant that all others are compared with")
    num_starts: int = Field(description="how often the opponent was started")
    num_disturbed: int = Field(default=0, description="further starts, which do not count, as they were disturbed")
    num_turns: int = Field(description="how many turns each pair took, over all starts; 0 if they took none")
    core_slowdown: float | None = Field(
        default=None,
        description="how many times as long what needs no memory takes on as many busy cores as the opponent has, "
        "instead of those of the fewest ranks; null where it was not measured",
    )
    placings: list[Placing] = Field(description="the opponent first, then by the number of ranks and the speed")
    limits: list[Placing] = Field(
        default=[], description="the same work without communication: what is possible on this machine"
    )
    approximations: list[Placing] = Field(
        default=[], description="entrants that compute an approximation on purpose, and are not ranked"
    )

    @property
    def rivals(self) -> list[Placing]:
        """The entrants with as many ranks as the opponent, the opponent first."""
        return [one for one in self.placings if one.num_processes == self.placings[0].num_processes]

    @property
    def base(self) -> Placing | None:
        """The fastest entrant with the fewest ranks; None if the opponent has as few."""
        fewest = min(one.num_processes for one in self.placings)
        if fewest == self.placings[0].num_processes:
            return None
        return next(one for one in self.placings if one.num_processes == fewest)

    @property
    def undecided(self) -> list[Placing]:
        """Those of whom it was not shown whether they are faster than the opponent: its rivals, and the base."""
        asked = self.rivals if self.base is None else [*self.rivals, self.base]
        return [one for one in asked if one.claim in ("none", "too few")]

    @property
    def detectable(self) -> float | None:
        """The smallest difference that would have been found where none was; None if all are decided or none can be."""
        return max((one.detectable for one in self.undecided if one.detectable is not None), default=None)


class PeerRow(_Strict):
    """A peer, or the backend that peers are compared with."""

    name: str
    failures: list[str] = Field(description="one line for each run that failed")
    tokens_per_second: Interval | None = Field(description="real tokens, padding left out")
    positions_per_token: float | None = Field(description="positions computed for each real token")
    cpu_seconds_per_token: float | None = Field(default=None, description="of all ranks; null where not recorded")
    instructions_per_token: float | None = Field(default=None, description="of all ranks, user mode; null: unknown")
    longer: Interval | None = Field(
        description="time for a real token relative to the opponent's, minus 1; null for the opponent"
    )
    claim: Claim | None = Field(description="what may be claimed of it; null for the opponent")
    metrics: dict[str, float | None] = Field(description="after training to the end once; empty if it did not")


class PeerComparison(_Strict):
    """Trainers of other libraries, beside the ranked backends."""

    group: str = Field(description="key of the group of these backends")
    opponent: str | None = Field(description="that of all others, or the fastest backend; null if none was ranked")
    num_starts: int = Field(description="how often a peer was started together with the opponent")
    num_epochs: int = Field(description="passes over the training samples of a run to the end")
    rows: list[PeerRow] = Field(description="the opponent first")
    others: list[Comparison] = Field(default=[], description="other ranked backends beside each peer, by real tokens")


class AdapterCost(_Strict):
    """An adapter beside a loop written by hand with its library: how much more it takes, where 0.01 is one per cent."""

    group: str = Field(description="key of the group")
    name: str = Field(description="the entrant whose adapter this is")
    num_starts: int = Field(description="how often both were started together")
    samples_per_second: Interval | None = Field(default=None, description="of the adapter")
    bare_samples_per_second: Interval | None = Field(default=None, description="of the loop by hand")
    time: Interval | None = Field(description="of a step; null with fewer starts than a comparison needs")
    cpu_seconds: float | None = Field(description="of all threads of all ranks, in the same steps")
    cpu_seconds_interval: Interval | None = Field(default=None, description="as a mean of starts; null if too few")
    instructions: float | None = Field(description="in user mode, in the same steps; null where none were counted")
    instructions_interval: Interval | None = Field(default=None, description="likewise, of instructions")


class Curve(_Strict):
    """One run trained to its end; lists of equal length for steps, and for evaluations."""

    group: str = Field(description="key of the group")
    backend: str
    steps: list[int]
    losses: list[float | None]
    seconds: list[float] = Field(description="training time at the end of each step, evaluations left out")
    evaluation_steps: list[int]
    evaluation_seconds: list[float]
    metrics: dict[str, list[float | None]]
    target: float | None = Field(description="the accuracy whose time is reported")
    seconds_to_target: float | None = Field(description="training time until an evaluation reached it, if one did")
    total_seconds: float = Field(description="the whole job, start-up and evaluations included")
    positive_label: str | None = Field(None, description="the class that f1 and roc_auc are about, where it is one")


class SeedRow(_Strict):
    """One row of the table that published comparisons of backends consist of."""

    hardware: str
    backend: str
    train_seconds: float
    f1: float | None
    macro_f1: float | None = None
    roc_auc: float | None
    accuracy: float | None
    batch_size: str
    positive_label: str | None = Field(None, description="the class that f1 and roc_auc are about, where it is one")


class ScalingPoint(_Strict):
    """One world size on a line of scaling."""

    num_processes: int
    samples_per_second: Interval
    efficiency: float = Field(description="of N times the smallest world's throughput for each of its ranks")


class Scaling(_Strict):
    """Throughput over the number of ranks: strong (same global batch) or weak (same batch for each rank)."""

    backend: str = Field(description="by the name that it has in the race")
    kind: Literal["strong", "weak"]
    condition: str = Field(description="precision, batch and accumulation in words")
    points: list[ScalingPoint]


class CollectivePoint(_Strict):
    """One collective at one size."""

    bytes: int
    seconds: list[float] = Field(description="every repetition of every start, slowest rank")
    median_seconds: float
    algbw: float = Field(description="bytes over time, as nccl-tests defines it")
    busbw: float = Field(description="algbw times the operation's factor, as nccl-tests defines it")


class CollectiveFit(_Strict):
    """time = latency + bytes / bandwidth."""

    latency_seconds: Interval
    bytes_per_second: Interval


class CollectiveSeries(OfBackend):
    """One library's path for one operation in one world."""

    transport: str
    operation: str
    num_processes: int
    device: str
    points: list[CollectivePoint]
    fit: CollectiveFit | None
    machine: Machine | None = Field(default=None, description="where it was measured; null in older results")
    network: str | None = Field(default=None, description="limit of each node, such as 1gbit; null: all on one node")


GateStatus = Literal["passed", "slower", "too few", "missing", "not in lockstep", "lockstep not known", "new"]


class GateRow(_Strict):
    """One entrant beside itself in the baseline."""

    entrant: str = Field(description="its name and the key of its group")
    status: GateStatus
    text: str = Field(description="the sentence for people")
    baseline: Interval | None = Field(description="samples a second then")
    now: Interval | None = Field(description="samples a second now")
    change: Interval | None = Field(description="time of a sample now over its time then, minus 1")
    relative_change: Interval | None = Field(description="change of its time over that of one process; null without it")
    detectable: float | None = Field(description="smallest difference with which 4 races of 5 would not pass")


class Gate(_Strict):
    """Whether a race passes beside its baseline, an earlier race."""

    baseline: str = Field(description="when the baseline was made, and from what commit")
    fail_above: float = Field(description="how much slower an entrant may be")
    passed: bool
    differences: list[str] = Field(description="in what the baseline differs, one line each, though it was used")
    rows: list[GateRow]


class Results(_Strict):
    """Everything the report shows."""

    schema_version: Literal[1] = 1
    title: str
    created_at: str = Field(description="ISO 8601, UTC")
    verdict: list[str] = Field(description="sentences, the most important first")
    groups: list[GroupResult]
    standings: list[Standing] = Field(default_factory=list)
    peers: list[PeerComparison] = Field(default_factory=list)
    adapter_costs: list[AdapterCost] = Field(default_factory=list)
    curves: list[Curve]
    seed_table: list[SeedRow]
    scaling: list[Scaling]
    collectives: list[CollectiveSeries]
    places: list[Place]
    idleness: Idleness | None = Field(default=None, description="null where no race has watched the machine")
    problems: list[str] = Field(description="what could not be used or compared, one line each")
    commands: dict[str, str] = Field(description="the commands that reproduce the parts of the report")
    facts: dict[str, Any] = Field(description="how the race was run: blocks, warm-up, confidence, order seed")
    gate: Gate | None = Field(default=None, description="null without a baseline")


def read_results(path: Path) -> Results:
    """Reads and validates a file of results.

    Raises:
        OSError, ValueError: The file cannot be read, or does not hold results of this version.
    """
    return Results.model_validate_json(path.read_bytes())


if __name__ == "__main__":
    # python -m compare.results > compare/results.schema.json
    print(json.dumps(Results.model_json_schema(), indent=1))
