"""Makes a rank that torchrun has started one of Horovod's.

``python -m launch.starters.horovod_member MODULE ARGUMENTS``, with the module that the rank runs.

torchrun numbers the ranks anew whenever nodes leave or return. Here each translates its number into the variables that
horovodrun would set, and goes on as the module. They meet at Horovod's rendezvous server, in a process that rank 0
starts, on the port that torchrun has found for a store of torch, which none of them needs.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys

from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars

from launch.starters.horovod_ranks import slots_of, wait_for


def main(module: list[str]) -> None:
    """Meets the others and runs the module."""
    rank, num_processes, num_local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        _serve(address, port, num_processes, num_local)
    else:
        wait_for((address, port), float(os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"]), who="rank 0")
    shared = create_run_env_vars(address, [os.environ["GLOO_SOCKET_IFNAME"]], port)
    own = create_slot_env_vars(slots_of(num_processes, num_local)[rank])
    os.environ |= {name: str(value) for name, value in (shared | own).items()}
    sys.argv = list(module)
    runpy.run_module(module[0], run_name="__main__", alter_sys=True)


def _serve(address: str, port: int, num_processes: int, num_local: int) -> None:
    """Starts the server and returns once it listens; exits with a message if it cannot."""
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "launch.starters.horovod_server"),
            *map(str, (address, port, num_processes, num_local, os.getpid())),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # whoever reads what the ranks print need not wait for its end
    )
    assert server.stdout is not None
    with server.stdout as printed:
        if not printed.readline():
            sys.exit(f"Horovod's rendezvous server cannot listen on {address}:{port}")


if __name__ == "__main__":
    main(sys.argv[1:])
