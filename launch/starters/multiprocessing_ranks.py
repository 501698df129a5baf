"""Starts ranks with torch.multiprocessing, as one process that waits for them.

    python -m launch.starters.multiprocessing_ranks --start-method=fork|spawn --num-processes=N MODULE ARGUMENTS

This process also runs the rendezvous store, as torchrun's agent does. Before it forks, it calls the function
`load_libraries` of the module, if there is one, with the module's arguments.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import runpy
import socket
import sys
import threading
from datetime import timedelta
from multiprocessing import active_children

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing import start_processes  # type: ignore[attr-defined]

from launch.starters.loopback import LOOPBACK
from records.config import START_WARNING_VARIABLE


def _run_rank(rank: int, num_processes: int, port: int, module: list[str]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        # The store is the parent's: rank 0 must not start another on the same port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    sys.argv = list(module)
    sys.modules.pop(module[0], None)  # which the parent may have imported; it runs anew
    runpy.run_module(module[0], run_name="__main__", alter_sys=True)


def _refusal_to_fork(module: list[str]) -> str | None:
    """Imports what each rank would import; returns why ranks must not be copies of this process, or None."""
    torch.set_num_threads(1)  # a copy would wait for threads that it does not have; each rank sets its own number
    gc.disable()  # as each rank does while it imports
    try:
        load = getattr(importlib.import_module(module[0]), "load_libraries", None)
        if load is not None:
            load(*module[1:])
    except (Exception, SystemExit) as error:  # importing runs code that may raise anything; the ranks will report it
        return f"an import has failed ({type(error).__name__}: {error})"
    finally:
        gc.enable()
    return "an import has started a thread" if threading.active_count() > 1 else None


def main() -> None:
    """Starts the ranks and returns when all have ended; fails as soon as one does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start-method", choices=("fork", "spawn"), required=True)
    parser.add_argument("--num-processes", type=int, required=True)
    parser.add_argument("--master-port", type=int, default=0)
    parser.add_argument("module", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    start_method = arguments.start_method
    if start_method == "fork" and (refusal := _refusal_to_fork(arguments.module)) is not None:
        os.environ[START_WARNING_VARIABLE] = f"the ranks are spawned instead of forked, since {refusal}"
        print(os.environ[START_WARNING_VARIABLE], flush=True)
        start_method = "spawn"
    with socket.create_server((LOOPBACK, arguments.master_port)) as listener:
        port = listener.getsockname()[1]
        # Otherwise the port would be taken for as long as a rank lives.
        os.register_at_fork(after_in_child=listener.close)
        try:
            ranks = start_processes(  # type: ignore[no-untyped-call]
                _run_rank,
                args=(arguments.num_processes, port, arguments.module),
                nprocs=arguments.num_processes,
                start_method=start_method,
                join=False,
            )
            # After the fork, since it starts a thread. It serves for as long as it is referred to.
            store = TCPStore(
                LOOPBACK,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=60),
                master_listen_fd=listener.detach(),
            )
            while not ranks.join():
                pass
            del store
        except BaseException:
            for rank in active_children():
                rank.kill()
            raise


if __name__ == "__main__":
    main()
