"""Says why a job failed, from the files that its ranks and its starter have left."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from backends.capabilities import Signs
from watch import shared_memory
from watch.failures import FailureKind, JobFailure, RankFailure, shows_lost_peer
from watch.rank_files import RankFiles
from watch.watchdog import Hang


@dataclass(frozen=True)
class EndedJob:
    """A job that has ended without the success of all its ranks.

    Attributes:
        ranks: The ranks that have started on this machine.
        num_processes: How many ranks this machine was to start.
        spans_nodes: Whether other nodes ran a part of it.
        signs: How the ranks' library shows that a rank has lost another.
        launcher: The name of its starter for messages; None where the command started the rank itself.
        killed_by: The signal that ended the starter before anything else failed, by name.
        return_code: The starter's exit code.
        outlived: The ranks that were still running when the first failure was seen.
        ended_by_us: The ranks that the launcher ended.
        starter_log: What the starter has printed.
    """

    ranks: list[RankFiles]
    num_processes: int
    spans_nodes: bool
    signs: Signs
    launcher: str | None
    killed_by: str | None
    return_code: int
    outlived: set[int]
    ended_by_us: set[int]
    starter_log: Path

    @property
    def silent(self) -> RankFiles | None:
        """The rank that ended without a message; if several did, the first one.

        A rank may also end without a message because the starter killed it, after it did not react to SIGTERM, or
        because its library ends the process when another rank is lost, as Horovod's gloo does while it connects.
        """
        silent = [rank for rank in self.ranks if rank.ended_silently() and rank.rank not in self.ended_by_us]
        return min(silent, key=lambda rank: (rank.rank in self.outlived, self.lost_another(rank)), default=None)

    def lost_another(self, rank: RankFiles) -> bool:
        """Whether a library ended this rank because it had lost another."""
        return shows_lost_peer(rank.last_words(), self.signs)

    @property
    def missing(self) -> list[int]:
        """The ranks that have not started; none if there are several nodes, whose ranks are not known here."""
        return [] if self.spans_nodes else sorted(set(range(self.num_processes)) - {rank.rank for rank in self.ranks})

    def printed(self) -> str:
        """Returns what the starter has printed; nothing if the run's directory was moved away."""
        with contextlib.suppress(OSError):
            return self.starter_log.read_text(errors="replace")
        return ""


def explain_hang(hang: Hang, ranks: list[RankFiles], starter_log: Path, *, spans_nodes: bool) -> JobFailure:
    """Returns the failure of the rank that hangs, with the path of its stacks."""
    culprit = next((rank for rank in ranks if rank.rank == hang.rank), None)
    if culprit is None:
        log, elsewhere = ranks[0].stacks if ranks else starter_log, spans_nodes and hang.rank is None
        return JobFailure(FailureKind.HANG, hang.rank, hang.message, log, may_lie_elsewhere=elsewhere)
    return JobFailure(FailureKind.HANG, culprit.rank, hang.message, culprit.stacks, hang.position)


def explain(job: EndedJob) -> JobFailure:
    """Finds the failure that caused all others, and adds advice if there is any."""
    if job.killed_by is not None and job.launcher is not None:
        message = f"the starter ({job.launcher}) was killed ({job.killed_by})"
        return JobFailure(FailureKind.LAUNCHER, None, message, job.starter_log)
    failure = _first_cause(job)
    ended_silently = failure.kind is FailureKind.SILENT
    advice = shared_memory.advice(failure.message, job.printed(), ended_silently=ended_silently)
    return replace(failure, message=failure.message + advice)


def _first_cause(job: EndedJob) -> JobFailure:
    """Finds the first cause.

    An error that a rank reported comes first, unless it only says that another rank has ended or does not answer.
    Then the cause is the rank that ended without a message, or else the one that reported no error.
    """
    failed = sorted(
        ((failure, rank) for rank in job.ranks if (failure := rank.failure())), key=lambda pair: pair[0].time
    )
    for failure, rank in failed:
        if not failure.is_consequence(job.signs):
            return _failure_of(rank, failure.kind, failure.message, rank.log)
    if (silent := job.silent) is not None:
        others = f"; rank {job.missing[0]} had not started" if job.missing else ""
        crash = silent.crash()
        how = f"crashed ({crash})" if crash else "ended without a message: it was killed, crashed or ran out of memory"
        found = _failure_of(silent, FailureKind.SILENT, how + others, silent.log)
        return replace(found, may_lie_elsewhere=job.spans_nodes and job.lost_another(silent))
    if failed and job.spans_nodes:
        # The rank that failed first is on another node: a rank without a message was ended by its starter.
        failure, rank = failed[0]
        return replace(_failure_of(rank, failure.kind, failure.message, rank.log), may_lie_elsewhere=True)
    if failed:
        return _awaited(*failed[0], job)
    lines = job.printed().strip().splitlines()
    reason = f": {lines[-1].strip()[:300]}" if lines else ""
    message = f"the starter ended with code {job.return_code}{reason}"
    return JobFailure(FailureKind.LAUNCHER, None, message, job.starter_log, may_lie_elsewhere=job.spans_nodes)


def _awaited(failure: RankFailure, rank: RankFiles, job: EndedJob) -> JobFailure:
    """Finds the rank that the first one to report an error has waited for."""
    waited = f"rank {rank.rank} waited for it without success ({failure.message[:120]})"
    if job.missing:
        return JobFailure(FailureKind.MISSING, job.missing[0], f"did not start: {waited}", job.starter_log)
    for stuck in job.ranks:
        if stuck.failure() is None and not stuck.succeeded():
            return _failure_of(stuck, FailureKind.STUCK, f"is stuck: {waited}", stuck.sigterm)
    return _failure_of(rank, failure.kind, failure.message, rank.log)


def _failure_of(rank: RankFiles, kind: FailureKind, message: str, log: Path) -> JobFailure:
    return JobFailure(kind, rank.rank, message, log, rank.position())
