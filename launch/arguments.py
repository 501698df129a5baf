"""What the command lines of all commands share: how they refuse arguments, and how they read paths."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import override

from launch.errors import UsageError

_FROM_HOME = re.compile(r"(--[\w-]+=)?(~[\w-]*/.*)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """A parser whose options cannot be abbreviated, and that raises UsageError where argparse would exit."""

    def __init__(self, command: str, *, operands: str = "", **options: Any) -> None:
        prog = f"launch/run.sh {command}"
        usage = " ".join(filter(None, (prog, operands, "[options]")))
        super().__init__(prog=prog, usage=usage, allow_abbrev=False, **options)

    @override
    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)  # argparse ignores errors of writing

    @override
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


class Once(argparse.Action):
    """Stores a value that may be given only once."""

    @override
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest, None) is not None:
            raise argparse.ArgumentError(self, "is given twice; give it once")
        setattr(namespace, self.dest, values)


def named_path(text: str) -> Path:
    """Reads a path of the command line, for argparse's `type`.

    Raises:
        argparse.ArgumentTypeError: No file can have this name.
    """
    if not text:
        raise argparse.ArgumentTypeError("is empty; name a path")
    if not is_writable_text(text):
        raise argparse.ArgumentTypeError("contains a null character, or bytes that are not UTF-8; remove them")
    return Path(text)


def require_new_file(option: str, path: Path | None) -> None:
    """Makes sure that a file can be written that does not exist yet, before anything runs.

    Args:
        option: The option that names the file, for the message.
        path: The file; None where the option is not given.

    Raises:
        UsageError: It exists, or cannot be written.
    """
    if path is None:
        return
    try:
        if path.exists():
            raise UsageError(f"{option} {path}: exists already; remove it or choose another file")
        if not path.absolute().parent.is_dir():
            raise UsageError(f"{option} {path}: there is no directory {path.parent}; create it first")
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror} there; choose another directory") from error


def command_line(arguments: Sequence[str], *, without: str) -> str:
    """Writes a command for people to repeat.

    Args:
        arguments: The command's arguments.
        without: The option, such as ``--output-dir``, to leave out: it names a path of one machine.

    Returns:
        The command line, quoted as a shell needs it.
    """
    kept: list[str] = []
    is_value = False
    for argument in arguments:
        if not is_value and argument != without and not argument.startswith(f"{without}="):
            kept.append(argument)
        is_value = not is_value and argument == without
    return shlex.join(["launch/run.sh", *kept])


def is_writable_text(text: str) -> bool:
    """Whether it can be written as UTF-8; other bytes of a command line are read as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def from_home(text: str) -> str:
    """Replaces the ~ that a path, or the value of ``--option=PATH``, begins with, as a shell does for a path alone."""
    match = _FROM_HOME.fullmatch(text)
    return text if match is None else f"{match[1] or ''}{os.path.expanduser(match[2])}"  # noqa: PTH111 (~ may name an unknown user)
