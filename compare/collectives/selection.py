"""Which backends communicate in a way of their own, so that it is worth measuring."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, create_model
from rich.console import Console

from backends.capabilities import BackendSettings, UnsupportedError
from backends.registry import BACKENDS, BackendRow, find_backend
from launch.arguments import Parser
from launch.errors import UsageError
from launch.options import add_options


def measured_backends(names: list[str] | None) -> dict[str, BackendRow]:
    """Returns the backends to measure.

    Args:
        names: The backends that the user names; None for each that has a path of its own and can run here.

    Raises:
        UsageError, UnsupportedError: A backend does not exist, or cannot run here.
    """
    if names is None:
        return {
            name: row for name, row in BACKENDS.items() if row.has_own_collectives and row.unavailable_reason() is None
        }
    rows = {name: find_backend(name) for name in names}
    for name, row in rows.items():
        reason = row.unavailable_reason()
        if reason is not None:
            raise UnsupportedError(f"--backends {name}: cannot run here: {reason}")
    return rows


def add_own_options(parser: Parser, arguments: Sequence[str]) -> type[BackendSettings] | None:
    """Adds the options of a backend that is named alone, as far as they change how its collectives run.

    Returns:
        All options of the backend; None if no backend is named alone.

    Raises:
        UnsupportedError: There is no such backend.
        UsageError: Its options have names that others have already.
    """
    first_look = Parser("allreduce", add_help=False)
    first_look.add_argument("--backends", default="")
    name = first_look.parse_known_args(list(arguments))[0].backends
    if not name or "," in name:
        return None
    settings = find_backend(name).settings
    fields: dict[str, Any] = {
        option: (field.annotation, field)
        for option, field in settings.model_fields.items()
        if option in settings.of_collectives
    }
    changing: type[BaseModel] = create_model("Changing", **fields)
    try:
        add_options(parser, {f"backend {name}": changing})
    except ArgumentError as error:
        raise UsageError(f"--backends {name}: its own options cannot be told from others ({error})") from error
    return settings


def changing_collectives(backend: str, words: Sequence[str]) -> list[str]:
    """Returns those of a backend's own options, written as `--name=value`, that change how its collectives run."""
    try:
        changing = find_backend(backend).settings.of_collectives
    except UnsupportedError:  # an adapter that is not on this machine: any of them may
        return list(words)
    return [word for word in words if word.removeprefix("--").partition("=")[0].replace("-", "_") in changing]


def who_has(option: str) -> list[str]:
    """Returns the backends with this option of their own, if it changes how their collectives run."""
    return [name for name, row in BACKENDS.items() if option in row.settings.of_collectives]


def say_what_is_left_out(terminal: Console) -> None:
    """Names the backends that can run here and are measured only if the user names them."""
    for name, row in BACKENDS.items():
        if row.communicates_like is not None and row.unavailable_reason() is None:
            terminal.print(f"{name} is left out: it communicates as {row.communicates_like} does (--backends {name})")
