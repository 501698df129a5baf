"""Keeps a node of an entrant whose ranks are on other machines: ``python -m compare.race.keeper PROGRAM ADDRESS ...``.

It runs the command line of the node, whose arguments are those of compare/race/entrant.py, and stops and continues its
processes as the race orders. When the race has gone, they go on, and end as those of any job whose command has gone.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from types import FrameType

from compare.race.messages import NODE_VARIABLE, Hello, Order, connect, received, send
from compare.race.process_tree import ProcessTree
from launch.guardian import guarded


def main(*arguments: str) -> int:
    """Runs the node's command to its end; returns the exit code."""
    _, address, *_ = arguments
    os.environ[NODE_VARIABLE] = secrets.token_hex(8)
    with guarded() as mark:
        node = subprocess.Popen(
            [sys.executable, "-m", "compare.race.entrant", *arguments],
            env={**os.environ, **mark},
            stdin=subprocess.DEVNULL,
        )
        tree = ProcessTree(node.pid)
        asked_to_end = threading.Event()

        def pass_on(number: int, frame: FrameType | None) -> None:
            asked_to_end.set()
            tree.go_on()  # or the command would not see the signal
            node.send_signal(number)

        signal.signal(signal.SIGTERM, pass_on)
        threading.Thread(target=_obey, args=(address, tree, asked_to_end), daemon=True).start()
        return _exit_code(node.wait())


def _obey(address: str, tree: ProcessTree, asked_to_end: threading.Event) -> None:
    """Does what the race orders, until it has gone."""
    try:
        with connect(address) as connection:
            send(connection, Hello(rank=None, pid=os.getpid(), steps_per_epoch=0))
            for line in connection.makefile("rb"):
                order = received(Order, line)
                tree.rank_pids = set(order.rank_pids)
                match order.do:
                    case "rest":
                        rested = tree.rest()
                        if asked_to_end.is_set():
                            tree.go_on()
                        send(connection, rested)
                    case "race":
                        tree.race()
                    case "go on":
                        tree.go_on()
    except OSError as error:
        print(f"the race at {address.rpartition(':')[0]} cannot be reached: {error}", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        tree.go_on()


def _exit_code(code: int) -> int:
    """Returns the code as a shell would, which calls the end by a signal 128 and its number."""
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
