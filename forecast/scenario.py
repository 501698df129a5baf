"""A training on a network: the profile, what connects the ranks, and what is assumed of both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from compare.results import Interval
from forecast.algorithms import Algorithm, all_reduce
from forecast.model import Conditions, StepTime, Work, step_time
from forecast.network import PAYLOAD_SHARE, Link, Network
from forecast.profile import Collective, Computing, Profile
from forecast.sending import Buckets, Fusion, Whole

End = Literal["low", "estimate", "high"]
"""Of all inputs at once: those that make a step shortest, those that were measured, those that make it longest."""


class NotMeasured(Exception):
    """The profile has not what a scenario needs; the message says what, and how to measure it."""


class Variant(NamedTuple):
    """What a training could do otherwise.

    Attributes:
        algorithm: How an all-reduce is made.
        sending: How gradients are sent.
        accumulation: How many times as many micro-steps a step has.
        share: In which share of their bytes gradients are sent.
    """

    algorithm: Algorithm
    sending: Buckets | Fusion | Whole
    accumulation: int = 1
    share: float = 1.0


@dataclass(frozen=True)
class Scenario:
    """See above.

    Attributes:
        profile: The profile of the training.
        network: What connects the ranks.
        software: The all-reduces that were measured through the library; None if `network` has them in it.
        ranks_per_node: The ranks of a node.
        same_machine: Whether all ranks share the profiled machine.
        slow_down: The stated slow-down of computing; None for what was measured.
    """

    profile: Profile
    network: Network
    software: bool = True
    ranks_per_node: int = 1
    same_machine: bool = False
    slow_down: float | None = None

    @cached_property
    def work(self) -> Work:
        """The work of one rank."""
        return self.profile.work

    def step(self, variant: Variant, num_ranks: int, end: End = "estimate") -> StepTime:
        """Returns what a step takes.

        Raises:
            NotMeasured: The profile lacks something.
        """
        work = self.work.accumulated(variant.accumulation).compressed(variant.share).slowed(self._end_of_work(end))
        reduce = all_reduce(
            variant.algorithm, num_ranks, self._network(num_ranks, end), ranks_per_node=self.ranks_per_node
        )
        return step_time(work, num_ranks, variant.sending, reduce, self._conditions(num_ranks, end))

    def efficiency(self, variant: Variant, num_ranks: int, end: End = "estimate") -> float:
        """Returns the speed of N ranks over N times the speed of one."""
        alone = self.work.accumulated(variant.accumulation).seconds
        return alone / self.step(variant, num_ranks, end).total

    def step_interval(self, variant: Variant, num_ranks: int) -> Interval:
        """Returns the time of a step, between inputs at their low and at their high ends."""
        ends: tuple[End, ...] = ("low", "estimate", "high")
        low, estimate, high = (self.step(variant, num_ranks, end).total for end in ends)
        return Interval(estimate=estimate, low=low, high=high)

    @property
    def remarks(self) -> list[str]:
        """What the profile assumes, and what is assumed here."""
        profile, found = self.profile, list(self.profile.remarks)
        if profile.overlap_slow_down is not None:
            kappa = profile.overlap_slow_down.estimate
            found.append(f"a backward pass during which gradients are sent takes {kappa:.3g} times as long (measured)")
        elif not found:
            found.append("how much sending slows computing down was not measured: it is taken not to")
        if self.slow_down is not None:
            found.append(f"computing takes {self.slow_down:g} times as long as in one process, as was stated")
        elif self.same_machine:
            found.append(
                "all ranks share the profiled machine: each number computes as slowly as so many processes that do not "
                "communicate"
            )
        elif self.ranks_per_node > 1 and self._computing(self.ranks_per_node) is None:
            found.append(
                f"computing beside {self.ranks_per_node - 1} other ranks of a node is taken to be as fast as alone: "
                f"profile with --processes {self.ranks_per_node} to measure it"
            )
        if self.software:
            found.append(
                f"{PAYLOAD_SHARE:.0%} of a bandwidth between nodes are data, the rest headers (TCP over Ethernet)"
            )
        if self.software and not profile.collectives:
            found.append("the library's own share of an all-reduce was not measured: the network alone counts")
        spread = self._spread(2)
        if spread is None:
            found.append("how much ranks differ in a step was not measured: nobody waits for the slowest")
        else:
            found.append(f"ranks differ by {1e3 * spread:.3g} ms in the same step (measured, a standard deviation)")
        return found

    def _end_of_work(self, end: End) -> float:
        """Returns how many times the estimate of a step of one process an end of its interval is."""
        alone = self.profile.computing[0].step_seconds
        return (_end(alone, end) or alone.estimate) / alone.estimate

    def _conditions(self, num_ranks: int, end: End) -> Conditions:
        overlap = self.profile.overlap_slow_down
        # The formula for the slowest rank is an upper bound of its mean.
        spread = 0.0 if end == "low" else self._spread(num_ranks) or 0.0
        return Conditions(
            slow_down=self._slow_down(num_ranks),
            overlap_slow_down=1.0 if overlap is None else _end(overlap, end) or overlap.estimate,
            spread=spread,
        )

    def _slow_down(self, num_ranks: int) -> float:
        if self.slow_down is not None:
            return self.slow_down
        beside = num_ranks if self.same_machine else min(num_ranks, self.ranks_per_node)
        found = self._computing(beside)
        if found is None and self.same_machine:
            raise NotMeasured(
                f"the profile has no times of {beside} processes at once; profile again with --processes {beside}, or "
                "state --slow-down-of-computing instead of --same-machine"
            )
        alone = self.profile.computing[0].step_seconds.estimate
        return max(1.0, found.step_seconds.estimate / alone) if found else 1.0

    def _computing(self, num_processes: int) -> Computing | None:
        return next((one for one in self.profile.computing if one.num_processes == num_processes), None)

    def _spread(self, num_ranks: int) -> float | None:
        """Returns how much ranks differ in a step; of the most processes that were measured, unless they share all."""
        own = self._computing(num_ranks) if self.same_machine else None
        return (own or self.profile.computing[-1]).spread_seconds

    def _network(self, num_ranks: int, end: End) -> Network:
        """Returns the network as the library reaches it."""
        if not self.software:
            return self.network
        measured, link = self.profile.collectives, self.network.link.for_data
        if not measured:
            return replace(self.network, link=link)
        fit = measured[0]
        if self.same_machine:
            fit = max((one for one in measured if one.num_processes <= num_ranks), key=_size, default=fit)
        software = link_of(fit, end)
        local = self.network.local
        return replace(
            self.network,
            link=link.through(software),
            local=local.through(software) if local is not None else None,
        )


def link_of(fit: Collective, end: End = "estimate") -> Link:
    """Returns the link that a ring over these ranks would show such all-reduces on: see `algorithms`."""
    num_messages = 2 * (fit.num_processes - 1)
    opposite: dict[End, End] = {"low": "high", "estimate": "estimate", "high": "low"}
    rate = _end(fit.bytes_per_second, opposite[end])
    return Link(
        (_end(fit.latency_seconds, end) or 0.0) / num_messages,
        float("inf") if rate is None else rate * num_messages / fit.num_processes,
    )


def _size(fit: Collective) -> int:
    return fit.num_processes


def _end(value: Interval, end: End) -> float | None:
    """Returns an end of an interval; None where it has no such end."""
    return {"low": value.low, "estimate": value.estimate, "high": value.high}[end]
