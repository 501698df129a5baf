"""Notices, on each node, that its ranks hang, and finds the rank that causes it.

Libraries do not: Horovod's stall check does nothing over Gloo, and the usual timeouts of torch are minutes long and
name a rank that waited. Here every rank writes a heartbeat at each phase of a step (watch/heartbeat.py). If all ranks
are silent for too long, their positions and stacks show which rank the others wait for. Time in which a rank waited for
a processor does not count as silence: where many ranks share few cores, or other programs use them, all limits are
longer.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from backends.capabilities import Signs
from records.names import LOGS_NAME
from watch.heartbeat import OWN_PHASES, PHASES, Position
from watch.rank_files import RankFiles, started_ranks
from watch.stacks import innermost_frame, is_in_backward, reports_an_error, take_stacks, waits_for_others

_SECONDS_BETWEEN_LOOKS = 0.5
# If the launcher itself did not run for so long, the machine slept or a container was paused.
_SECONDS_ASLEEP = 5.0
# Starters load torch before they start ranks; from a cold network disk that takes minutes.
_SECONDS_TO_START = 300.0
# Phases that may take long without a heartbeat: imports, the rendezvous, a slow disk.
_LONG_PHASES = ("start", "saving", "end")
# The phase that has no limit: a rank waits for its turn in a race, and fails by itself if the race has gone.
_RESTING = "rest"
# Phases that may take long while the main thread mostly computes, as with a large model; waiting in gloo, it sleeps.
_COMPUTING_PHASES = ("forward", "backward", "update", "evaluation")
_BUSY_SHARE = 0.5
# The node of the rank that hangs should report it first, even if it is so busy that its own limit is longer.
_TIMES_AS_LONG_FOR_OTHER_NODES = 5


@dataclass(frozen=True)
class Hang:
    """A hang: the rank that causes it (None: none of this node), its position, and the message."""

    rank: int | None
    message: str
    position: Position | None = None


class Limits(NamedTuple):
    """How long all ranks of a node may be silent before they count as hanging.

    Attributes:
        seconds: The limit within a step or an evaluation; 0 means that there is none.
        long_seconds: The limit at the start, while saving and at the end, and while a rank keeps its processor busy
            or waits for a processor.
        slow_computing: Whether computing may always take `long_seconds`, for example because a model is compiled.
    """

    seconds: float
    long_seconds: float
    slow_computing: bool = False


class Watchdog:
    """Watches the ranks of this node.

    Args:
        run_directory: Where the ranks write their files.
        num_ranks: The number of ranks of this node.
        limits: How long they may be silent.
        spans_nodes: Whether other nodes have ranks, too.
        signs: How the ranks' library shows that a rank waits for others.
        own_phases: The phases in which no other rank can delay a rank.
    """

    def __init__(
        self,
        run_directory: Path,
        *,
        num_ranks: int,
        limits: Limits,
        spans_nodes: bool,
        signs: Signs,
        own_phases: tuple[str, ...] = OWN_PHASES,
    ) -> None:
        self._run_directory, self._num_ranks = run_directory, num_ranks
        self._seconds, self.long_seconds = limits.seconds, max(limits.seconds, limits.long_seconds)
        self._long_phases = (*_LONG_PHASES, *(_COMPUTING_PHASES if limits.slow_computing else ()))
        self._states: list[dict[int, str]] = []  # of all ranks, at each look since they fell silent
        self._queued: dict[int, dict[str, float]] = {}  # of all ranks' threads, soon after they fell silent
        self._counted_since = 0.0
        self._spans_nodes, self._signs, self._own_phases = spans_nodes, signs, own_phases
        self._looked_at = self._awake_since = self._judged_at = time.monotonic()

    def look(self) -> Hang | None:
        """Returns the hang if there is one; to be called several times a second."""
        now = time.monotonic()
        if self._seconds == 0 or now - self._looked_at < _SECONDS_BETWEEN_LOOKS:
            return None
        if now - self._looked_at > _SECONDS_ASLEEP:
            self._awake_since = now
        self._looked_at = now
        everyone = {rank: position for rank in started_ranks(self._run_directory) if (position := rank.position())}
        if len(everyone) < self._num_ranks:
            return self._judge_start({rank.rank for rank in everyone}, now - self._awake_since)
        ranks = [rank for rank in everyone if not rank.succeeded()]
        positions = {rank.rank: everyone[rank] for rank in ranks}
        if not ranks:
            return None
        silence = now - max(self._awake_since, *(position.time for position in positions.values()))
        if silence < _SECONDS_BETWEEN_LOOKS:
            self._states.clear()
        if silence < self._seconds / 4:
            self._queued.clear()
        elif not self._queued:
            self._queued, self._counted_since = {rank.rank: rank.queued_seconds() for rank in ranks}, now
        self._states.append({rank.rank: rank.state() for rank in ranks})
        is_stopped = "T" in self._states[-1].values()
        is_patient = silence < self.long_seconds and not is_stopped
        last = positions[_least_advanced(positions)]
        is_resting = last.phase == _RESTING and not is_stopped
        has_just_judged = now - self._judged_at < self._seconds / 4  # it interrupts all ranks for their stacks
        if silence < self._seconds or has_just_judged or is_resting or (last.phase in self._long_phases and is_patient):
            return None
        self._judged_at = now
        if is_patient and silence * (1 - self._queued_share(ranks, now)) < self._seconds:
            return None
        return self._judge(ranks, positions, silence)

    def _queued_share(self, ranks: list[RankFiles], now: float) -> float:
        """Returns for what share of the silence some thread has waited for a processor, at most."""
        waits = [
            seconds - self._queued[rank.rank][thread]
            for rank in ranks
            for thread, seconds in rank.queued_seconds().items()
            if thread in self._queued.get(rank.rank, {})
        ]
        return min(1.0, max(waits, default=0.0) / max(now - self._counted_since, _SECONDS_BETWEEN_LOOKS))

    def _judge_start(self, begun: set[int], seconds: float) -> Hang | None:
        """Returns the rank that did not start; starters that wait for other nodes have a limit of their own."""
        if self._spans_nodes or seconds < max(self.long_seconds, _SECONDS_TO_START):
            return None
        if not (self._run_directory / LOGS_NAME).exists():
            return None  # it was moved away, and the job may succeed nevertheless
        missing = min(set(range(self._num_ranks)) - begun)
        return Hang(missing, f"did not start within {seconds:.0f} s; {len(begun)} of {self._num_ranks} ranks did")

    def _judge(self, ranks: list[RankFiles], positions: dict[int, Position], silence: float) -> Hang | None:
        stopped = {rank for rank, state in self._states[-1].items() if state == "T"}
        stacks = take_stacks(ranks)
        self._looked_at = time.monotonic()  # this may have taken long
        # If a rank has made progress or ended meanwhile, there is no hang to report.
        went_on = any(rank.position() != positions[rank.rank] for rank in ranks)
        if set(stacks) != set(positions) or (went_on and not stopped):
            return None
        # Where a rank hangs on another node, those that wait for it fail as soon as it is ended, and will say so.
        if not stopped and silence < self.long_seconds and any(map(reports_an_error, stacks.values())):
            return None
        waiting = {rank for rank in positions if waits_for_others(stacks[rank], self._signs)}
        computing = self._busy(positions) - waiting
        waiting |= {rank for rank in positions if is_in_backward(stacks[rank])}
        suspects = {rank: positions[rank] for rank in positions if rank not in waiting | computing}
        where = "; ".join(f"rank {rank}: {positions[rank]}, {innermost_frame(stacks[rank])}" for rank in positions)
        seconds = f"{silence:.0f} s"
        if stopped:
            rank = min(stopped)
            message = f"hangs: no progress for {seconds}; the process is stopped (SIGSTOP) ({where})"
            return Hang(rank, message, positions[rank])
        if computing and silence < self.long_seconds:
            return None
        if suspects or computing:
            rank = _least_advanced(suspects or {rank: positions[rank] for rank in computing})
            message = f"hangs: no progress for {seconds}, and it is not waiting for another rank ({where})"
            return Hang(rank, message, positions[rank])
        return self._judge_waiting(positions, silence, where)

    def _judge_waiting(self, positions: dict[int, Position], silence: float, where: str) -> Hang | None:
        """Returns the hang if every rank waits for others."""
        seconds = f"{silence:.0f} s"
        places = Counter(_order(position) for position in positions.values())
        if self._spans_nodes and len(places) == 1:
            if silence < _TIMES_AS_LONG_FOR_OTHER_NODES * self._seconds:
                return None
            return Hang(None, f"all ranks of this node have waited for another node for {seconds} ({where})")
        # A rank that reads data or computes does not have to wait for others.
        out_of_turn = {rank: position for rank, position in positions.items() if position.phase in self._own_phases}
        if len(places) == 1 and not out_of_turn:
            message = f"all ranks have waited for each other for {seconds}, in the same phase of the same step"
            return Hang(None, f"{message} ({where})")
        rank = _least_advanced(out_of_turn) if out_of_turn else _odd_one_out(positions)
        message = f"hangs: all ranks have waited for {seconds}, but not in the same collective ({where})"
        return Hang(rank, message, positions[rank])

    def _busy(self, positions: dict[int, Position]) -> set[int]:
        """Returns the ranks that compute: those that are mostly on a processor, and do not read data."""
        at_work = Counter(rank for states in self._states for rank, state in states.items() if state == "R")
        return {
            rank
            for rank, position in positions.items()
            if position.phase in _COMPUTING_PHASES and at_work[rank] > _BUSY_SHARE * len(self._states)
        }


def _least_advanced(positions: dict[int, Position]) -> int:
    return min(positions, key=lambda rank: _order(positions[rank]))


def _odd_one_out(positions: dict[int, Position]) -> int:
    """Returns, of ranks that wait for each other, that with the rarest position; of several, the furthest.

    The rank that is ahead has left out the collective in which the others wait.
    """
    places = Counter(_order(position) for position in positions.values())
    return min(positions, key=lambda rank: (places[_order(positions[rank])], *(-n for n in _order(positions[rank]))))


def _order(position: Position) -> tuple[int, int]:
    return position.step, PHASES.index(position.phase)
