"""What the `lockstep` command and `python -m launch` start: it is ready for signals before anything else is loaded."""

from __future__ import annotations

import gc
import os
import signal
import sys
import sysconfig
from pathlib import Path


def main() -> None:
    """Entry point of the `lockstep` command, which launch/run.sh calls."""
    # There is nothing to clean up yet. Until the command line handles signals itself, a signal ends the process at
    # once, instead of with a traceback of whatever is being imported.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # which launch/run.sh has blocked
    _open_missing_streams()
    _find_own_modules_first()
    gc.disable()  # nothing is garbage while modules are loaded
    from launch.cli import main as command_line

    gc.freeze()
    gc.enable()
    command_line()


def _find_own_modules_first() -> None:
    """Lets no module on the user's PYTHONPATH, such as a training.py, take the place of one of Lockstep's."""
    project = str(Path(__file__).resolve().parents[1])
    if project != sysconfig.get_path("purelib"):  # an editable installation
        sys.path.insert(0, project)


def _open_missing_streams() -> None:
    """Opens the standard streams that the caller has closed; otherwise the next file would take their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))


if __name__ == "__main__":
    main()
