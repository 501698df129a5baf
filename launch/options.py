"""Reading the command line and the configuration file into validated options.

The options are the fields of `RunOptions` and of the chosen task's settings; a field added there
is an option, a key of the configuration file and a line of the help text.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from backends.interface import BackendSettings
from launch.config import RunOptions, UsageError
from tasks.interface import Task, TaskSettings
from tasks.registry import load_task


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


class Options(NamedTuple):
    """What a user asked for: of the run, of the backend, and of the task."""

    run: RunOptions
    backend_settings: BackendSettings
    task_class: type[Task]
    task_settings: TaskSettings


def read_options(backend: str, backend_settings: type[BackendSettings], arguments: list[str]) -> Options:
    """Reads the options of a training run, those of the command line before those of --config FILE.

    Raises:
        UsageError, UnsupportedError, TaskInputError: Something in them cannot be used.
    """
    first_look = _Parser(add_help=False, allow_abbrev=False)
    first_look.add_argument("--task")
    first_look.add_argument("--config", type=Path)
    known, _ = first_look.parse_known_args(arguments)
    from_file = read_option_file(known.config) if known.config else {}
    task_name = known.task if known.task is not None else from_file.get("task", RunOptions.model_fields["task"].default)
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
    chosen = validated(backend_settings, merged)
    implied = {"precision": chosen.implied_precision} if chosen.implied_precision else {}
    run = validated(RunOptions, {**implied, **merged})
    chosen.check(precision=run.precision, optimizer=run.optimizer)
    return Options(run, chosen, task_class, validated(task_class.Settings, merged))


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
                group.add_argument(_option(name), metavar=_metavar(field), help=_help(field))
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
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
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
        if isinstance(value, bool) and model.model_fields[name].annotation is not bool:
            raise UsageError(f"{_option(name)} {value}: takes no truth value; give a number, or the word in quotes")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        reason = first["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
        if not first["loc"]:  # about options that do not go together
            raise UsageError(reason) from error
        raise UsageError(f"{_option(str(first['loc'][0]))} {first['input']}: {reason}") from error
