"""The runs that a report is made of: each run's record and, if a race made it, what the race wrote beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from records.record import RunRecord

Purpose = Literal["timed", "diagnosis", "whole"]


class RaceFacts(BaseModel):
    """What a race knows of one of its runs. The file `NAME.race.json` beside the record `NAME.json` holds it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    schema_version: Literal[1] = 1
    kind: Literal["race"] = "race"
    race: str = Field(description="the same for all runs of a race")
    purpose: Purpose
    block: int = Field(ge=0, description="runs of one block are compared in pairs")
    position: int = Field(ge=0, description="place in the random order of its block, from 0")
    busy_share: float = Field(ge=0, description="share of the machine's cores that were busy just before the run")
    gpu_processes: int = Field(ge=0, description="processes that used a GPU just before the run")
    foreign_share: float = Field(
        ge=0, description="share of the machine's cores that other programs or the hypervisor took during the run"
    )
    matmul_flops_per_second: float | None = Field(
        gt=0, description="what square matrix products reach on all cores in the precision of the run"
    )


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: What messages call it.
        record: What the run itself wrote.
        race: What the race wrote beside it; None for a run that no race started.
    """

    name: str
    record: RunRecord
    race: RaceFacts | None

    @property
    def purpose(self) -> Purpose:
        """What the run was made for."""
        if self.race is not None:
            return self.race.purpose
        return "diagnosis" if self.record.config.diagnose else "timed"

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


def race_file(record: Path) -> Path:
    """Returns where a race writes what it knows of the run with this record."""
    return record.with_name(f"{record.stem}.race.json")
