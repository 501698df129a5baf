"""A training on a network: the profile, what connects the ranks, and what is assumed of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from compare.numbers import joined
from compare.results import Interval
from forecast.algorithms import Algorithm, AllReduce, all_reduce, measured_all_reduce
from forecast.model import Conditions, StepTime, Work, step_time
from forecast.network import PAYLOAD_SHARE, Link, Network
from forecast.profile import Collective, Computing, Profile
from forecast.sending import Buckets, Fusion, Whole

End = Literal["low", "estimate", "high"]
"""Of all inputs at once: those that make a step shortest, those that were measured, those that make it longest."""
ENDS: tuple[End, ...] = ("estimate", "low", "high")
_OPPOSITE: dict[End, End] = {"low": "high", "estimate": "estimate", "high": "low"}


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
        network: What connects the ranks, as far as it is known.
        measured: All-reduces that were measured on this very network, from the fewest ranks to the most; empty if the
            network is only stated, and what the library adds is taken from the profile.
        name: What the network is called; None for what is known of it.
        ranks_per_node: The ranks of a node.
        same_machine: Whether all ranks share the profiled machine.
        slow_down: The stated slow-down of computing; None for what was measured.
    """

    profile: Profile
    network: Network
    measured: tuple[Collective, ...] = ()
    name: str | None = None
    ranks_per_node: int = 1
    same_machine: bool = False
    slow_down: float | None = None

    @cached_property
    def work(self) -> Work:
        """The work of one rank."""
        return self.profile.work

    @property
    def ranks_have_own_machines(self) -> bool:
        """Whether each rank is alone on a machine, and computes as fast as one process did on the profiled one."""
        return not self.same_machine and self.ranks_per_node == 1 and self.slow_down is None

    def step(self, variant: Variant, num_ranks: int, end: End = "estimate") -> StepTime:
        """Returns what a step takes.

        Raises:
            NotMeasured: The profile lacks something.
        """
        modelled = self._modelled(variant, num_ranks, end, end)
        remainder = (self._remainder(num_ranks, end) or 0.0) if num_ranks > 1 else 0.0
        return modelled._replace(remainder=max(-modelled.exposed, remainder))

    def _modelled(self, variant: Variant, num_ranks: int, end: End, end_of_reduces: End) -> StepTime:
        work = self.work.accumulated(variant.accumulation).compressed(variant.share).slowed(self._end_of_work(end))
        reduce = self._all_reduce(variant.algorithm, num_ranks, end_of_reduces)
        return step_time(work, num_ranks, variant.sending, reduce, self._conditions(variant, num_ranks, end))

    def _remainder(self, num_ranks: int, end: End) -> float | None:
        """Returns the error of the model for ranks that share the profiled machine, over its own loopback interface.

        It is negative where the model says more than they took. What ranks and their libraries do to each other on
        shared cores is in it, which they do on a slower network as well, and machines of their own do not have. Without
        so many ranks, or all-reduces over them, nothing is known (None).

        The step on the network and the one here compute with the same inputs, whose errors cancel. Those of all-reduces
        on two networks do not: at the low end of a step, the ones here take as long as they may.
        """
        together = next((one for one in self.profile.together if one.num_processes == num_ranks), None)
        fit = next((one for one in self.profile.collectives if one.num_processes == num_ranks), None)
        if not self.same_machine or together is None or fit is None:
            return None
        opposite = _OPPOSITE[end]
        here = replace(self, network=Network(self._link_of(fit, opposite)), measured=(fit,))
        modelled = here._modelled(Variant("ring", self.profile.sending), num_ranks, end, opposite).total
        return (_end(together.step_seconds, end) or together.step_seconds.estimate) - modelled

    def _all_reduce(self, algorithm: Algorithm, num_ranks: int, end: End) -> AllReduce:
        def modelled(name: Algorithm, end: End) -> AllReduce:
            return all_reduce(name, num_ranks, self._network(num_ranks, end), ranks_per_node=self.ranks_per_node)

        found = next((one for one in self.measured if one.num_processes == num_ranks), None)
        if found is None or len(found.times) < 2:
            return modelled(algorithm, end)
        measured = measured_all_reduce(
            [(one.num_bytes, _end(one.seconds, end) or one.seconds.estimate) for one in found.times]
        )
        if algorithm == "ring":
            return measured
        # Libraries reduce along a ring; another algorithm is as much faster or slower as the model says. No bytes may
        # take no time in it, and at an end of its interval a line may have neither latency nor a limited bandwidth.
        own, ring = modelled(algorithm, "estimate"), modelled("ring", "estimate")
        return lambda size: measured(size) * own(max(1.0, size)) / ring(max(1.0, size))

    def efficiency(self, variant: Variant, num_ranks: int, end: End = "estimate") -> float:
        """Returns the speed of N ranks over N times the speed of one, with the same inputs for both."""
        return self.step(variant, 1, end).total / self.step(variant, num_ranks, end).total

    def step_interval(self, variant: Variant, num_ranks: int) -> Interval:
        """Returns the time of a step, between inputs at their low and at their high ends."""
        return enclosing(*(self.step(variant, num_ranks, end).total for end in ENDS))

    def exposed_interval(self, variant: Variant, num_ranks: int) -> Interval:
        """Returns the exposed communication, between computing and all-reduces at opposite ends of their intervals.

        What computes more slowly hides more: there is least of it where computing takes longest and all-reduces are
        fastest.
        """
        return enclosing(*(self._modelled(variant, num_ranks, _OPPOSITE[end], end).exposed for end in ENDS))

    @property
    def remarks(self) -> list[str]:
        """What the profile assumes, and what is assumed here."""
        profile, found = self.profile, list(self.profile.remarks)
        if profile.together and profile.num_starts == 1:
            found.append("each run was started once: how far another start differs is in no interval")
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
            more = self._computing_of_more(self.ranks_per_node)
            as_fast = "alone" if more is None else f"in {more.num_processes} processes at once"
            found.append(
                f"computing beside {self.ranks_per_node - 1} other ranks of a node is taken to be as fast as "
                f"{as_fast}: profile with --processes {self.ranks_per_node} to measure it"
            )
        found += self._remarks_on_network()
        if self.same_machine:
            errors = {one.num_processes: self._remainder(one.num_processes, "estimate") for one in profile.together}
            told = [f"{1e3 * error:+.3g} ms for {number}" for number, error in errors.items() if error is not None]
            if told:
                found.append(
                    f"the remainder is added: what ranks of {profile.name} took on the profiled machine itself "
                    f"beyond the model ({', '.join(told)}), however they send"
                )
        spread = self._spread(max(2, self.ranks_per_node))
        if spread is None:
            found.append("how much ranks differ in a step was not measured: nobody waits for the slowest")
        else:
            found.append(f"ranks differ by {1e3 * spread:.3g} ms in the same step (measured, a standard deviation)")
        return found

    def _remarks_on_network(self) -> list[str]:
        if self.measured:
            numbers = joined([str(fit.num_processes) for fit in self.measured])
            within = "; links within a node are taken to be no faster" if self.ranks_per_node > 1 else ""
            return [f"all-reduces were measured on this network, over {numbers} ranks{within}"]
        found = [
            f"{PAYLOAD_SHARE:.0%} of a bandwidth between nodes are data, the rest headers (TCP over Ethernet)",
            "the stated bandwidth is taken to be reached: no interval covers what a network falls short of it "
            "(measure all-reduces on it)",
        ]
        if not self.profile.collectives:
            found.append("the library's own share of an all-reduce was not measured: the network alone counts")
        return found

    def _end_of_work(self, end: End) -> float:
        """Returns how many times the estimate of a step of one process an end of its interval is."""
        alone = self.profile.computing[0].step_seconds
        return (_end(alone, end) or alone.estimate) / alone.estimate

    def _conditions(self, variant: Variant, num_ranks: int, end: End) -> Conditions:
        overlap = self.profile.overlap_slow_down
        # The formula for the slowest rank is an upper bound of its mean. What a rank takes for A steps one after the
        # other differs by sqrt(A) times as much as for one.
        spread = 0.0 if end == "low" else math.sqrt(variant.accumulation) * (self._spread(num_ranks) or 0.0)
        return Conditions(
            slow_down=self._slow_down(num_ranks, end),
            overlap_slow_down=1.0 if overlap is None else _end(overlap, end) or overlap.estimate,
            spread=spread,
        )

    def _slow_down(self, num_ranks: int, end: End) -> float:
        """Returns how many times as long as alone a rank computes beside others; both at an end of their intervals."""
        if self.slow_down is not None:
            return self.slow_down
        beside = self._ranks_of_a_machine(num_ranks)
        found = self._computing(beside) or (None if self.same_machine else self._computing_of_more(beside))
        if found is None and self.same_machine:
            raise NotMeasured(
                f"the profile has no times of {beside} processes at once; profile again with --processes {beside}, or "
                "state --slow-down-of-computing instead of --same-machine"
            )
        if found is None:
            return 1.0
        seconds, alone = found.step_seconds, self.profile.computing[0].step_seconds
        return max(1.0, (_end(seconds, end) or seconds.estimate) / (_end(alone, end) or alone.estimate))

    def _computing(self, num_processes: int) -> Computing | None:
        return next((one for one in self.profile.computing if one.num_processes == num_processes), None)

    def _computing_of_more(self, num_processes: int) -> Computing | None:
        return next((one for one in self.profile.computing if one.num_processes > num_processes > 1), None)

    def _spread(self, num_ranks: int) -> float | None:
        """Returns how much ranks differ in a step beside the others of a machine; else beside the fewest measured."""
        own = self._computing(self._ranks_of_a_machine(num_ranks))
        known = [one.spread_seconds for one in ([own] if own else []) + self.profile.computing]
        return next((spread for spread in known if spread is not None), None)

    def _link_of(self, fit: Collective, end: End) -> Link:
        sending = self.profile.sending
        return link_of(fit, end, waits=sending.cycle_seconds if isinstance(sending, Fusion) else 0.0)

    def _ranks_of_a_machine(self, num_ranks: int) -> int:
        return num_ranks if self.same_machine else min(num_ranks, self.ranks_per_node)

    def _network(self, num_ranks: int, end: End) -> Network:
        """Returns the network as the library reaches it."""
        if self.measured:
            link, most = self._link_of(_fit_for(num_ranks, self.measured), end), self.network.link.bandwidth
            return Network(replace(link, bandwidth=min(link.bandwidth, most)))  # a burst may pass faster than the rest
        link = self.network.link.for_data
        if not self.profile.collectives:
            return replace(self.network, link=link)
        # On machines of their own, ranks do not share the cores that send, as they did where this was measured.
        software = self._link_of(_fit_for(num_ranks if self.same_machine else 0, self.profile.collectives), end)
        local = self.network.local
        return replace(
            self.network,
            link=link.through(software),
            local=local.through(software) if local is not None else None,
        )


def enclosing(estimate: float, *others: float) -> Interval:
    """Returns an estimate with the interval that encloses it and the others."""
    return Interval(estimate=estimate, low=min(estimate, *others), high=max(estimate, *others))


def link_of(fit: Collective, end: End = "estimate", *, waits: float = 0.0) -> Link:
    """Returns the link that a ring over these ranks would show such all-reduces on: see `algorithms`.

    Args:
        fit: What they took.
        end: Of their intervals.
        waits: What the library waits for before each of them, in seconds, which is no latency of messages.
    """
    num_messages = 2 * (fit.num_processes - 1)
    rate = _end(fit.bytes_per_second, _OPPOSITE[end])
    return Link(
        max(0.0, (_end(fit.latency_seconds, end) or 0.0) - waits) / num_messages,
        float("inf") if rate is None else rate * num_messages / fit.num_processes,
    )


def _fit_for(num_ranks: int, measured: Sequence[Collective]) -> Collective:
    """Returns what was measured over so many ranks, else over the next fewer ones, else over the fewest."""
    fewer = [fit for fit in measured if fit.num_processes <= num_ranks]
    return fewer[-1] if fewer else measured[0]


def _end(value: Interval, end: End) -> float | None:
    """Returns an end of an interval; None where it has no such end."""
    return {"low": value.low, "estimate": value.estimate, "high": value.high}[end]
