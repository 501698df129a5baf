"""What a forecast says: the content of its .json file, from which the tables and the page are made."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from math import ceil
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from compare.results import Interval
from compare.strict import OfBackend, Strict
from forecast.advice import advice
from forecast.algorithms import ALGORITHMS, Algorithm
from forecast.scenario import ENDS, Scenario, Variant, enclosing
from forecast.sending import WAYS, Way

_SECONDS_OF_AN_HOUR = 3600


def _without_ends(value: object) -> object:
    return {"estimate": value} if isinstance(value, (int, float)) else value


Estimated = Annotated[Interval, BeforeValidator(_without_ends)]
"""An interval, which files of version 1 have as its estimate alone."""


class Row(Strict):
    """The forecast for one number of ranks."""

    ranks: int
    step_seconds: Interval = Field(description="its ends: all inputs at their best and at their worst at once")
    computing_seconds: float
    exposed_seconds: Estimated = Field(
        description="communication that the backward pass does not hide; its ends: computing at its longest with "
        "all-reduces at their shortest, and the other way round"
    )
    waiting_seconds: float = Field(description="for the slowest rank")
    remainder_seconds: float = Field(
        default=0.0, description="what ranks that shared the profiled machine took beyond the model; may be negative"
    )
    efficiency: Interval = Field(description="speed, over that of one rank times the number of ranks")
    epoch_seconds: Estimated = Field(description="its ends follow from those of the step")
    cost_per_epoch: Estimated | None = Field(description="its ends follow from those of the step")
    by_algorithm: dict[str, float] = Field(description="efficiency if all-reduces were made so")
    by_sending: dict[str, float] = Field(description="efficiency if gradients were sent so")


class Forecast(OfBackend):
    """One training on one network."""

    network: str
    network_measured: bool = Field(default=False, description="whether its all-reduces were measured, not only stated")
    algorithm: Algorithm
    sending: Way
    ranks_per_node: int
    is_as_profiled: bool | None = Field(
        default=None,
        description="whether ranks send as they did in the profile, and share its machine; null in older files",
    )
    has_own_machines: bool | None = Field(
        default=None,
        description="whether ranks send as they did in the profile, each alone on such a machine; null in older files",
    )
    samples_per_rank: int
    gradient_bytes: int | None = Field(default=None, description="of all gradients; null in older files")
    one_rank_seconds: float = Field(description="a step of one rank")
    rows: list[Row]
    advice: list[str]
    remarks: list[str] = Field(description="what was assumed")

    @property
    def place(self) -> str:
        """The network, and whether it was measured."""
        return f"{self.network}, measured" if self.network_measured else self.network


class ForecastFile(Strict):
    """A set of forecasts, made before what they forecast."""

    schema_version: Literal[1, 2] = Field(
        default=2, description="1: exposed communication, epochs and costs are numbers, without ends"
    )
    kind: Literal["forecast"] = "forecast"
    created_at: str
    command: str
    forecasts: list[Forecast]


def forecast_file(command: str, forecasts: list[Forecast]) -> ForecastFile:
    """Returns forecasts with the date of now."""
    created_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return ForecastFile(created_at=created_at, command=command, forecasts=forecasts)


def forecast(scenario: Scenario, variant: Variant, ranks: list[int], cost_per_hour: float | None) -> Forecast:
    """Returns what a training would take.

    Args:
        scenario: The training and the network.
        variant: How it communicates.
        ranks: The numbers of ranks.
        cost_per_hour: What a rank costs in an hour, in any currency.

    Raises:
        NotMeasured: The profile lacks something.
    """
    profile = scenario.profile
    sends_as_profiled = variant == Variant("ring", profile.sending)
    return Forecast(
        backend=profile.backend,
        own_options=profile.own_options,
        network=scenario.name or scenario.network.text,
        network_measured=bool(scenario.measured),
        algorithm=variant.algorithm,
        sending=variant.sending.way,
        ranks_per_node=scenario.ranks_per_node,
        is_as_profiled=sends_as_profiled and scenario.same_machine,
        has_own_machines=sends_as_profiled and scenario.ranks_have_own_machines,
        samples_per_rank=profile.samples_per_rank,
        gradient_bytes=sum(gradient.num_bytes for gradient in profile.gradients),
        one_rank_seconds=scenario.work.seconds,
        rows=list(_rows(scenario, variant, ranks, cost_per_hour)),
        advice=advice(scenario, variant, ranks[-1]),
        remarks=scenario.remarks,
    )


def _rows(scenario: Scenario, variant: Variant, ranks: list[int], cost_per_hour: float | None) -> Iterator[Row]:
    profile = scenario.profile
    ways = {**WAYS, variant.sending.way: variant.sending}
    for number in ranks:
        step, step_seconds = scenario.step(variant, number), scenario.step_interval(variant, number)
        epoch = _scaled(step_seconds, ceil(profile.num_samples / (number * profile.samples_per_rank)))
        cost = None if cost_per_hour is None else _scaled(epoch, number * cost_per_hour / _SECONDS_OF_AN_HOUR)
        yield Row(
            ranks=number,
            step_seconds=step_seconds,
            computing_seconds=step.computing,
            exposed_seconds=scenario.exposed_interval(variant, number),
            waiting_seconds=step.waiting,
            remainder_seconds=step.remainder,
            efficiency=enclosing(*(scenario.efficiency(variant, number, end) for end in ENDS)),
            epoch_seconds=epoch,
            cost_per_epoch=cost,
            by_algorithm={name: scenario.efficiency(variant._replace(algorithm=name), number) for name in ALGORITHMS},
            by_sending={
                way: scenario.efficiency(variant._replace(sending=sending), number) for way, sending in ways.items()
            },
        )


def _scaled(value: Interval, factor: float) -> Interval:
    low, high = (None if end is None else factor * end for end in (value.low, value.high))
    return Interval(estimate=factor * value.estimate, low=low, high=high)
