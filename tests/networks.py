"""Whether the networks that ``--engine netns`` makes for a run are gone after it: network_namespaces(7)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.launching import processes_of, wait_until


@contextlib.contextmanager
def networks_gone(run: Path) -> Iterator[None]:
    """Fails if something still uses a network of a run some time after the end; its nodes must have started before.

    Inside, the networks are held open. Otherwise the kernel could give their numbers to those of other tests.
    """
    maker = Path(f"/proc/{_maker(run)}")
    with contextlib.ExitStack() as held:
        networks = set()
        for place in (maker / "ns" / "net", *(maker / "root" / "run" / "netns").iterdir()):
            descriptor = os.open(place, os.O_RDONLY)
            held.callback(os.close, descriptor)
            networks.add(f"net:[{os.fstat(descriptor).st_ino}]")
        assert len(networks) > 1
        assert all(_users({network}) for network in networks), "nobody is seen in a network, so nothing would be found"
        yield
        wait_until(lambda: not _users(networks), f"the end of the networks of {run}")


def _maker(run: Path) -> int:
    """The shell that has made the networks. It leads a session, unlike what it forks, which first looks like it."""
    for process in processes_of(run):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            is_script = any(word.endswith("/netns.sh") for word in process.cmdline())
            if is_script and os.getsid(process.pid) == process.pid:
                return process.pid
    raise AssertionError(f"nothing has made networks for {run}")


def _users(networks: set[str]) -> list[str]:
    """The processes that are in one of these networks, or that see a file on which one of them is mounted."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            mounts = (directory / "mountinfo").read_text(errors="replace").split()
            if not networks.isdisjoint([str((directory / "ns" / "net").readlink()), *mounts]):
                found.append(directory.name)
    return found
