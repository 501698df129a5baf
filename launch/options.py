"""Reading the command line and the configuration file into validated options.

The options are the fields of `RunOptions` and of the chosen task's settings; a field added there
is an option, a key of the configuration file and a line of the help text.
"""

from __future__ import annotations

import argparse
import difflib
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from backends.interface import BackendSettings
from launch.config import RunOptions, UsageError
from launch.resume import LATEST, Start, check_same_trajectory, find_start, inherited_options
from tasks.interface import Task, TaskSettings
from tasks.registry import TASKS, load_task

_MAX_OPTION_FILE_BYTES = 1_000_000
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


class Options(NamedTuple):
    """What a user asked for: of the run, of the backend, and of the task; and where a resumed run begins."""

    run: RunOptions
    backend_settings: BackendSettings
    task_class: type[Task]
    task_settings: TaskSettings
    start: Start | None = None


def read_options(backend: str, backend_settings: type[BackendSettings], arguments: list[str]) -> Options:
    """Reads the options of a training run, those of the command line before those of --config FILE.

    A resumed run takes over what neither says from the run that saved the checkpoint.

    Raises:
        UsageError, UnsupportedError, TaskInputError: Something in them cannot be used.
    """
    first_look = _Parser(add_help=False, allow_abbrev=False)
    first_look.add_argument("--task")
    first_look.add_argument("--config", type=Path)
    first_look.add_argument("--resume", nargs="?", const=LATEST)
    first_look.add_argument("--output-dir", type=Path)
    known, _ = first_look.parse_known_args(arguments)
    from_file = read_option_file(known.config) if known.config else {}
    start = _start(known, from_file)
    told = _task_of(start, known, from_file) if start else {}
    told |= from_file if known.task is None else {"task": known.task}
    task_name = told.get("task", RunOptions.model_fields["task"].default)
    task_class = load_task(str(task_name))

    models: dict[str, type[BaseModel]] = {
        "run": RunOptions,
        f"backend {backend}": backend_settings,
        f"task {task_class.name}": task_class.Settings,
    }
    parser = option_parser(backend, models)
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        option = unknown[0].partition("=")[0]
        options = ["--config", *(_option(name) for model in models.values() for name in model.model_fields)]
        close = difflib.get_close_matches(option, options, n=1)
        hint = f"did you mean {close[0]}?" if close else f"see launch/run.sh {backend} --help"
        raise UsageError(f"unknown option {option}; {hint}")
    from_line = {name: value for name, value in vars(namespace).items() if name != "config"}

    fields = {name for model in models.values() for name in model.model_fields}
    for name in from_file:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {close[0]}?" if close else f"see launch/run.sh {backend} --help"
            raise UsageError(f"--config {known.config}: there is no option {name!r}; {hint}")
    merged = {**from_file, **from_line}
    if start is not None:
        merged = {**inherited_options(start.config, backend, merged), **merged}
    chosen = validated(backend_settings, merged)
    implied = {"precision": chosen.implied_precision} if chosen.implied_precision else {}
    run = validated(RunOptions, {**implied, **merged})
    chosen.check(precision=run.precision, optimizer=run.optimizer)
    task_settings = validated(task_class.Settings, merged)
    if start is not None:
        check_same_trajectory(start, run, task_settings)
        for name in task_settings.fetched():
            if name not in from_line and name not in from_file:
                value = getattr(task_settings, name)
                raise UsageError(
                    f"--resume: the checkpoint would fetch {_option(name)} {value}; if you trust it, say so"
                )
    return Options(run, chosen, task_class, task_settings, start)


def _task_of(start: Start, known: argparse.Namespace, from_file: Mapping[str, Any]) -> dict[str, str]:
    """The task that a checkpoint names, if it is one of ours: importing another module would run its code."""
    name = start.config.task
    if name not in TASKS and known.task is None and "task" not in from_file:
        raise UsageError(f"--resume: a checkpoint cannot choose whose code to run; if you trust it, add --task {name}")
    return {"task": name}


def _start(known: argparse.Namespace, from_file: Mapping[str, Any]) -> Start | None:
    """Finds the checkpoint to go on from, if any was asked for."""
    resume = known.resume if known.resume is not None else from_file.get("resume")
    output_dir = known.output_dir if known.output_dir is not None else from_file.get("output_dir")
    if resume is None:
        return None
    return find_start(str(resume), Path(str(output_dir)) if output_dir is not None else None)


def option_parser(command: str, models: Mapping[str, type[BaseModel]]) -> argparse.ArgumentParser:
    """Makes a parser of the fields of these models, by title; what is not given is not in its result."""
    parser = _Parser(prog=f"launch/run.sh {command}", allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, metavar="FILE", help="options as a YAML or JSON mapping; the line wins")
    for title, model in models.items():
        if not model.model_fields:
            continue
        group = parser.add_argument_group(title)
        for name, field in model.model_fields.items():
            if field.annotation is bool:
                group.add_argument(_option(name), action=argparse.BooleanOptionalAction, help=field.description)
            else:
                # An option that may stand alone says what it then means.
                extra: Any = field.json_schema_extra
                alone = {"nargs": "?", **extra} if extra else {}
                group.add_argument(_option(name), metavar=_metavar(field), help=_help(field), **alone)
    return parser


def _metavar(field: FieldInfo) -> str:
    for annotation in (field.annotation, *get_args(field.annotation)):
        if get_origin(annotation) is Literal:
            return "|".join(get_args(annotation))
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if kind in (int, float, Path)]
    name = {int: "N", float: "X", Path: "PATH"}[kinds[0]] if kinds else "NAME"
    return f"{name},..." if get_origin(field.annotation) is list else name


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%")
    default = ",".join(map(str, field.default)) if isinstance(field.default, list) else field.default
    return text if default is None or field.default_factory else f"{text} (default: {default})"


def read_option_file(path: Path) -> dict[str, Any]:
    """Reads a configuration file into option names, with underscores, and values.

    Raises:
        UsageError: It cannot be read, or is no mapping of names to values.
    """
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"--config {path}: this is no file; name one with a YAML or JSON mapping")
        if path.stat().st_size > _MAX_OPTION_FILE_BYTES:
            raise UsageError(f"--config {path}: is larger than {_MAX_OPTION_FILE_BYTES} bytes; name a file of options")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"--config {path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"--config {path}: is not YAML or JSON ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise UsageError(f"--config {path}: must be a mapping of option names to values")
    return {name.replace("-", "_"): value for name, value in content.items()}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def validated(model: type[BaseModel], values: dict[str, Any]) -> Any:
    """Validates those of the values that are fields of the model.

    Raises:
        UsageError: A value cannot be used; the text names the option.
    """
    values = {name: value for name, value in values.items() if name in model.model_fields}
    for name, value in values.items():
        # YAML reads yes, no, on and off as truth values, which pydantic would take for the numbers 1 and 0.
        if isinstance(value, str) and ("\0" in value or not _can_be_written(value)):
            raise UsageError(f"{_option(name)}: holds characters that no name can have; leave them out")
        if isinstance(value, bool) and model.model_fields[name].annotation is not bool:
            raise UsageError(f"{_option(name)} {value}: takes no truth value; give a number, or the word in quotes")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        reason = first["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
        if not first["loc"]:  # about options that do not go together
            raise UsageError(reason) from error
        raise UsageError(f"{_option(str(first['loc'][0]))} {_shown(first['input'])}: {reason}") from error


def _can_be_written(text: str) -> bool:
    """Whether it is text at all; the bytes of a command line that are not become halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    """A value for a message; a few lines of YAML with aliases may stand for gigabytes."""
    return str(value) if isinstance(value, (str, int, float, Path)) else _SHORT.repr(value)
