"""What a rank measures of its own steps for a profile, and the file in which gradient_clock.py leaves that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from compare.strict import Strict
from records.record import Seconds


class RankTimes(Strict):
    """The times of one rank; lists have one entry for each step after the warm-up."""

    rank: int
    data_seconds: list[Seconds] = Field(description="choosing and loading samples")
    forward_seconds: list[Seconds] = Field(description="of all micro-steps")
    backward_seconds: list[Seconds] = Field(description="of all micro-steps")
    last_backward_seconds: list[Seconds] = Field(description="of the last micro-step")
    update_seconds: list[Seconds] = Field(description="clipping and the optimizer, with waiting for gradients")
    gradient_bytes: dict[str, int]
    ready_seconds: dict[str, list[Seconds]] = Field(
        description="by parameter: from the beginning of the last backward pass until its gradient was computed"
    )

    @property
    def step_seconds(self) -> list[float]:
        """All of it, by step."""
        parts = (self.data_seconds, self.forward_seconds, self.backward_seconds, self.update_seconds)
        return [sum(step) for step in zip(*parts, strict=True)]

    @classmethod
    def joined(cls, starts: Sequence[RankTimes]) -> RankTimes:
        """Puts the steps of the same rank in several starts one after the other."""

        def steps(name: str) -> list[float]:
            return [second for one in starts for second in getattr(one, name)]

        return cls(
            rank=starts[0].rank,
            data_seconds=steps("data_seconds"),
            forward_seconds=steps("forward_seconds"),
            backward_seconds=steps("backward_seconds"),
            last_backward_seconds=steps("last_backward_seconds"),
            update_seconds=steps("update_seconds"),
            gradient_bytes=starts[0].gradient_bytes,
            ready_seconds={
                name: [second for one in starts for second in one.ready_seconds[name]]
                for name in starts[0].ready_seconds
            },
        )

    @property
    def last_ready_of_steps(self) -> list[float]:
        """By step, when the last gradient was ready; a parameter that some step leaves out does not count."""
        num_steps = len(self.update_seconds)
        complete = [seconds for seconds in self.ready_seconds.values() if len(seconds) == num_steps]
        return [max(step) for step in zip(*complete, strict=True)]


def times_path(directory: Path, rank: int) -> Path:
    """Returns where a rank leaves its times, in the directory of its run."""
    return directory / f"forecast-rank{rank}.json"
