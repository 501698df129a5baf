"""Runs a starter so that it listens on the loopback interface only: ``python -m launch.starters.loopback MODULE ...``.

With all ranks on one node, no other machine needs to reach them. torch's store and Horovod's rendezvous server
listen on every interface nevertheless, and have no option to change that.
"""

from __future__ import annotations

import contextlib
import gc
import runpy
import socket
import sys
from typing import Any

LOOPBACK = "127.0.0.1"
_EVERYWHERE = ("", "0.0.0.0", "::")


def listen_on_loopback() -> None:
    """From now on, this process listens on the loopback interface wherever it would listen on all interfaces."""
    confine_sockets()
    with contextlib.suppress(ImportError):
        _confine_stores()


def confine_sockets() -> None:
    """Does so for what is written in Python, as Horovod's servers are, without importing torch."""
    bind = socket.socket.bind

    def bind_here(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[0] in _EVERYWHERE and self.family == socket.AF_INET:
            address = (LOOPBACK, *address[1:])
        bind(self, address)

    socket.socket.bind = bind_here  # type: ignore[assignment,method-assign]


def _confine_stores() -> None:
    """Confines the store of torch, which is not written in Python, but accepts a socket that is already listening."""
    # To look for garbage among what torch creates while it is imported takes a fifth of a second, and finds none.
    gc.disable()
    try:
        import torch.distributed
    finally:
        gc.freeze()
        gc.enable()

    class LoopbackStore(torch.distributed.TCPStore):  # type: ignore[misc,name-defined]
        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            *more: Any,
            **options: Any,
        ) -> None:
            if is_master and options.get("master_listen_fd") is None:
                listener = socket.create_server((LOOPBACK, port))
                host_name, port = listener.getsockname()
                options["master_listen_fd"] = listener.detach()
            super().__init__(host_name, port, world_size, is_master, *more, **options)

    torch.distributed.TCPStore = LoopbackStore  # type: ignore[attr-defined]


if __name__ == "__main__":
    listen_on_loopback()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
