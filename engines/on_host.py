"""What an engine has run on each host: ``python -m engines.on_host NODE_RANK LOG COMMAND ...``.

The command, which is that of a node, writes into a file of its own. Its beginning and its exit code are told on
standard output. It sees none of mpirun's variables, which its ranks would take for their own. It is asked to stop by
SIGTERM, and by SIGUSR1, which mpirun passes on without ending the job. However this process ends, the command does not
outlive it; nor does it outlive the process that has started this one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import BinaryIO

# A command that ends with this code has refused its options, and the others would wait for it in vain: then, and only
# then, mpirun is told of an error and ends them. After any other end, the nodes notice by themselves and say why.
REFUSED = 2

_POLL_SECONDS = 0.1
_OF_MPIRUN = ("OMPI_", "OPAL_", "ORTE_", "PMIX_", "PRTE_")


def main() -> int:
    """Runs the command to its end; returns the exit code for what has started this process."""
    asked: list[int] = []
    parent = os.getppid()

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if node is not None:
            node.terminate()

    node: subprocess.Popen[bytes] | None = None
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, pass_on)
    # These take a while, in which it may be asked to stop.
    from engines.following import exit_code_of
    from launch.guardian import guarded

    node_rank, log, *command = sys.argv[1:]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_MPIRUN)}
    with guarded() as mark, _opened(Path(log)) as output:
        node = subprocess.Popen(
            command,
            env={**environment, **mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # mpirun's signals reach it through this process, once
        )
        if asked:
            node.terminate()
        print(f"node {node_rank} begins", flush=True)
        while node.poll() is None and os.getppid() == parent:  # which may be killed
            time.sleep(_POLL_SECONDS)
    code = exit_code_of([node.wait()])
    print(f"node {node_rank} ends with {code}", flush=True)
    return code if code == REFUSED else 0


def _opened(log: Path) -> BinaryIO:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("ab")
    except OSError as error:
        sys.exit(f"{socket.gethostname()}: {error.filename}: {error.strerror}")


if __name__ == "__main__":
    sys.exit(main())
