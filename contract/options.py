"""What a user may ask of ``launch/run.sh contract``."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from backends.capabilities import BackendSettings
from backends.devices import count_gpus
from launch.comma_lists import CommaList

_MAX_PROCESSES = 64


def known_check(check_id: str) -> str:
    """Returns the number of a clause, such as C16, if a check holds backends to it.

    Raises:
        ValueError: There is no such clause.
    """
    from contract.check import all_checks  # they import torch, which takes seconds

    ids = list(all_checks())
    if check_id not in ids:
        raise ValueError(f"there is no such clause; choose from {ids[0]} to {ids[-1]}")
    return check_id


class OwnOptions(NamedTuple):
    """The options of the adapter alone.

    Attributes:
        arguments: As they stand on the command line.
        settings: What they mean.
    """

    arguments: tuple[str, ...]
    settings: BackendSettings


class ContractOptions(BaseModel):
    """Which part of the contract to check, and where; an empty list stands for everything."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_processes: CommaList[Annotated[int, Field(ge=1, le=_MAX_PROCESSES)]] = Field(
        default_factory=list, description="numbers of ranks, by commas (default: 1 to 4, as each check needs)"
    )
    precision: CommaList[Literal["fp32", "bf16", "fp16"]] = Field(
        default_factory=list, description="precisions, by commas (default: all)"
    )
    check: CommaList[Annotated[str, AfterValidator(known_check)]] = Field(
        default_factory=list, description="numbers of clauses to check, such as C16, by commas (default: all)"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where to compute")

    @field_validator("device")
    @classmethod
    def _visible(cls, device: str) -> str:
        if device == "cuda" and count_gpus() == 0:
            raise ValueError("no GPU is visible here; use --device cpu, or check the driver")
        return device

    @property
    def is_whole(self) -> bool:
        """Whether every case of each check runs, so that a failure that is expected must show."""
        return not {"num_processes", "precision"} & self.model_fields_set
