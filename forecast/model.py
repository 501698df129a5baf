"""How long a step takes on N ranks: the work of one rank, what overlaps it, and the wait for the slowest rank.

finish_i = max(kappa * ready_i, finish_(i-1)) + all_reduce(S_i)
T = data + forward + max(kappa * backward, finish_last) + update + sigma * sqrt(2 ln N)

Message i starts once its gradients are ready and the message before has ended (Shi, Wang and Chu 2018,
https://arxiv.org/abs/1711.05979; Li et al. 2020, https://doi.org/10.14778/3415478.3415530).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from forecast.algorithms import AllReduce
from forecast.sending import Buckets, Fusion, Gradient, Whole


@dataclass(frozen=True)
class Work:
    """What one rank computes in a step, in seconds.

    Attributes:
        before: Loading data, the forward passes of all micro-batches, and all backward passes but the last.
        micro_step: A micro-step: what another one adds.
        backward: The last backward pass, which the gradients are sent during.
        update: Clipping and the optimizer.
        gradients: The gradients, in the order in which the last backward pass computes them.
        micro_steps: The micro-steps of a step.
        share: In which share of their bytes gradients are sent.
    """

    before: float
    micro_step: float
    backward: float
    update: float
    gradients: tuple[Gradient, ...]
    micro_steps: int = 1
    share: float = 1.0

    @property
    def seconds(self) -> float:
        """A step of one rank."""
        return self.before + self.backward + self.update

    def slowed(self, factor: float) -> Work:
        """Returns the same work where computing takes so many times as long."""
        gradients = tuple(Gradient(factor * ready, num_bytes) for ready, num_bytes in self.gradients)
        return replace(
            self,
            before=factor * self.before,
            micro_step=factor * self.micro_step,
            backward=factor * self.backward,
            update=factor * self.update,
            gradients=gradients,
        )

    def accumulated(self, times: int) -> Work:
        """Returns the work of a step with `times` as many micro-steps, of which only the last one sends."""
        added = (times - 1) * self.micro_steps
        micro_steps = self.micro_steps + added
        return replace(self, before=self.before + added * self.micro_step, micro_steps=micro_steps)

    def compressed(self, share: float) -> Work:
        """Returns the same work with gradients that are sent in a share of the bytes that they were sent in."""
        return replace(self, share=share * self.share)


class Conditions(NamedTuple):
    """What N ranks change in the work of each.

    Attributes:
        slow_down: How many times as long computing takes beside the other ranks of the machine.
        overlap_slow_down: How many times as long the last backward pass takes while gradients are sent (kappa).
        spread: Standard deviation of the work of ranks in the same step, in seconds (sigma).
    """

    slow_down: float = 1.0
    overlap_slow_down: float = 1.0
    spread: float = 0.0


class StepTime(NamedTuple):
    """The parts of a step, in seconds.

    Attributes:
        computing: Data, forward and backward passes and the update, as slow as they are beside other ranks.
        exposed: What of the communication the last backward pass does not hide.
        waiting: The wait for the slowest rank.
        remainder: What such a step took beyond the model where it was measured; negative if it took less.
    """

    computing: float
    exposed: float
    waiting: float
    remainder: float = 0.0

    @property
    def total(self) -> float:
        """The step."""
        return self.computing + self.exposed + self.waiting + self.remainder


def step_time(
    work: Work, num_ranks: int, sending: Buckets | Fusion | Whole, all_reduce: AllReduce, conditions: Conditions
) -> StepTime:
    """Returns what a step takes.

    The largest of N independent normal values of standard deviation sigma is on average at most
    sigma * sqrt(2 ln N) above their mean (Boucheron, Lugosi and Massart 2013, Concentration Inequalities, section 2.5).

    Args:
        work: The work of one rank.
        num_ranks: The number of ranks.
        sending: How the gradients are sent.
        all_reduce: What an all-reduce over these ranks takes.
        conditions: What the other ranks change.
    """
    if num_ranks == 1:
        return StepTime(work.seconds, 0.0, 0.0)
    work = work.slowed(conditions.slow_down)
    kappa = conditions.overlap_slow_down if sending.overlaps else 1.0
    backward = kappa * work.backward
    # Buckets are filled with whole gradients, and compressed when they are full; a fusion buffer takes compressed ones.
    before, after = (work.share, 1.0) if isinstance(sending, Fusion) else (1.0, work.share)
    gradients = [Gradient(kappa * ready, before * num_bytes) for ready, num_bytes in work.gradients]
    finished = sending.finish(gradients, backward, lambda num_bytes: all_reduce(after * num_bytes))
    computing = work.before + backward + work.update
    return StepTime(computing, max(0.0, finished - backward), conditions.spread * math.sqrt(2 * math.log(num_ranks)))
