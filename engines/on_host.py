"""What mpirun runs on each host: the command of a node, ``python -m engines.on_host NODE_RANK LOG COMMAND ...``.

The output of the command goes to a file of its own. What mpirun is told on standard output is when the command begins
and how it ends. Of mpirun's variables the command sees none, since its ranks would take them for their own. It is asked
to stop by SIGTERM, and also by SIGUSR1, which mpirun passes on without ending the job. However this process ends, the
command does not outlive it.
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

from engines.following import exit_code_of
from launch.guardian import guarded

# mpirun ends all nodes when a command ends with this code, which means that it has refused its options; the others
# would wait for that node in vain. After any other end, the nodes notice by themselves and say why.
_REFUSED = 2

_POLL_SECONDS = 0.1
_OF_MPIRUN = ("OMPI_", "OPAL_", "ORTE_", "PMIX_", "PRTE_")


def main() -> int:
    """Runs the command to its end; returns the exit code for mpirun."""
    node_rank, log, *command = sys.argv[1:]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_MPIRUN)}
    daemon = os.getppid()
    with guarded() as mark, _opened(Path(log)) as output:
        node = subprocess.Popen(
            command,
            env={**environment, **mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # mpirun's signals reach it through this process, once
        )

        def pass_on(number: int, frame: FrameType | None) -> None:
            node.terminate()

        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, pass_on)
        print(f"node {node_rank} begins", flush=True)
        while node.poll() is None and os.getppid() == daemon:  # mpirun's daemon on this host may be killed
            time.sleep(_POLL_SECONDS)
    code = exit_code_of([node.wait()])
    print(f"node {node_rank} ends with {code}", flush=True)
    return code if code == _REFUSED else 0


def _opened(log: Path) -> BinaryIO:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("ab")
    except OSError as error:
        sys.exit(f"{socket.gethostname()}: {error.filename}: {error.strerror}")


if __name__ == "__main__":
    sys.exit(main())
