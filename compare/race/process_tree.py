"""The processes of an entrant on one machine, which rest as long as others race."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Sequence
from statistics import mean
from typing import TYPE_CHECKING

from compare.race.machine import BusyCores, own_seconds
from compare.race.messages import Rested
from compare.race.rotation import Rotation
from launch.guardian import __file__ as guardian_file
from records.environment import boot_id

if TYPE_CHECKING:
    import psutil


class ProcessTree:
    """A process, and all that it has started but the guardians, which must be able to end the ranks.

    Attributes:
        rank_pids: The processes of its ranks, once they are known.
    """

    def __init__(self, pid: int, without: Sequence[str] = ()) -> None:
        """Nothing is stopped yet.

        Args:
            pid: The process.
            without: Words; a process with one of them in its command line is left out, with all that it has started.
        """
        import psutil

        self.rank_pids: set[int] = set()
        self._root = psutil.Process(pid)
        self._without = without
        self._resting: list[psutil.Process] = []  # all processes, as they were when they were last stopped
        # Whether a process is one, or belongs to one, by its number.
        self._left_out: dict[int, bool] = {}
        self._of_ranks: dict[int, bool] = {}
        self._cores, self._known_seconds = BusyCores(), 0.0
        self._rotation = Rotation()

    def rest(self) -> Rested:
        """Stops all processes, the launcher first: it polls, and so do the threads of some libraries.

        Returns:
            How busy the machine was since they were last let go on; this process, which lets them, belongs to them.
        """
        self._resting = self._processes()
        _send(signal.SIGSTOP, self._resting)
        own = self.cpu_seconds() + own_seconds() - self._known_seconds
        return Rested(boot_id() or "", self._cores.share(), self._cores.share_of(own))

    def race(self, number: int = 0) -> list[int]:
        """Lets the ranks go on, and what they have started: launchers poll, which would disturb the ranks.

        Args:
            number: The number of the round.

        Returns:
            The cores that the ranks were moved to for this round; nothing if they stay where they are.
        """
        ranks = [process for process in self._resting if self._belongs_to_a_rank(process)]
        cores = self._rotation.move([process.pid for process in ranks], number)
        self._cores = BusyCores()
        self._known_seconds = own_seconds() + self.cpu_seconds()  # this process has been observed from here on
        _send(signal.SIGCONT, ranks)
        return cores

    def go_on(self) -> None:
        """Lets all processes go on, the launcher last, or its watchdog would see that the ranks are stopped."""
        _send(signal.SIGCONT, self._processes()[::-1])

    def cpu_seconds(self) -> float:
        """Returns the processor time that the processes have taken, while they rest.

        What has ended counts as well, such as workers that load the data of an epoch: its time goes over to the process
        that has waited for its end, and until then it is a process of its own (proc_pid_stat(5)).
        """
        import psutil

        total = 0.0
        for process in self._resting:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def _processes(self) -> list[psutil.Process]:
        """Returns the root, which comes first, and all that it has started."""
        import psutil

        try:
            children = self._root.children(recursive=True)
        except psutil.Error:
            return []
        return [self._root, *(process for process in children if not self._is_left_out(process))]

    def _belongs_to_a_rank(self, process: psutil.Process) -> bool:
        import psutil

        if process.pid not in self._of_ranks:
            with contextlib.suppress(psutil.Error):
                ancestors = {process.pid, *(parent.pid for parent in process.parents())}
                self._of_ranks[process.pid] = not self.rank_pids.isdisjoint(ancestors)
        return self._of_ranks.get(process.pid, False)

    def _is_left_out(self, process: psutil.Process) -> bool:
        """Whether a process is a guardian, or below one that is left out."""
        import psutil

        if process.pid not in self._left_out:
            with contextlib.suppress(psutil.Error):
                self._left_out[process.pid] = guardian_file in process.cmdline() or (
                    bool(self._without) and any(map(self._is_named, [process, *process.parents()]))
                )
        return self._left_out.get(process.pid, False)

    def _is_named(self, process: psutil.Process) -> bool:
        import psutil

        with contextlib.suppress(psutil.Error):
            return process.pid != self._root.pid and any(word in process.cmdline() for word in self._without)
        return False


def foreign_share_of(nodes: Iterable[Rested], race: Rested | None = None) -> float:
    """Returns the share of the cores that other programs took while an entrant raced: that of the busiest machine.

    It may lie below 0, since the kernel counts in hundredths of a second. Of many turns, the mean is right.

    Args:
        nodes: The nodes of the entrant's ranks.
        race: The race itself, with the command that reaches the nodes, where nodes do not count these as their own.
    """
    machines: dict[str, list[Rested]] = {}
    for one in nodes:
        machines.setdefault(one.machine, []).append(one)
    if race is not None and race.machine in machines:  # elsewhere, it takes nothing from ranks
        machines[race.machine].append(race)
    return max(
        mean(one.busy_share for one in machine) - sum(one.own_share for one in machine) for machine in machines.values()
    )


def _send(number: signal.Signals, processes: list[psutil.Process]) -> None:
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
