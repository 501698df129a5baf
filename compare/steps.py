"""Where the time of a step goes, and what it sends: parts of results.

Times are in seconds and sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from compare.strict import Strict

# The parts of a step, in the order in which they are shown.
PARTS = ("data", "forward", "backward", "communication", "optimizer", "building", "waiting")


class Breakdown(Strict):
    """Where the time of a step goes, in seconds, as a mean of ranks.

    A diagnosis run says which share each part has. The shares divide the median step of timed runs, if there are any.
    """

    data: float = Field(description="choosing and loading the samples")
    forward: float
    backward: float
    communication: float = Field(
        description="what a step takes beyond the same work without communication, and beyond waiting; where that is "
        "null or unresolved, it is contained here"
    )
    optimizer: float = Field(description="clipping included")
    building: float | None = Field(
        default=None,
        description="what the first forward and backward pass over a batch takes beyond a later one, because "
        "libraries build kernels for each new shape of their input",
    )
    waiting: float | None = Field(
        default=None,
        description="until the slowest rank has come to its update, as a mean of ranks, from the steps that each took "
        "alone; null for one rank",
    )
    unresolved: dict[str, float] = Field(
        default={}, description="parts that cannot be told from noise, and the time that each takes at most"
    )
    overhead: float | None = Field(
        description="by how much a step of the diagnosis run, with what was built for it, was above the same step of "
        "timed runs, as a median over steps; steps that were timed in one value, as on GPUs, have equal shares of it"
    )
    covered: float | None = Field(
        default=None,
        description="what share of a diagnosed step the parts told from noise are, before they are brought to a sum of "
        "1; it is near 1 by construction where communication is one of them, since it is the rest of the step",
    )

    @property
    def tells_waiting(self) -> bool:
        """Whether waiting was told from noise, so that communication does not contain it."""
        return self.waiting is not None and "waiting" not in self.unresolved

    def resolved(self, part: str) -> float:
        """Returns the seconds of a part; zero if they cannot be told from noise, or were not measured."""
        return 0.0 if part in self.unresolved else float(getattr(self, part) or 0.0)

    @property
    def total(self) -> float:
        """The sum of the parts that can be told from noise."""
        return sum(self.resolved(part) for part in PARTS)


def parts_in(breakdowns: Iterable[Breakdown]) -> list[str]:
    """Returns the parts that any of them has, in the order in which they are shown."""
    seen = list(breakdowns)
    return [part for part in PARTS if any(getattr(one, part) is not None for one in seen)]


class Wire(Strict):
    """What one rank sent in one optimizer step."""

    interface: str = Field(description="the network interface whose byte counter was read")
    bytes_per_step: float
    gradient_bytes: int = Field(description="size of all gradients")
    ring_bound: float = Field(
        description="the least that its gradients need: 2 (N-1)/N times their size, as they travel, around a ring; "
        "where ranks hold parts of weights, (N-1)/N times the gradients and, for each micro-batch, twice the weights"
    )
    reductions_per_step: float | None = None


class HeldMemory(Strict):
    """What the tensors of one rank hold, in bytes: of each part, the most that a rank of the entrant holds."""

    parameters: int
    gradients: int
    optimizer: int = Field(description="the optimizer's state")
    activations: int | None = Field(description="what autograd keeps for the backward pass; null if not counted")
    buffers: int

    @property
    def between_steps(self) -> int:
        """What a rank holds of a model as long as it trains: parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer
