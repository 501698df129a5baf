"""Several hosts on this machine: network namespaces with a limited bandwidth (network_namespaces(7), tc(8)).

Each node is a process tree in a network of its own: an address, a name and an interface that sends no faster than
--bandwidth allows. It sees what a host sees, so what works here works on as many hosts, except that all nodes share the
cores of this machine.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from pydantic import Field
from typing_extensions import override

from engines.following import Ended, Followed, exit_code_of
from engines.interface import Engine, EngineSettings
from launch.errors import UsageError
from launch.guardian import guarded
from launch.quantities import Bandwidth, Seconds, Share, format_bandwidth
from launch.signals import signals_raised
from launch.starters.environment import command_environment
from records.config import NETWORK_VARIABLE
from records.environment import num_cpus

_SCRIPT = Path(__file__).with_name("netns.sh")
_ADDRESS_OF_NODE_0 = "10.78.0.10"
# Addresses 10.78.0.10 to 10.78.0.99.
_MOST_NODES = 90
_POLL_SECONDS = 0.1
# Nodes that have met tell each other when one of them fails, and end within seconds; those that have not would wait.
_SECONDS_OF_GRACE = 20.0
# A bucket of tokens holds what is sent in so many seconds, and at least two of the largest packets.
_SECONDS_OF_BURST = 0.001
_LEAST_BURST = 128 * 1024
_LEAST_QUEUE = 4 * 2**20
_PROGRAMS = {"unshare": "util-linux", "ip": "iproute2", "tc": "iproute2"}


class NetnsSettings(EngineSettings):
    """What the network between the nodes is like."""

    bandwidth: Bandwidth | None = Field(
        None, description="what a node sends in a second at most, such as 100mbit or 10gbit (default: no limit)"
    )
    latency: Seconds | None = Field(None, description="how long a packet travels, such as 200us or 5ms (default: 0)")
    loss: Share | None = Field(None, description="the share of packets that are lost, such as 0.1% (default: none)")


def describe_network(num_nodes: int, settings: NetnsSettings) -> str:
    """Describes the network between so many nodes for the record of the run."""
    rate = "unlimited" if settings.bandwidth is None else format_bandwidth(settings.bandwidth)
    latency = f", {settings.latency * 1e6:g} us" if settings.latency else ""
    loss = f", {settings.loss:.3%} lost" if settings.loss else ""
    return f"{num_nodes} network namespaces, {rate}{latency}{loss}"


class Netns(Engine[NetnsSettings]):
    """Network namespaces on this machine."""

    name = "netns"
    summary = (
        "Hosts on this machine: network namespaces, with a bandwidth limit (Linux, as root or with user namespaces)."
    )
    Settings = NetnsSettings
    is_here = True
    gives_cores = False

    @override
    def check(self) -> None:
        if self.job.num_nodes > _MOST_NODES:
            raise UsageError(f"--num-nodes {self.job.num_nodes}: netns has room for {_MOST_NODES}; use fewer nodes")

    @override
    def script(self) -> str:
        return shlex.join(self._command())

    @override
    def run(self) -> int:
        followed, ended = Followed(self.job.logs), Ended(self.job.logs)
        stopped: list[signal.Signals] = []
        with guarded() as mark:
            lab = subprocess.Popen(
                self._command(),
                env={
                    **command_environment(),
                    **mark,
                    NETWORK_VARIABLE: describe_network(self.job.num_nodes, self.settings),
                },
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C reaches the nodes as SIGTERM, once
            )

            def pass_on(number: signal.Signals) -> None:
                stopped.append(number)
                lab.send_signal(signal.SIGTERM)

            with signals_raised(pass_on):
                while lab.poll() is None:
                    followed.show()
                    ended.look()
                    if ended.seconds_since_failure() > _SECONDS_OF_GRACE:
                        lab.send_signal(signal.SIGTERM)  # some node waits for one that never comes
                    if ended.seconds_since_failure() > 2 * _SECONDS_OF_GRACE:
                        break  # whatever is left is killed below
                    time.sleep(_POLL_SECONDS)
            followed.show()
            ended.look()
        if lab.wait() > 0 and not ended.all and not stopped:
            assert lab.stderr is not None
            last = (lab.stderr.read().strip().splitlines() or [f"exit code {lab.returncode}"])[-1]
            raise UsageError(f"--engine netns: the network could not be made ({last})")
        if not ended.all and ended.code == 0:  # it was ended before its nodes could say how they ended
            return exit_code_of([-stopped[0] if stopped else lab.returncode])
        return ended.code

    def _command(self) -> list[str]:
        # Each node would count all cores of the machine as its own.
        threads = self.job.run.threads_per_rank or max(1, num_cpus() // self.job.num_processes)
        job = replace(self.job, options=(*self.job.options, f"--threads-per-rank={threads}"))
        line = job.shell_line("$NODE_RANK", _ADDRESS_OF_NODE_0)
        inside = ["bash", str(_SCRIPT), str(self.job.num_nodes), self._limit(), str(self.job.output_dir), line]
        return [*_in_namespaces(), *inside]

    def _limit(self) -> str:
        """Returns the qdiscs of each node: what delays and loses packets, and within it what limits the bandwidth."""
        settings = self.settings
        qdiscs = []
        if settings.latency or settings.loss:
            delay = f"delay {settings.latency * 1e6:.3f}us " if settings.latency else ""
            loss = f"loss {settings.loss:.6%}" if settings.loss else ""
            qdiscs.append(f"root handle 1: netem {delay}{loss} limit 100000".replace("  ", " "))
        if settings.bandwidth is not None:
            burst = max(_LEAST_BURST, round(settings.bandwidth / 8 * _SECONDS_OF_BURST))
            where = "parent 1: handle 2:" if qdiscs else "root"
            queue = max(_LEAST_QUEUE, 4 * burst)
            qdiscs.append(f"{where} tbf rate {settings.bandwidth:.0f}bit burst {burst} limit {queue}")
        return ";".join(qdiscs)

    @override
    def check_here(self) -> None:
        for program, package in _PROGRAMS.items():
            if shutil.which(program, path=_path()) is None:
                raise UsageError(f"--engine netns: {program} is not installed; install {package}")
        # What netns.sh needs: in a container, a user namespace may lack the right to the last.
        tried = _try(
            "mount -t tmpfs tmpfs /run && ip link add br0 type bridge && ip netns add n0 && ip netns exec n0 true"
        )
        if tried is not None:
            raise UsageError(
                f"--engine netns: network namespaces cannot be made here ({tried}); run as root on Linux, in a "
                "container with the capability SYS_ADMIN"
            )
        if self.settings.latency or self.settings.loss:
            tried = _try("tc qdisc add dev lo root netem delay 1ms")
            if tried is not None:
                option = "--latency" if self.settings.latency else "--loss"
                raise UsageError(f"{option}: the kernel has no netem ({tried}); leave the option out")


def _in_namespaces() -> list[str]:
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *as_root, "--net", "--mount"]


def _path() -> str:
    return f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/sbin"


def _try(line: str) -> str | None:
    """Returns why a line of a shell fails in namespaces of its own; None if it does not."""
    done = subprocess.run(
        [*_in_namespaces(), "bash", "-c", line],
        env={**os.environ, "PATH": _path()},
        capture_output=True,
        text=True,
        check=False,
    )
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]
