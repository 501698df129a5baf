"""A Ray cluster (https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html).

Each node of the job is an actor in a bundle of one placement group, so that all nodes start together or none does. An
actor runs the command of its node, which starts the ranks: they need not be actors themselves, and every backend runs
as it does elsewhere. Ray decides where; it gives the actor processors and GPUs, and the command sees those only.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import re
import shlex
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator
from typing_extensions import override

from engines.following import Followed, exit_code_of
from engines.hosts import host_environment, on_host, told_codes
from engines.interface import Engine, EngineSettings, check_node
from engines.on_host import REFUSED
from launch.errors import UsageError, one_line, tell
from launch.signals import signals_raised

_POLL_SECONDS = 0.1
_SECONDS_TO_CONNECT = 10.0
# A cluster that has room gives it within a second.
_SECONDS_TO_WAIT_SILENTLY = 5.0
# How long nodes may take to end after another one was lost.
_SECONDS_TO_END = 30.0
# Ray chooses the GPUs.
_OF_RAY_ALONE = "CUDA_"
_STRATEGIES = {"spread": "STRICT_SPREAD", "pack": "PACK"}
_ADDRESS = re.compile(r"([A-Za-z0-9][\w.-]*):(\d{1,5})", re.ASCII)
_ON_THE_CLUSTER = "ADDRESS_OF_NODE_0"


class RaySettings(EngineSettings):
    """The cluster, and what each node takes of it."""

    address: str | None = Field(
        None, description="where the head of the cluster listens, such as 10.0.0.1:6379 (default: the one found here)"
    )
    placement: Literal["spread", "pack"] = Field(
        "spread", description="whether each node gets a machine of its own, or as few machines are used as have room"
    )
    cpus_per_node: int | None = Field(
        None, ge=1, description="processors of a node (default: one for each thread of its ranks)"
    )
    gpus_per_node: int = Field(0, ge=0, description="GPUs of a node")

    @property
    @override
    def num_gpus(self) -> int:
        return self.gpus_per_node

    @property
    @override
    def num_cpus(self) -> int | None:
        return self.cpus_per_node

    @field_validator("address")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None and not _ADDRESS.fullmatch(value):
            raise ValueError("is not an address of a cluster's head; write it as 10.0.0.1:6379")
        return value


class Ray(Engine[RaySettings]):
    """One actor for each node."""

    name = "ray"
    summary = "A Ray cluster: each node is an actor in a placement group."
    Settings = RaySettings

    @override
    def check(self) -> None:
        settings = self.settings
        check_node(self.job, num_gpus=settings.num_gpus, num_cpus=settings.cpus_per_node, option="--cpus-per-node")

    @override
    def script(self) -> str:
        bundles = f"{self.job.num_nodes} x {self._bundle()}, {_STRATEGIES[self.settings.placement]}"
        return "\n".join(
            [f"# placement group: {bundles}", *(shlex.join(line) for line in self._commands(_ON_THE_CLUSTER))]
        )

    @override
    def check_here(self) -> None:
        _library()

    @override
    def run(self) -> int:
        ray = _library()
        with signals_raised(), _connected(ray, self.settings.address), self._placed(ray) as nodes:
            try:
                address, port = _first_answer(ray, nodes)
            except ray.exceptions.RayError as error:
                raise UsageError(f"--engine ray: the nodes cannot be started ({one_line(error)})") from error
            return self._run_on(ray, nodes, self._commands(address, port))

    def _run_on(self, ray: Any, nodes: list[Any], commands: list[list[str]]) -> int:
        """Runs the commands by the actors and returns the exit code of the job."""
        followed = Followed(self.job.logs)
        environment = {name: value for name, value in host_environment().items() if not name.startswith(_OF_RAY_ALONE)}
        started = [
            node.run.remote(words, environment, str(Path.cwd())) for node, words in zip(nodes, commands, strict=True)
        ]
        running = {one: rank for rank, one in enumerate(started)}
        codes: dict[int, int] = {}
        signals: list[signal.Signals] = []
        deadline = math.inf
        with signals_raised(signals.append):
            while running and time.monotonic() < deadline:
                ended, _ = ray.wait(list(running), timeout=_POLL_SECONDS)
                followed.show()
                stops = bool(signals)
                for rank in map(running.pop, ended):
                    code = _code_of(ray, started[rank], rank)
                    codes[rank] = 1 if code is None else code
                    # The others would wait for a node in vain that was lost or has refused its options.
                    stops |= code in (REFUSED, None)
                if stops and deadline == math.inf:
                    for rank in running.values():
                        nodes[rank].stop.remote()
                    deadline = math.inf if signals else time.monotonic() + _SECONDS_TO_END
                    signals.clear()
        followed.show()
        return REFUSED if REFUSED in codes.values() else exit_code_of(list(codes.values()))

    def _bundle(self) -> dict[str, int]:
        threads = self.job.run.threads_per_rank or 1
        cpus = self.settings.cpus_per_node or self.job.num_local_processes * threads
        return {"CPU": cpus, **({"GPU": self.settings.gpus_per_node} if self.settings.gpus_per_node else {})}

    def _commands(self, address: str, port: int | None = None) -> list[list[str]]:
        """Returns what each actor runs."""
        # The command would count all cores of the machine as its own.
        threads = self.job.run.threads_per_rank or self._bundle()["CPU"] // self.job.num_local_processes
        options = [*self.job.options, f"--threads-per-rank={threads}"]
        if port is not None and self.job.num_nodes > 1 and self.job.run.master_port is None:
            options.append(f"--master-port={port}")  # another job may have the usual one
        job = replace(self.job, options=tuple(options))
        return [on_host(job, rank, job.words(rank, address)) for rank in range(job.num_nodes)]

    @contextlib.contextmanager
    def _placed(self, ray: Any) -> Iterator[list[Any]]:
        """Yields the actors, once the cluster has room for all of them."""
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._bundle()
        group = placement_group([bundle] * self.job.num_nodes, strategy=_STRATEGIES[self.settings.placement])
        try:
            if not group.wait(_SECONDS_TO_WAIT_SILENTLY):
                tell(self._what_is_missing(ray, bundle))
                while not group.wait(1):
                    pass
            remote = ray.remote(_node_class())
            yield [
                remote.options(
                    num_cpus=bundle["CPU"],
                    num_gpus=bundle.get("GPU", 0),
                    max_concurrency=2,  # it is asked to stop while it runs the command
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=group, placement_group_bundle_index=rank
                    ),
                ).remote()
                for rank in range(self.job.num_nodes)
            ]
        finally:
            remove_placement_group(group)

    def _what_is_missing(self, ray: Any, bundle: dict[str, int]) -> str:
        machines = [machine for machine in ray.nodes() if machine["Alive"]]
        total, free = ray.cluster_resources(), ray.available_resources()
        each = " and ".join(f"{count} {kind}s" for kind, count in bundle.items())
        has = " and ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s free" for kind in bundle)
        where = " on machines of their own" if self.settings.placement == "spread" else ""
        return (
            f"waiting for room for {self.job.num_nodes} nodes with {each}{where}; the cluster has {len(machines)} "
            f"machine{'s' * (len(machines) != 1)}, with {has}"
        )


def _library() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise UsageError(
            "--engine ray: Ray is not installed; run pip install '.[ray]' in the repository, or pip install ray"
        ) from error


@contextlib.contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """Connects to a cluster that is there, and leaves it.

    Raises:
        UsageError: No cluster answers.
    """
    where = f"--address {address}" if address is not None else "--engine ray"
    remedy = "start one (ray start --head), or give the --address of its head"
    try:
        if address is not None:  # Ray would try for minutes, and end this process then
            host, _, port = address.partition(":")
            socket.create_connection((host, int(port)), timeout=_SECONDS_TO_CONNECT).close()
        ray.init(address=address or "auto", configure_logging=False, log_to_driver=False)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
        raise UsageError(f"{where}: no Ray cluster answers ({one_line(error)[:200]}); {remedy}") from error
    with signals_raised():  # once more, for Ray has put a handler of its own in place of that for SIGTERM
        try:
            yield
        finally:
            ray.shutdown()  # which ends the actors, and thereby what they run


def _first_answer(ray: Any, nodes: list[Any]) -> tuple[str, int]:
    """Returns the address of node 0, and a port that is free there."""
    address, port = ray.get(nodes[0].place.remote())
    return str(address), int(port)


def _code_of(ray: Any, ended: Any, rank: int) -> int | None:
    """Returns the exit code of a node; None, and a line that says why, if its actor has none to tell."""
    try:
        output = str(ray.get(ended))
    except ray.exceptions.RayError as error:
        tell(f"node {rank} was lost: {one_line(error)[:300]}")
        return None
    code = told_codes(output).get(rank)
    if code is None:
        tell(f"node {rank} was lost: {one_line(output)[-300:]}")
    return code


def _node_class() -> type:
    """Returns the class of the actors.

    It is made here so that Ray sends its code (a class of a module would have to be importable by Ray's workers), and
    uses nothing but the standard library.
    """

    class LockstepNode:
        def __init__(self) -> None:
            self.host: Any = None
            self.is_stopped = False

        def place(self) -> tuple[str, int]:
            import contextlib
            import random
            import socket

            import ray

            while True:
                # Not one of those that the system may give meanwhile to whoever connects: ip(7).
                port = random.randrange(20_000, 32_768)
                with contextlib.suppress(OSError), socket.socket() as probe:
                    probe.bind(("", port))
                    return ray.util.get_node_ip_address(), port

        def run(self, words: list[str], environment: dict[str, str], directory: str) -> str:
            import subprocess

            self.host = subprocess.Popen(
                words,
                env={**os.environ, **environment},
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            if self.is_stopped:
                self.host.terminate()
            return str(self.host.communicate()[0])

        def stop(self) -> None:
            self.is_stopped = True
            if self.host is not None:
                self.host.terminate()

    return LockstepNode
