"""Entrants with options of their own, as the user writes them: ``[NAME=]BACKEND:OPTIONS``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import NamedTuple

from backends.registry import BACKENDS, BackendRow, find_backend
from launch.errors import UsageError
from launch.starters.environment import is_settled
from records.environment import VARIABLES

# A backend is a name of the table, or "package.module:Class".
_FORM = re.compile(r"(?:(?P<name>[^=:]*)=)?(?P<backend>[\w.]+\.\w+:\w+|[^:]*)(?::(?P<options>.*))?", re.DOTALL)
# Options in which entrants may differ that do the same whatever the library is.
OF_A_RUN = ("--batching", "--allocator", "--scheduling")
# Options of any run in which entrants may differ: they change no more than rounding, or are marked as an approximation.
_COMMON = (*OF_A_RUN, "--start-method", "--grad-compression")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


class OwnEntrant(NamedTuple):
    """A backend with options of its own.

    Attributes:
        backend: The backend.
        variant: What it is called, in parentheses after the backend.
        options: Its options, each as ``--name=value``.
        variables: Its environment variables, with their values.
    """

    backend: str
    variant: str
    options: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]


def read_own_entrant(text: str) -> OwnEntrant:
    """Reads an entrant, such as ``horovod:HOROVOD_CYCLE_TIME=5`` or ``fast=apex:--opt-level O2``.

    Raises:
        UsageError: It cannot be understood, or has an option that is not one of its backend.
        UnsupportedError: There is no such backend.
    """
    found = _FORM.fullmatch(text)
    if found is None or not found["backend"] or found["name"] == "":
        raise UsageError(
            f"--entrant {text!r}: write it as [NAME=]BACKEND:OPTIONS, such as horovod:HOROVOD_CYCLE_TIME=5"
        )
    row = find_backend(found["backend"])
    try:
        words = shlex.split(found["options"] or "")
    except ValueError as error:
        raise UsageError(f"--entrant {text!r}: {error}; close the quotation") from error
    options: list[str] = []
    variables: list[tuple[str, str]] = []
    for word in words:
        variable = _VARIABLE.fullmatch(word)
        if variable is not None:
            variables.append((_checked_variable(text, found["backend"], row, variable[1]), variable[2]))
        elif word.startswith("--"):
            options.append(_checked_option(text, found["backend"], row, word))
        elif options and "=" not in options[-1]:
            options[-1] += f"={word}"
        else:
            raise UsageError(
                f"--entrant {text!r}: {word!r} is neither an option (--name value) nor a variable (NAME=value)"
            )
    variant = found["name"] or " ".join(words)
    if not variant:
        raise UsageError(
            f"--entrant {text!r}: {found['backend']} takes part without options, too; give this one a name, "
            f"such as again={found['backend']}"
        )
    return OwnEntrant(found["backend"], variant, tuple(options), tuple(variables))


def check_effect(entrant: str, variables: Mapping[str, str], device: str) -> None:
    """Refuses variables of an entrant that have no effect on its device.

    Raises:
        UsageError: One has none.
    """
    for name in variables:
        if is_settled(name, device):
            raise UsageError(f"--entrant: {name} has no effect on {entrant}, which computes on {device}; leave it out")


def _checked_option(text: str, backend: str, row: BackendRow, word: str) -> str:
    """Returns an option, which must be one of the backend alone or of `_COMMON`: others change what is computed.

    Raises:
        UsageError: It is not.
    """
    option = word.partition("=")[0]
    own = [*(f"--{name.replace('_', '-')}" for name in row.settings.model_fields), *_COMMON]
    if option.replace("--no-", "--", 1) not in own:
        raise UsageError(
            f"--entrant {text!r}: {option} is not an option in which entrants may differ; "
            f"those of {backend} are {', '.join(own)}"
        )
    return word


def _checked_variable(text: str, backend: str, row: BackendRow, name: str) -> str:
    """Returns the name of a variable: one that a run's record notes for this backend, and that reaches its ranks.

    Raises:
        UsageError: It is not.
    """
    if is_settled(name, "cuda"):  # on GPUs, the user may say which of them
        raise UsageError(
            f"--entrant {text!r}: {name} would have no effect, since every job has its own value of it, or none; "
            "leave it out"
        )
    of_others = {prefix for other in BACKENDS.values() for prefix in other.variables} - {*row.variables}
    own = tuple(
        prefix for prefix in (*VARIABLES, *row.variables) if prefix not in of_others and not is_settled(prefix, "cuda")
    )
    if not name.startswith(own):
        raise UsageError(
            f"--entrant {text!r}: {name} is not a variable of {backend}; those begin with {', '.join(own)}"
        )
    return name
