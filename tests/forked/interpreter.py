"""Poses as the Python interpreter: has the server run a module, and is to its caller what the new process would be.

    interpreter.py [-u] -m MODULE ARGUMENTS

The module runs in a fork of the server (tests/forked/server.py) with this process's environment, working directory
and standard streams. Signals are passed on; the exit code, or the signal that ended it, becomes ours. If this process
is killed, the server kills the fork. Whatever else is asked of an interpreter, the real one does.
"""

import contextlib
import json
import os
import signal
import socket
from pathlib import Path

_FLAGS = ("-u", "-B")


def main(real: str, path: str, arguments: list[str]) -> int:
    first = next((number for number, word in enumerate(arguments) if word not in _FLAGS), len(arguments))
    if arguments[first : first + 1] != ["-m"]:
        os.execv(real, [real, *arguments])
    request = {
        "what": "module",
        "environment": dict(os.environ),
        "directory": str(Path.cwd()),
        "arguments": arguments[first + 1 :],
        "forked_ranks": False,
    }
    with asked(path, request) as answers:
        pid = int(answers.readline())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, lambda number, _: _send(pid, number))
        code = int(answers.readline() or -signal.SIGKILL)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


@contextlib.contextmanager
def asked(path, request):
    """Sends the server a request with this process's standard streams; yields the file of its answers."""
    content = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [len(content).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(content)
        with connection.makefile("rb") as answers:
            yield answers


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
