"""The options of a forecast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from forecast.algorithms import Algorithm
from forecast.network import parse_network
from forecast.sending import Way
from launch.comma_lists import Numbers

_FORMATS = (".html", ".json")
_MOST_RANKS = 10**6


class ForecastOptions(BaseModel):
    """What a user may ask of a forecast."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    profile: list[Path] = Field(
        default=[],
        description="what forecast profile has made: the file, or its directory; may be given several times",
        json_schema_extra={"each": "PATH"},
    )
    record: list[Path] = Field(
        default=[],
        description="instead, the record of a run with --diagnose, or its directory, with less in it; may be given "
        "several times",
        json_schema_extra={"each": "PATH"},
    )
    network: list[str] = Field(
        default=[],
        description="what connects the nodes: 25gbit,latency=20us, and with several ranks on a node "
        "local=200gbit,local-latency=5us; or a file of launch/run.sh allreduce; may be given several times",
        json_schema_extra={"each": "NETWORK"},
    )
    ranks: Numbers[Annotated[int, Field(ge=1, le=_MOST_RANKS)]] = Field(
        [8, 64, 512], description="numbers of ranks, separated by commas"
    )
    ranks_per_node: int = Field(1, ge=1, le=1024, description="ranks of a node, which share its link")
    algorithm: Algorithm = Field("ring", description="how an all-reduce is made")
    sending: Way | None = Field(
        None,
        description="how gradients are sent: in buckets as by DDP, through a fusion buffer as by Horovod, or as a "
        "whole after the backward pass (default: as the profiled backend does)",
    )
    same_machine: bool = Field(
        False, description="all ranks share the profiled machine, and compute as slowly as so many processes did there"
    )
    slow_down_of_computing: float | None = Field(
        None, ge=1, le=1e6, description="how many times as long computing takes as in one process (default: measured)"
    )
    cost_per_hour: float | None = Field(
        None, gt=0, le=1e9, description="what a rank costs in an hour, in any currency: adds the cost of an epoch"
    )
    output: Path | None = Field(None, description="also write the forecast to this file, a new .html or .json")

    @field_validator("network")
    @classmethod
    def _are_networks(cls, networks: list[str]) -> list[str]:
        for network in networks:
            if not is_file(network):
                parse_network(network)
        return networks

    @field_validator("output")
    @classmethod
    def _has_format(cls, output: Path | None) -> Path | None:
        if output is not None and output.suffix not in _FORMATS:
            raise ValueError("is neither .html nor .json; choose one of these")
        return output

    @model_validator(mode="after")
    def _fits_together(self) -> ForecastOptions:
        if not self.profile and not self.record:
            raise ValueError("--profile is missing; name what launch/run.sh forecast profile BACKEND has made")
        if not self.network:
            raise ValueError("--network is missing; write it as --network 25gbit,latency=20us")
        if self.same_machine and self.slow_down_of_computing is not None:
            raise ValueError("--slow-down-of-computing: --same-machine measures it; leave one of the two out")
        if self.same_machine and self.ranks_per_node > 1:
            raise ValueError(
                f"--ranks-per-node {self.ranks_per_node}: with --same-machine each rank is a node of its own; leave "
                "one of the two out"
            )
        for network in self.network:
            if self.ranks_per_node == 1 and not is_file(network) and parse_network(network).local is not None:
                raise ValueError(
                    f"--network {network}: local= connects the ranks of a node, and each has one; add "
                    "--ranks-per-node, or leave it out"
                )
        for ranks in self.ranks:
            if ranks > self.ranks_per_node and ranks % self.ranks_per_node:
                raise ValueError(
                    f"--ranks {ranks}: is not a multiple of --ranks-per-node {self.ranks_per_node}; choose a multiple"
                )
        return self


def is_file(network: str) -> bool:
    """Whether a network is the name of a file with measured all-reduces."""
    return network.endswith(".json")
