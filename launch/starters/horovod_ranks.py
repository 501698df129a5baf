"""Starts the ranks of one node of a Horovod job: ``python -m launch.starters.horovod_ranks OPTIONS MODULE ARGUMENTS``.

horovodrun reaches other nodes through ssh. Here each node starts its own ranks instead, and they meet at Horovod's
rendezvous server, which node 0 runs on the port that all nodes were given.
The variables are those that horovodrun sets (horovod/runner/gloo_run.py).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import FrameType
from urllib.request import Request, urlopen

from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

# How long the server waits for the other nodes to leave; nothing depends on it any more.
SECONDS_TO_LINGER = 10.0
_LEFT = "left"


def main() -> int:
    """Starts the ranks and returns when all of this node have ended; fails as soon as one does."""
    options = _options()
    signal.signal(signal.SIGTERM, _leave)
    slots = slots_of(options.num_processes, options.num_processes // options.num_nodes)
    server = _meet(options, slots)
    own = [slot for slot in slots if slot.cross_rank == options.node_rank]
    code = _run(own, options)
    if code == 0:
        _take_leave(options, server)
    return code


def slots_of(num_processes: int, num_local: int) -> list[SlotInfo]:
    """Returns the places of all ranks, of which each node has `num_local`, in the order of the ranks."""
    return [
        SlotInfo(
            hostname=f"node{rank // num_local}",
            rank=rank,
            local_rank=rank % num_local,
            cross_rank=rank // num_local,
            size=num_processes,
            local_size=num_local,
            cross_size=num_processes // num_local,
        )
        for rank in range(num_processes)
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("num-processes", "num-nodes", "node-rank", "master-port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("--interface", required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("module", nargs=argparse.REMAINDER)
    return parser.parse_args()


def _leave(signal_number: int, frame: FrameType | None) -> None:
    sys.exit(128 + signal_number)


def _meet(options: argparse.Namespace, slots: list[SlotInfo]) -> RendezvousHTTPServer | None:
    """Opens the server on node 0; on other nodes, waits for it."""
    where = options.master_addr, options.master_port
    if options.node_rank > 0:
        wait_for(where, options.timeout, who="node 0")
        return None
    server = RendezvousHTTPServer(where, RendezvousHandler, False)
    options.master_port = server.server_address[1]  # port 0 means any free one
    server.init(slots)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _take_leave(options: argparse.Namespace, server: RendezvousHTTPServer | None) -> None:
    """Makes node 0 wait for the other nodes, which tell its server that they leave."""
    if server is None:
        address = f"http://{options.master_addr}:{options.master_port}/{_LEFT}/{options.node_rank}"
        with contextlib.suppress(OSError):  # node 0 may have waited long enough
            urlopen(Request(address, data=b"1", method="PUT"), timeout=1).close()
        return
    deadline = time.monotonic() + SECONDS_TO_LINGER
    while len(server.cache.get(_LEFT, {})) < options.num_nodes - 1 and time.monotonic() < deadline:
        time.sleep(0.1)


def wait_for(where: tuple[str, int], seconds: float, *, who: str) -> None:
    """Waits until `who` listens at an address and port; exits with a message if it does not in so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(where, timeout=1).close()
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(
                    f"{who} did not open {where[0]}:{where[1]} within {seconds:g} s ({error}); is its command running?"
                )
            time.sleep(0.2)
        else:
            return


def _run(slots: list[SlotInfo], options: argparse.Namespace) -> int:
    shared = create_run_env_vars(options.master_addr, [options.interface], options.master_port)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *options.module],
            env={**os.environ, **{name: str(value) for name, value in (shared | create_slot_env_vars(slot)).items()}},
        )
        for slot in slots
    ]
    try:
        while any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes):
                return 1
            time.sleep(0.1)
        return int(any(process.returncode for process in processes))
    finally:
        for process in processes:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main())
