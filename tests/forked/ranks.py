"""Stands in for a library's launcher: forks the ranks and tells each who it is, with the variables of that launcher."""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.forked.server import end_with

LOOPBACK = "127.0.0.1"
Variables = Callable[[int], dict[str, str]]


def run_ranks(start_method: str, num_processes: int, module: list[str]) -> int:
    """Runs a module in so many ranks; returns 0 once all have succeeded, 1 as soon as one has not."""
    variables, serve = _MEETINGS[start_method](num_processes)
    parent = os.getpid()
    pids = [_fork_rank(parent, variables(rank), module) for rank in range(num_processes)]
    kept = serve()  # after the fork, since it may start threads
    left = set(pids)
    failed = False
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status and not failed:
            failed = True
            time.sleep(0.1)  # torchrun looks for ranks that have ended so often
            for other in left:
                os.kill(other, signal.SIGTERM)
    del kept
    return int(failed)


def _fork_rank(parent: int, variables: dict[str, str], module: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        end_with(parent)
        os.environ.update(variables)
        sys.argv = list(module)
        sys.modules.pop(module[0], None)  # it runs anew
        runpy.run_module(module[0], run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # a rank that succeeds ends itself


def _alone(num_processes: int) -> tuple[Variables, Callable[[], Any]]:
    return (lambda rank: {}), (lambda: None)


def _torch(num_processes: int) -> tuple[Variables, Callable[[], Any]]:
    """The variables of torchrun, and its store (compare launch/starters/multiprocessing_ranks.py)."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]

    def variables(rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_processes),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def serve() -> Any:
        from torch.distributed import TCPStore

        descriptor = listener.detach()
        return TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=descriptor,
        )

    return variables, serve


def _horovod(num_processes: int) -> tuple[Variables, Callable[[], Any]]:
    """The variables of horovodrun, and its rendezvous server (compare launch/starters/horovod_ranks.py)."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer((LOOPBACK, 0), RendezvousHandler, False)
    slots = [
        SlotInfo(
            hostname="localhost",
            rank=rank,
            local_rank=rank,
            cross_rank=0,
            size=num_processes,
            local_size=num_processes,
            cross_size=1,
        )
        for rank in range(num_processes)
    ]
    server.init(slots)
    shared = create_run_env_vars(LOOPBACK, ["lo"], server.server_address[1])

    def variables(rank: int) -> dict[str, str]:
        return {name: str(value) for name, value in (shared | create_slot_env_vars(slots[rank])).items()}

    def serve() -> Any:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    return variables, serve


_MEETINGS: dict[str, Callable[[int], tuple[Variables, Callable[[], Any]]]] = {
    "python": _alone,
    "torchrun": _torch,
    "fork": _torch,
    "spawn": _torch,
    "accelerate": _torch,
    "horovodrun": _horovod,
}
START_METHODS = tuple(_MEETINGS)
