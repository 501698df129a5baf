"""Errors that end a command with one line, and how that line is written."""

from __future__ import annotations

import os
import sys

_MAX_MESSAGE = 2000


class UsageError(ValueError):
    """A request that cannot be carried out; the text is one line that names the value and a remedy."""


def one_line(text: object) -> str:
    """Writes a message that may quote anything as one line of bounded length, for a terminal."""
    words = " ".join(str(text).split())
    visible = "".join(character if character.isprintable() else "?" for character in words)
    return visible if len(visible) <= _MAX_MESSAGE else f"{visible[:_MAX_MESSAGE]} ..."


def refused_path(error: OSError) -> UsageError:
    """Returns the error for an option that names a path that the system refuses."""
    return UsageError(f"{error.filename}: {error.strerror}; choose another path" if error.filename else str(error))


def tell(text: str) -> None:
    """Prints a line about a run on standard error; a closed terminal is not an error."""
    try:
        print(f"lockstep: {text}", file=sys.stderr, flush=True)
    except OSError:
        # What is left in the buffer would otherwise change the exit code when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def say(text: str) -> None:
    """Prints a line on standard output, as long as that can be written: a job goes on when nobody reads it any more."""
    try:
        print(text, flush=True)
    except OSError as error:
        give_up_output(error)


def give_up_output(error: OSError) -> None:
    """Discards what is printed from now on, and says why unless the reader has closed the pipe."""
    # What is left in the buffer is discarded, too; otherwise it would cause an error when the interpreter ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        tell(f"the output cannot be written ({error.strerror})")
