"""Forks commands, modules and groups of ranks on request: ``python -m tests.forked.server SOCKET PID``.

A request is a JSON object with the environment, the working directory and what to run, and comes with
the file descriptors of standard input, output and error. The answers are two lines: the number of the
process, and its exit code once it has ended. A child is ended when its requester closes the connection,
all children are when the server ends, and the server ends with the process PID. A child joins the namespaces of its
requester: the network, the file systems and the name of the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import sys
import traceback
from pathlib import Path
from typing import Any

from launch.starters.interface import PROJECT_DIRECTORY

# What commands and ranks import, some of it when they first print or save; the last ones only where they are installed.
_MODULES = (
    *("torch", "torch._dynamo", "torch.distributed.run", "torch.nn.parallel.distributed", "datasets", "tokenizers"),
    *("transformers.models.bert.modeling_bert", "transformers.models.auto.modeling_auto", "safetensors.torch"),
    *("torchmetrics.functional.classification", "pyarrow.csv", "pyarrow.parquet", "scipy.stats", "jinja2", "psutil"),
    *("tensorboard", "torch.utils.tensorboard", "rich._emoji_codes"),
    *("launch.cli", "launch.display", "training.rank", "training.rank_work", "watch.watchdog"),
    *("contract.worker", "contract.suite", "compare.race.command", "compare.race.report_command"),
    *("compare.collectives.command", "compare.collectives.rank", "tasks.text.classification", "tasks.tagger"),
    *("backends.single", "backends.ddp", "backends.fsdp2", "backends.accelerate", "backends.horovod"),
    *("backends.fabric", "deepspeed.runtime.zero.muon.original_muon", "parity.command", "forecast.command"),
    *("horovod.runner.common.util.hosts", "horovod.runner.gloo_run", "horovod.runner.http.http_server"),
)
_PR_SET_PDEATHSIG = 1
# By their names in /proc/PID/ns: what setns(2) takes. That of the files comes last, since it hides /proc/PID of others.
_NAMESPACES = {"uts": 0x04000000, "ipc": 0x08000000, "net": 0x40000000, "mnt": 0x00020000}
_LENGTH_BYTES = 8
_LIBC = ctypes.CDLL(None, use_errno=True)


def serve(path: str, served: int) -> None:
    """Accepts requests until the process that is served has ended."""
    _load()
    interpreter = _make_interpreter(Path(path))
    end = os.pidfd_open(served)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(64)
    Path(f"{path}.new").rename(path)  # whoever finds it can connect
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    requesters: dict[int, socket.socket] = {}
    while True:
        connections = {requester.fileno(): pid for pid, requester in requesters.items()}
        readable, _, _ = select.select([end, listener, woken, *connections], [], [])
        if end in readable:
            return
        if woken in readable:
            os.read(woken, 4096)
        _answer_ended(requesters)
        for descriptor in readable:
            pid = connections.get(descriptor) if isinstance(descriptor, int) else None
            if pid in requesters:  # its requester has gone
                os.kill(pid, signal.SIGKILL)
        if listener in readable:
            requester, _ = listener.accept()
            try:
                request, descriptors = receive(requester)
            except EOFError:
                requester.close()
                continue
            credentials = requester.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            request["requester"] = struct.unpack("3i", credentials)[0]
            pid = _fork(request, interpreter, descriptors, [listener, *requesters.values()])
            requesters[pid] = requester
            with contextlib.suppress(OSError):  # if it has gone, the next look ends the process
                requester.sendall(b"%d\n" % pid)
            for descriptor in descriptors:
                os.close(descriptor)


def _load() -> None:
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    for name in _MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
    # torchrun's agent notes with each of its events which function it is in, and asks every loaded module for that:
    # with all libraries, it takes seconds of a processor.
    dynamic_rendezvous.get_method_name = lambda depth=2: "unknown"
    # The first model that a process saves has transformers compile hundreds of patterns, for every kind of model.
    with contextlib.suppress(ImportError, AttributeError):
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("bert")
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page


def _answer_ended(requesters: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        requester = requesters.pop(pid)
        with contextlib.suppress(OSError):  # it may not have waited
            requester.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        requester.close()


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receives a request and its three file descriptors.

    Raises:
        EOFError: Who asks has gone before all was sent.
    """
    first, descriptors, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, 3)
    length, content = int.from_bytes(first, "big"), b""
    while not first or len(content) < length:  # a signal may cut what is received
        received = connection.recv(length - len(content)) if first else b""
        if not received:
            for descriptor in descriptors:
                os.close(descriptor)
            raise EOFError
        content += received
    return json.loads(content), descriptors


def send(connection: socket.socket, request: dict[str, Any], descriptors: list[int]) -> None:
    """Sends a request and its three file descriptors."""
    content = json.dumps(request).encode()
    socket.send_fds(connection, [len(content).to_bytes(_LENGTH_BYTES, "big")], descriptors)
    connection.sendall(content)


def _make_interpreter(path: Path) -> str:
    """Writes the program that processes of the server take for the Python interpreter (tests/forked/interpreter.py)."""
    interpreter = path.with_name("python")
    interpreter.write_text(
        f"#!{sys.executable} -SE\n"
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from interpreter import main\n"
        f"sys.exit(main({sys.executable!r}, {str(path)!r}, sys.argv[1:]))\n"
    )
    interpreter.chmod(0o755)
    return str(interpreter)


def _fork(request: dict[str, Any], interpreter: str, descriptors: list[int], not_theirs: list[socket.socket]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        end_with(parent)
        for connection in not_theirs:
            connection.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        _become(request)
        sys.executable = interpreter
        code = _run(request)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def end_with(parent: int) -> None:
    """Has the system end this process with its parent: prctl(2)."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _become(request: dict[str, Any]) -> None:
    """Takes over what a new process would have been started with."""
    _join_namespaces(request["requester"])
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [str(Path(path).absolute()) for path in paths if path != str(PROJECT_DIRECTORY)]
    # A new process has random streams of its own.
    random.seed()
    import numpy as np

    np.random.seed(None)


def _join_namespaces(pid: int) -> None:
    for name, number in _NAMESPACES.items():
        theirs = Path(f"/proc/{pid}/ns/{name}")
        if theirs.readlink() != Path(f"/proc/self/ns/{name}").readlink():
            descriptor = os.open(theirs, os.O_RDONLY)
            if _LIBC.setns(descriptor, number):
                raise OSError(ctypes.get_errno(), f"cannot join the namespace {name} of process {pid}")
            os.close(descriptor)


def _run(request: dict[str, Any]) -> int:
    if request["what"] == "ranks":
        from tests.forked.ranks import run_ranks

        return run_ranks(request["start_method"], request["num_processes"], request["module"])
    sys.argv = list(request["arguments"])
    if request["forked_ranks"]:
        from tests.forked.client import fork_what_follows

        fork_what_follows(request["socket"])
    try:
        if not hasattr(sys.modules.get(sys.argv[0]), "__path__"):
            sys.modules.pop(sys.argv[0], None)  # a module that has been loaded runs anew
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
