"""Horovod's rendezvous server for ranks that others start.

``python -m launch.starters.horovod_server ADDRESS PORT NUM_PROCESSES NUM_LOCAL PID``, with the numbers of ranks on all
nodes and on each, and with the process that the server belongs to.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from launch.starters.horovod_ranks import SECONDS_TO_LINGER, slots_of


def main(address: str, port: int, num_processes: int, num_local: int, pid: int) -> None:
    """Serves while the process lives, and a little longer, since other ranks may leave after it.

    Prints a line as soon as it listens.
    """
    server = RendezvousHTTPServer((address, port), RendezvousHandler, False)
    server.init(slots_of(num_processes, num_local))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("listening", flush=True)
    while os.getppid() == pid:
        time.sleep(0.1)
    time.sleep(SECONDS_TO_LINGER)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
