"""An entrant that stays alive while others race: it is started, given turns, rests in between, and ends by itself."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from compare.race.turns import Hello, Turn, TurnTaken, received, send
from launch.errors import one_line
from launch.guardian import __file__ as guardian_file
from launch.guardian import guarded

if TYPE_CHECKING:
    import psutil

_Message = TypeVar("_Message", Hello, TurnTaken)

# What a rank gets instead of one more turn.
_NO_MORE = Turn(warm_through=0, through=0)
_POLL_SECONDS = 0.2
# Turns are shorter, even of slow models.
_SECONDS_OF_SILENCE = 10.0


class EntrantEnded(Exception):
    """An entrant has ended before its last turn; its record or what it printed says why."""


class LiveEntrant:
    """One start of an entrant.

    Attributes:
        steps_per_epoch: The number of steps of an epoch; 0 before the entrant is ready.
    """

    def __init__(
        self,
        arguments: list[str],
        *,
        num_processes: int,
        address: Path,
        environment: dict[str, str],
        rank_program: str = "compare.race.rank",
    ) -> None:
        """Starts it.

        Args:
            arguments: The backend, and the options of the run.
            num_processes: The number of its ranks.
            address: Where to create the socket that its ranks connect to.
            environment: The environment of its command line.
            rank_program: The module that each of its ranks runs.
        """
        import psutil

        self.steps_per_epoch = 0
        self._num_processes = num_processes
        self._connections: dict[int, socket.socket] = {}
        self._rank_pids: set[int] = set()
        self._resting: list[psutil.Process] = []  # all of its processes, as they were when it was last stopped
        self._resources = contextlib.ExitStack()
        with self._resources:
            self._listener = self._resources.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind(str(address))
            self._listener.listen(num_processes)
            mark = self._resources.enter_context(guarded())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "compare.race.entrant", rank_program, str(address), *arguments],
                env={**environment, **mark},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            self._launcher = psutil.Process(self._process.pid)
            # Whether a process is one, or belongs to one, by its number.
            self._guardians: dict[int, bool] = {}
            self._of_ranks: dict[int, bool] = {}
            self._resources = self._resources.pop_all()

    def __enter__(self) -> LiveEntrant:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends whatever is left of it."""
        self.terminate()
        if self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=20)
        for connection in self._connections.values():
            connection.close()
        self._resources.close()
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    def terminate(self) -> None:
        """Asks it to end at once, without waiting for that."""
        self._continue()
        if self._process.poll() is None:
            self._process.terminate()

    def get_ready(self) -> None:
        """Waits until all ranks are ready for their first turn, and lets them rest.

        Raises:
            EntrantEnded: It has ended before.
        """
        while len(self._connections) < self._num_processes:
            for _ in self._readable([self._listener]):
                connection, _ = self._listener.accept()
                hello = self._receive(Hello, connection)
                self._connections[hello.rank] = connection
                self._rank_pids.add(hello.pid)
                self.steps_per_epoch = hello.steps_per_epoch
        self.rest()

    def take(self, turn: Turn) -> list[TurnTaken]:
        """Gives the entrant a turn, and lets it rest again.

        Only its ranks go on, and what they have started: launchers poll, which would disturb the ranks where these take
        all cores. If the ranks do not answer, the launcher goes on, too, and finds out which of them hangs.

        Returns:
            What each rank has measured, in the order of the ranks.

        Raises:
            EntrantEnded: It has ended before all ranks had taken the turn.
        """
        self._send(signal.SIGCONT, [process for process in self._resting if self._belongs_to_a_rank(process)])
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # a rank that is gone is noticed below
                send(connection, turn)
        taken: dict[int, TurnTaken] = {}
        waiting = {connection: rank for rank, connection in self._connections.items()}
        while waiting:
            for connection in self._readable(list(waiting)):
                taken[waiting.pop(connection)] = self._receive(TurnTaken, connection)
        self.rest()
        return [taken[rank] for rank in sorted(taken)]

    def rest(self) -> None:
        """Stops all its processes, the launcher first: it polls, and so do the threads of some libraries."""
        self._resting = self._processes()
        self._send(signal.SIGSTOP, self._resting)

    def cpu_seconds(self) -> float:
        """Returns the processor time that its processes have taken, while it rests."""
        import psutil

        total = 0.0
        for process in self._resting:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def let_go(self) -> None:
        """Lets it come to its end after its last turn, without waiting for that."""
        self._continue()
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # a rank that is gone has come to its end
                send(connection, _NO_MORE)

    def end(self) -> str | None:
        """Waits for its end after its last turn; returns the last line that it printed if it failed, else None."""
        self.let_go()
        _, errors = self._process.communicate()
        if self._process.returncode == 0:
            return None
        last = (errors.strip().splitlines() or [""])[-1].removeprefix("lockstep: ")
        return one_line(last) or f"it ended with exit code {self._process.returncode}"

    def _readable(self, sockets: list[socket.socket]) -> Iterator[socket.socket]:
        """Yields sockets that can be read, after waiting for the first.

        Raises:
            EntrantEnded: The entrant's command line has ended.
        """
        silent_since = time.monotonic()
        while True:
            readable, _, _ = select.select(sockets, [], [], _POLL_SECONDS)
            if readable:
                yield from readable
                return
            if self._process.poll() is not None:
                raise EntrantEnded
            if time.monotonic() - silent_since > _SECONDS_OF_SILENCE:
                self._continue()

    def _receive(self, kind: type[_Message], connection: socket.socket) -> _Message:
        """Returns the message of a rank.

        Raises:
            EntrantEnded: The rank has ended; its launcher ends the others.
        """
        line = b""
        while not line.endswith(b"\n"):
            try:
                part = connection.recv(4096)
            except ConnectionResetError:  # it ended before it had read what it was sent
                part = b""
            if not part:
                raise EntrantEnded
            line += part
        return received(kind, line)

    def _continue(self) -> None:
        """Continues all its processes, the launcher last, or its watchdog would see that the ranks are stopped."""
        self._send(signal.SIGCONT, self._processes()[::-1])

    @staticmethod
    def _send(number: signal.Signals, processes: list[psutil.Process]) -> None:
        import psutil

        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def _processes(self) -> list[psutil.Process]:
        """Returns the launcher, which comes first, and all that it has started but its guardian.

        The guardian takes no time, and must be able to end the ranks when the launcher is killed.
        """
        import psutil

        try:
            processes = [self._launcher, *self._launcher.children(recursive=True)]
        except psutil.Error:
            return []
        return [process for process in processes if not self._is_guardian(process)]

    def _belongs_to_a_rank(self, process: psutil.Process) -> bool:
        import psutil

        if process.pid not in self._of_ranks:
            with contextlib.suppress(psutil.Error):
                ancestors = {process.pid, *(parent.pid for parent in process.parents())}
                self._of_ranks[process.pid] = not self._rank_pids.isdisjoint(ancestors)
        return self._of_ranks.get(process.pid, False)

    def _is_guardian(self, process: psutil.Process) -> bool:
        import psutil

        if process.pid not in self._guardians:
            with contextlib.suppress(psutil.Error):
                self._guardians[process.pid] = guardian_file in process.cmdline()
        return self._guardians.get(process.pid, False)


def step_seconds_of(taken: list[TurnTaken]) -> list[float]:
    """Returns the seconds in which all ranks together have taken each timed step of a turn."""
    ends = [max(one.began for one in taken), *(max(ranks) for ranks in zip(*(one.ends for one in taken), strict=True))]
    return [end - begin for begin, end in pairwise(ends)]
