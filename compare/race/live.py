"""An entrant that stays alive while others race: it is started, given turns, rests in between, and ends by itself."""

from __future__ import annotations

import contextlib
import operator
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Literal, TypeVar

from compare.race.messages import Hello, Listener, Order, Rested, Turn, TurnTaken, received, send
from compare.race.process_tree import ProcessTree, foreign_share_of
from launch.errors import one_line
from launch.guardian import guarded

_Message = TypeVar("_Message", Hello, TurnTaken, Rested)

# What a rank gets instead of one more turn.
_NO_MORE = Turn(warm_through=0, through=0)
_POLL_SECONDS = 0.2
# Most turns are much shorter. That of a slow model has four steps at least, in the middle of which the launcher is not
# to go on, and poll: such a turn may last several times as long as its steps took in the turn before.
_SECONDS_OF_SILENCE = 10.0
_TIMES_AS_LONG = 3.0
# What keepers of nodes have in their command lines.
_KEEPER = "compare.race.keeper"


class EntrantEnded(Exception):
    """An entrant has ended before its last turn; its record or what it printed says why."""


class LiveEntrant:
    """One start of an entrant.

    Its processes on this machine are stopped and continued by the race itself; where an engine starts its ranks on
    other machines, those of each node by a keeper (compare/race/keeper.py).

    Attributes:
        steps_per_epoch: The number of steps of an epoch; 0 before the entrant is ready.
        foreign_share: The share of the cores that other programs took in the last turn, on the machine where they took
            most.
        cores: The cores that its ranks were moved to for the last turn; empty if they stay where they are.
    """

    def __init__(
        self,
        arguments: list[str],
        *,
        num_processes: int,
        address: Path | str,
        environment: dict[str, str],
        rank_program: str = "compare.race.rank",
        num_keepers: int = 0,
    ) -> None:
        """Starts it.

        Args:
            arguments: The backend, and the options of the run.
            num_processes: The number of its ranks.
            address: Where to create the socket that its ranks connect to, or the address of this machine that others
                reach.
            environment: The environment of its command line.
            rank_program: The module that each of its ranks runs.
            num_keepers: The number of its nodes on other machines.
        """
        self.steps_per_epoch, self.foreign_share = 0, 0.0
        self.cores: list[int] = []
        self._num_processes, self._num_keepers = num_processes, num_keepers
        self._taken, self._step_seconds = 0, 0.0  # of the steps so far, and of one of the last turn
        self._connections: dict[int, socket.socket] = {}
        # By their nodes: who stops and continues the processes there, and those that are ranks.
        self._keepers: dict[str, socket.socket] = {}
        self._ranks_elsewhere: dict[str, list[int]] = {}
        self._resources = contextlib.ExitStack()
        with self._resources:
            self._listener = Listener(address, num_processes + num_keepers)
            self._resources.enter_context(self._listener.socket)
            mark = self._resources.enter_context(guarded())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "compare.race.entrant", rank_program, self._listener.address, *arguments],
                env={**environment, **mark},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            self._tree = ProcessTree(self._process.pid, without=[_KEEPER] if num_keepers else ())
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
        for connection in (*self._connections.values(), *self._keepers.values()):
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
        while len(self._connections) < self._num_processes or len(self._keepers) < self._num_keepers:
            for _ in self._readable([self._listener.socket]):
                connection = self._listener.accept()
                if connection is not None:
                    self._welcome(self._receive(Hello, connection), connection)
        self.rest()

    def _welcome(self, hello: Hello, connection: socket.socket) -> None:
        """Notes who has connected; a keeper may come before the ranks of its node, or after them."""
        if hello.rank is None:
            self._keepers[hello.node] = connection
        else:
            self._connections[hello.rank] = connection
            self.steps_per_epoch = hello.steps_per_epoch
            if self._num_keepers:
                self._ranks_elsewhere.setdefault(hello.node, []).append(hello.pid)
            else:
                self._tree.rank_pids.add(hello.pid)

    def take(self, turn: Turn, number: int = 0) -> list[TurnTaken]:
        """Gives the entrant a turn, and lets it rest again.

        Only its ranks go on, and what they have started: launchers poll, which would disturb the ranks where these take
        all cores. If the ranks do not answer for long, the launcher goes on, too, and finds out which of them hangs.

        Args:
            turn: The steps to take.
            number: Says on which cores ranks compute that need fewer than there are, such as the number of the round.

        Returns:
            What each rank has measured, in the order of the ranks; as if all machines had the same clock.

        Raises:
            EntrantEnded: It has ended before all ranks had taken the turn.
        """
        ranks = [self._connections[rank] for rank in sorted(self._connections)]
        self.cores = self._tree.race(number)
        self._order("race")
        num_steps, began = turn.through - self._taken, time.monotonic()
        for connection in ranks:
            with contextlib.suppress(OSError):  # a rank that is gone is noticed below
                send(connection, turn)
        patience = max(_SECONDS_OF_SILENCE, _TIMES_AS_LONG * num_steps * self._step_seconds)
        taken = self._answers(TurnTaken, ranks, patience)
        self._taken, self._step_seconds = turn.through, (time.monotonic() - began) / max(1, num_steps)
        self.rest()
        return on_one_clock(taken) if self._keepers else taken

    def rest(self) -> None:
        """Stops all its processes.

        Raises:
            EntrantEnded: It has ended.
        """
        self._order("rest")
        elsewhere = self._answers(Rested, list(self._keepers.values()))
        here = self._tree.rest()
        self.foreign_share = foreign_share_of(elsewhere, race=here) if elsewhere else foreign_share_of([here])

    def cpu_seconds(self) -> float:
        """Returns the processor time that its processes on this machine have taken, while it rests."""
        return self._tree.cpu_seconds()

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

    def _answers(
        self, kind: type[_Message], connections: list[socket.socket], patience: float = _SECONDS_OF_SILENCE
    ) -> list[_Message]:
        """Returns one message from each connection, in their order, whichever comes first.

        Args:
            kind: What is expected.
            connections: From whom.
            patience: How long nobody need answer, in seconds.

        Raises:
            EntrantEnded: Somebody has ended.
        """
        answers: dict[socket.socket, _Message] = {}
        while missing := [connection for connection in connections if connection not in answers]:
            for connection in self._readable(missing, patience, resting=kind is Rested):
                answers[connection] = self._receive(kind, connection)
        return [answers[connection] for connection in connections]

    def _readable(
        self, sockets: list[socket.socket], patience: float = _SECONDS_OF_SILENCE, *, resting: bool = False
    ) -> Iterator[socket.socket]:
        """Yields sockets that can be read, after waiting for the first.

        If nobody answers, all processes go on, except those that have been asked to rest: whoever watches the ranks has
        to find out why.

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
            if time.monotonic() - silent_since > patience:
                silent_since = time.monotonic()
                if resting:
                    self._tree.go_on()
                else:
                    self._continue()

    def _receive(self, kind: type[_Message], connection: socket.socket) -> _Message:
        """Returns the message of a rank or a keeper.

        Raises:
            EntrantEnded: It has ended; the launcher ends the others.
        """
        line = b""
        while not line.endswith(b"\n"):
            try:
                part = connection.recv(4096)
            except OSError:  # it ended before it had read what it was sent, or its machine is gone
                part = b""
            if not part:
                raise EntrantEnded
            line += part
        return received(kind, line)

    def _continue(self) -> None:
        """Continues all its processes."""
        self._order("go on")
        self._tree.go_on()

    def _order(self, do: Literal["rest", "race", "go on"]) -> None:
        for node, keeper in self._keepers.items():
            with contextlib.suppress(OSError):  # a keeper that is gone is noticed where it should answer
                send(keeper, Order(do, self._ranks_elsewhere.get(node, [])))


def on_one_clock(taken: list[TurnTaken]) -> list[TurnTaken]:
    """Returns what ranks on several machines have measured as if their clocks showed the same time.

    All ranks end a step together, with an all-reduce, so clocks differ by as much as what is read of them then.

    Args:
        taken: What each rank has measured.
    """
    first, *_ = ((one.began, *one.ends) for one in taken)
    shifts = [median(map(operator.sub, (one.began, *one.ends), first)) for one in taken]
    return [
        replace(one, began=one.began - shift, ends=[end - shift for end in one.ends])
        for one, shift in zip(taken, shifts, strict=True)
    ]


def step_seconds_of(taken: list[TurnTaken]) -> list[float]:
    """Returns the seconds in which all ranks together have taken each timed step of a turn."""
    ends = [max(one.began for one in taken), *(max(ranks) for ranks in zip(*(one.ends for one in taken), strict=True))]
    return [end - begin for begin, end in pairwise(ends)]
