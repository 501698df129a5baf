"""Hosts that Open MPI's mpirun reaches (https://docs.open-mpi.org/en/v5.0.x/man-openmpi/man1/mpirun.1.html).

mpirun starts one command on each host, over ssh or what OMPI_MCA_plm_rsh_agent names. The command starts the ranks of
its host as on any node, so that a job of several hosts works for every backend, whether MPI knows it or not.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self, override

from engines.following import Followed, exit_code_of
from engines.hosts import address_of, host_environment, on_host, told_codes
from engines.interface import Engine, EngineSettings
from engines.on_host import REFUSED
from launch.errors import UsageError, tell
from launch.guardian import guarded
from launch.nodes import Nodes, own_address
from launch.signals import signals_raised

_POLL_SECONDS = 0.1
# mpirun kills, after a second, what SIGTERM has not ended.
_SECONDS_TO_END = 5.0
# Inside a job of SLURM, mpirun reaches the nodes by srun, whose steps would otherwise wait for the cores of another.
_SHARED_STEPS = {"SLURM_OVERLAP": "1"}
_HOST = re.compile(r"([A-Za-z0-9][\w.-]*)(?::([1-9]\d*))?", re.ASCII)
_SLOTS = re.compile(r"\s+slots\s*=\s*")


class Host(NamedTuple):
    """A host, and the number of its ranks if the user gives one."""

    name: str
    slots: int | None


def _hosts(texts: list[str]) -> list[Host]:
    """Reads hosts, each written as NAME or NAME:SLOTS."""
    hosts = []
    for text in texts:
        found = _HOST.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"{text.strip()!r} is not a host and its number of ranks; write it as a:4")
        hosts.append(Host(found[1], int(found[2]) if found[2] else None))
    if not hosts:
        raise ValueError("names no host; give one, such as a:4")
    names = [host.name for host in hosts]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise ValueError(f"{twice} is named twice; name each host once")
    if len({host.slots for host in hosts}) > 1:
        listed = ", ".join(f"{host.name} {host.slots or 'none'}" for host in hosts)
        raise ValueError(f"the numbers of ranks differ ({listed}); give all hosts the same")
    return hosts


def _split(value: Any) -> Any:
    return _hosts(value.split(",")) if isinstance(value, str) else value


def _read(value: Any) -> Any:
    """Reads a host file as mpirun does (NAME slots=N), or as horovodrun does (NAME:N)."""
    try:
        lines = [line.partition("#")[0].strip() for line in Path(value).read_text().splitlines()]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"cannot be read ({getattr(error, 'strerror', None) or 'not text'})") from error
    return _hosts([_SLOTS.sub(":", line) for line in lines if line])


class MpiSettings(EngineSettings):
    """The hosts."""

    hosts: Annotated[list[Host], BeforeValidator(_split)] | None = Field(
        None,
        description="the hosts, and how many ranks each of them runs, such as a:4,b:4",
        json_schema_extra={"metavar": "HOSTS"},
    )
    hostfile: Annotated[tuple[Host, ...], BeforeValidator(_read)] | None = Field(
        None, description="file that names them instead, one in a line, such as: a slots=4"
    )

    @model_validator(mode="after")
    def _once(self) -> Self:
        if self.hosts is None and self.hostfile is None:
            raise ValueError("--hosts is missing; name the hosts, such as --hosts a:4,b:4, or give a --hostfile")
        if self.hosts is not None and self.hostfile is not None:
            raise ValueError("--hosts and --hostfile are both given; leave one of them out")
        return self

    @property
    def listed(self) -> list[Host]:
        """The hosts; the first is node 0."""
        return list(self.hosts or self.hostfile or ())

    @override
    def sizes(self) -> dict[str, int]:
        first, *_ = hosts = self.listed
        ranks = {} if first.slots is None else {"num_processes": first.slots * len(hosts)}
        return {"num_nodes": len(hosts), **ranks}


class Mpi(Engine[MpiSettings]):
    """``mpirun``, with one command of Lockstep on each host."""

    name = "mpi"
    summary = "Hosts that Open MPI's mpirun reaches, by ssh."
    Settings = MpiSettings
    gives_cores = False

    @override
    def check(self) -> None:
        address_of_first(self.settings.listed)

    @override
    def script(self) -> str:
        return " : \\\n  ".join(shlex.join(part) for part in self._parts())

    @override
    def check_here(self) -> None:
        if shutil.which("mpirun") is None:
            raise UsageError("--engine mpi: mpirun is not installed; install Open MPI (Debian: openmpi-bin)")

    @override
    def run(self) -> int:
        first, *others = self._parts()
        command = [*first, *(word for part in others for word in (":", *part))]
        log = self.job.output_dir / "mpirun.log"
        followed = Followed(self.job.logs)
        stopped: list[signal.Signals] = []
        with guarded() as mark, log.open("wb") as output:
            mpirun = subprocess.Popen(
                command,
                env={**os.environ, **_SHARED_STEPS, **host_environment(), **mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the nodes as SIGTERM, once
            )

            def pass_on(number: signal.Signals) -> None:
                stopped.append(number)
                # SIGTERM would let mpirun end all nodes within a second, before they have saved.
                mpirun.send_signal(signal.SIGUSR1)

            try:
                with signals_raised(pass_on):
                    while mpirun.poll() is None:
                        followed.show()
                        time.sleep(_POLL_SECONDS)
            finally:
                mpirun.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    mpirun.wait(_SECONDS_TO_END)
            followed.show()
        return self._judge(log, stopped)

    def _judge(self, log: Path, stopped: list[signal.Signals]) -> int:
        """Returns the exit code of the job, from what the nodes have told mpirun.

        Args:
            log: The file with that.
            stopped: The signals by which this command was asked to stop.
        """
        said = log.read_text(errors="replace")
        codes = told_codes(said)
        if REFUSED in codes.values():
            return REFUSED
        missing = [str(node) for node in range(self.job.num_nodes) if node not in codes]
        if not missing:
            return exit_code_of(list(codes.values()))
        if stopped and not any(f"node {node} begins\n" in said for node in missing):  # it ended them before they began
            return exit_code_of([*codes.values(), -stopped[0]])
        # Open MPI puts its own messages between lines of dashes; what ssh says comes first.
        of_others = re.sub(r"(?m)^node \d+ (begins|ends with \d+)$", "", said)
        paragraphs = [" ".join(text.split()) for text in re.split(r"(?m)^-+$", of_others)]
        reason = next(filter(None, paragraphs), "no reason given")
        if " begins\n" not in said:
            raise UsageError(f"--engine mpi: mpirun could not start the nodes: {reason[:300]} (more in {log})")
        tell(f"mpirun lost node{'s' * (len(missing) > 1)} {', '.join(missing)}: {reason[:300]} (more in {log})")
        return exit_code_of([*codes.values(), 1])

    def _parts(self) -> list[list[str]]:
        """Returns mpirun's command line in parts, one for each host, so that the hosts are numbered in their order."""
        address = address_of_first(self.settings.listed)
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        passed_on = [word for name in sorted(host_environment()) for word in ("-x", name)]
        parts = []
        for node_rank, host in enumerate(self.settings.listed):
            words = on_host(self.job, node_rank, self.job.words(node_rank, address))
            parts.append(["-np", "1", "--host", host.name, *passed_on, *words])
        return [["mpirun", *as_root, "--bind-to", "none", *parts[0]], *parts[1:]]


def address_of_first(hosts: list[Host]) -> str:
    """Returns an address at which the others reach the first host.

    Raises:
        UsageError: The name of a host cannot be resolved, or no route leads to it.
    """
    host = hosts[0]
    try:
        address = address_of(host.name)
        if len(hosts) > 1 and address.startswith("127."):
            # This machine, whose own name may lead to its loopback interface.
            host = hosts[1]
            address = own_address(Nodes(len(hosts), 0, address_of(host.name)))
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--engine mpi: the host {host.name} cannot be found ({error}); give its address") from error
    return address
