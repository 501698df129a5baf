"""What one rank of a run takes, as a dry run measures it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from records.record import Count, MemoryRecord
from records.traffic import Payload

# In the directory of a measurement, beside the configuration.
SIZES_NAME = "sizes.json"


class RankSizes(BaseModel):
    """What rank 0 took in a few steps on its heaviest micro-batch."""

    model_config = ConfigDict(extra="forbid")

    memory: MemoryRecord
    peak_bytes: Count = Field(description="of all tensors at one moment of the last step")
    resident_bytes: Count = Field(description="largest resident set of the process")
    entered: dict[str, int] | None = Field(
        description="bytes that enter the communication library in a step of the run, by operation, from those of the "
        "last step; null where the steps were those of one process that communicates with nobody"
    )
    gradient_bytes: Count = Field(description="of the whole model")
    gradient_elements: Count
    model_bytes: Count = Field(description="about what the saved model takes")
    checkpoint_bytes: Count = Field(description="about what a checkpoint takes")

    @property
    def payload(self) -> Payload:
        """What ranks have to exchange, where each holds all weights."""
        return Payload(self.gradient_bytes, self.gradient_elements)
