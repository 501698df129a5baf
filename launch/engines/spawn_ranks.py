"""Starts ranks with torch.multiprocessing: ``python -m launch.engines.spawn_ranks --num-processes=N MODULE ARGUMENTS``.

The parent runs the rendezvous store, on a port that the system chooses, as torchrun's agent does.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing import start_processes  # type: ignore[attr-defined]


def _run_rank(rank: int, num_processes: int, port: int, module: list[str]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store is the parent's: rank 0 must not start another on the same port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    sys.argv = list(module)
    runpy.run_module(module[0], run_name="__main__", alter_sys=True)


def main() -> None:
    """Starts the ranks and returns when all have ended; fails as soon as one does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-processes", type=int, required=True)
    parser.add_argument("--master-port", type=int, default=0)
    parser.add_argument("module", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    store = TCPStore(
        "127.0.0.1", arguments.master_port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    start_processes(  # type: ignore[no-untyped-call]
        _run_rank,
        args=(arguments.num_processes, store.port, arguments.module),
        nprocs=arguments.num_processes,
        start_method="spawn",
    )


if __name__ == "__main__":
    main()
