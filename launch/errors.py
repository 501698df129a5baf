"""What ends a command with one line: how it is raised, and how the line is made."""

from __future__ import annotations

import os
import sys

_MAX_MESSAGE = 2000


class UsageError(ValueError):
    """A request that cannot be served; the text is one line naming the value and a remedy."""


def one_line(text: object) -> str:
    """Makes one line of bounded length of a message that may quote anything, for a terminal."""
    words = " ".join(str(text).split())
    visible = "".join(character if character.isprintable() else "?" for character in words)
    return visible if len(visible) <= _MAX_MESSAGE else f"{visible[:_MAX_MESSAGE]} ..."


def refused_path(error: OSError) -> UsageError:
    """What to tell a user whose options name a path that the system refuses."""
    return UsageError(f"{error.filename}: {error.strerror}; choose another path" if error.filename else str(error))


def tell(text: str) -> None:
    """Says something of a run on the terminal; whether anybody is there to read it changes nothing."""
    try:
        print(f"lockstep: {text}", file=sys.stderr, flush=True)
    except OSError:
        # What is still in its buffer would change the exit code at the end of the interpreter.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
