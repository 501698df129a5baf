"""Asking the server: for the command line, and for ranks in place of a starter's launcher."""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from filelock import FileLock

from backends.capabilities import Signs
from contract import jobs as contract_jobs
from launch import own_command
from launch.job import Job, compose_job
from launch.signals import Interrupted
from launch.starters.interface import PROJECT_DIRECTORY, Ranks, Starter
from launch.starters.registry import STARTERS
from tests.forked.ranks import START_METHODS
from tests.forked.server import send

_STARTER = Path(__file__).with_name("starter.py")
# What runs a command where nothing is forked.
_run_apart, _run_job = own_command.run_command, contract_jobs._run


# Where the server of this test session listens, set by its first process for its workers.
SESSION_VARIABLE = "LOCKSTEP_TEST_SESSION"


@functools.cache
def server_socket() -> str:
    """Starts the test session's server, unless another worker has; returns where it listens."""
    directory = Path(os.environ[SESSION_VARIABLE])
    path = directory / "socket"
    with FileLock(directory / "lock"):
        if path.exists():
            return str(path)
        session = directory.name.split("-")[-1]
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.forked.server", str(path), session],
            cwd=PROJECT_DIRECTORY,
            # Commands and ranks get an environment with each request. Only the allocator stays as it is set here: where
            # malloc asks the system for large pages, fewer of them are copied and filled in a fork.
            env={
                **os.environ,
                "PYTHONPATH": str(PROJECT_DIRECTORY),
                "OMP_NUM_THREADS": "1",
                "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # what libraries say when they are loaded
            start_new_session=True,
        )
        deadline = time.monotonic() + 300
        while not path.exists():
            assert server.poll() is None, "the server of forked processes has ended"
            assert time.monotonic() < deadline, "the server of forked processes does not start"
            time.sleep(0.02)
    return str(path)


@contextmanager
def session() -> Iterator[None]:
    """Names a place for this process's server, which is started when it is needed and ends with this process."""
    with tempfile.TemporaryDirectory(prefix="lockstep-tests-", suffix=f"-{os.getpid()}") as directory:
        os.environ[SESSION_VARIABLE] = directory
        yield


class ForkedJob:
    """A command line that runs in a fork of the server; like `subprocess.Popen`, with text in temporary files."""

    def __init__(
        self,
        arguments: list[str],
        *,
        environment: dict[str, str],
        directory: Path | None,
        forked_ranks: bool = True,
        module: Sequence[str] = own_command.PROGRAM,
    ) -> None:
        self.args = arguments
        self.returncode: int | None = None
        self._output, self._errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 (communicate closes them)
        self._connection = socket.socket(socket.AF_UNIX)
        path = server_socket()
        self._connection.connect(path)
        request = {
            "what": "module",
            "environment": environment,
            "directory": str(directory or Path.cwd()),
            "arguments": [*module, *arguments],
            "forked_ranks": forked_ranks,
            "socket": path,
        }
        with Path(os.devnull).open("rb") as nothing:
            send(self._connection, request, [nothing.fileno(), self._output.fileno(), self._errors.fileno()])
        self._answers = self._connection.makefile("rb")
        self.pid = int(self._answers.readline())

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 600) -> int:
        """Waits for the end and returns the exit code; a job that takes too long is ended."""
        if self.returncode is None:
            try:
                if not select.select([self._connection], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout)
                self.returncode = int(self._answers.readline())
            finally:
                self._answers.close()
                self._connection.close()
        return self.returncode

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        """Waits for the end and returns what it printed."""
        self.wait(timeout)
        with self._output, self._errors:
            self._output.seek(0)
            self._errors.seek(0)
            return self._output.read().decode(), self._errors.read().decode()


def interpreter() -> str:
    """What to start in place of the Python interpreter, so that a module runs in a fork of the server."""
    return str(Path(server_socket()).with_name("python"))


def forked_lockstep() -> list[str]:
    """The words of the command line, whose processes are forks of the server, launchers included."""
    return [interpreter(), "-m", "launch"]


def launched_job(starter: Starter, ranks: Ranks, run_directory: Path, signs: Signs) -> Job:
    """Composes the job of the library's own launcher; it and the ranks are forks of the server."""
    job = compose_job(starter, ranks, run_directory, signs)
    return replace(job, command=[interpreter() if word == sys.executable else word for word in job.command])


def forked_job(starter: Starter, ranks: Ranks, run_directory: Path, signs: Signs) -> Job:
    """Composes the job that has the server fork these ranks."""
    job = compose_job(starter, ranks, run_directory, signs)
    return replace(job, command=_forked_command(starter, ranks, server_socket()), launcher=None)


def _forked_command(starter: Starter, ranks: Ranks, path: str) -> list[str]:
    words = [path, starter.name, str(ranks.num_processes), *starter.program(ranks)]
    return [sys.executable, "-S", "-E", str(_STARTER), *words]


def fork_what_follows(path: str) -> None:
    """Lets this process, which runs the command line, have its ranks and the commands that it runs forked."""
    os.environ[SESSION_VARIABLE] = str(Path(path).parent)
    own_command.run_command = _run_forked
    contract_jobs._run = run_job_of_the_contract
    for name in START_METHODS:
        starter = STARTERS[name]

        def command(ranks: Ranks, starter: Starter = starter, original: Any = starter.command) -> list[str]:
            return original(ranks) if ranks.nodes.num_nodes > 1 else _forked_command(starter, ranks, path)

        # What starts the ranks is no launcher whose name anybody knows.
        vars(starter).update(command=command, launcher=None)


def run_job_of_the_contract(
    adapter: str, working_directory: Path, *arguments: Any, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a job for a clause of the contract; its command, launchers and ranks are forks, except for two jobs.

    A hostile environment is one for the imports of libraries, and what a killed rank leaves behind is known by the
    environment that it was started with.
    """
    own = contract_jobs.LOCKSTEP
    if "HF_HOME" not in variables and "is-killed" not in arguments:
        contract_jobs.LOCKSTEP = tuple(forked_lockstep())
    try:
        return _run_job(adapter, working_directory, *arguments, **variables)
    finally:
        contract_jobs.LOCKSTEP = own


def _run_forked(
    arguments: list[str],
    variables: Mapping[str, str] = MappingProxyType({}),
    *,
    module: Sequence[str] = own_command.PROGRAM,
) -> subprocess.CompletedProcess[str]:
    if module[0] == "compare.race.entrant":  # it may be a peer, whose library no process has loaded
        return _run_apart(arguments, variables, module=module)
    environment = {**os.environ, **variables}
    environment.pop("LOCKSTEP_STARTED_AT", None)
    job = ForkedJob(arguments, environment=environment, directory=None, module=module)
    try:
        output, errors = job.communicate()
    except Interrupted:
        job.terminate()
        job.communicate()
        raise
    return subprocess.CompletedProcess(arguments, job.returncode, output, errors)
