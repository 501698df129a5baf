"""Reading the command line and the configuration file into validated options.

The options are the fields of `RunOptions` and of the chosen task's settings; a field added there
is an option, a key of the configuration file and a line of the help text.
"""

from __future__ import annotations

import argparse
import difflib
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from backends.capabilities import BackendSettings, Place, UnsupportedError
from backends.devices import count_gpus
from backends.registry import find_backend
from launch.arguments import Once, Parser, from_home, is_writable_text, named_path
from launch.errors import UsageError
from launch.resume import LATEST, Start, check_same_trajectory, find_start, inherited_options
from records.config import RunOptions
from tasks.interface import Task, TaskSettings
from tasks.registry import TASKS, load_task

_MAX_OPTION_FILE_BYTES = 1_000_000
_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(?:0|[1-9][0-9]*)$",
    "tag:yaml.org,2002:float": r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|nan)$",
}
# What is given without a value: --name, or --no-name.
_FLAGS = (bool, bool | None)
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2


class _RepeatedKeyError(ValueError):
    """A mapping has a key twice; YAML would use the last one."""


class _OptionLoader(yaml.SafeLoader):
    """Reads YAML whose numbers mean what they mean on the command line, and refuses a key that is given twice.

    YAML 1.1 reads 010 as 8 and 1:30 as 90.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            # Dashes and underscores are the same to an option.
            name = str(key.value).replace("-", "_")
            if name in first and not key.tag.endswith(":merge"):
                lines = f"line {first[name].line + 1} and line {key.start_mark.line + 1}"
                raise _RepeatedKeyError(f"{key.value!r} is given twice, on {lines}; give it once")
            first[name] = key.start_mark
        return super().construct_mapping(node, deep)


_OptionLoader.yaml_implicit_resolvers = {
    character: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for character, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    _OptionLoader.add_implicit_resolver(_tag, re.compile(_pattern), list("-+.0123456789"))


class Options(NamedTuple):
    """The options of the run, of the backend and of the task, where a resumed run begins, and whether it is to run.

    `inherited` names those of them that a resumed run takes over.
    """

    run: RunOptions
    backend_settings: BackendSettings
    task_class: type[Task]
    task_settings: TaskSettings
    start: Start | None = None
    is_dry_run: bool = False
    inherited: tuple[str, ...] = ()


def read_options(
    backend: str,
    backend_settings: type[BackendSettings],
    arguments: list[str],
    *,
    start: Start | None = None,
    most_threads: int | None = None,
) -> Options:
    """Reads the options of a training run, those of the command line before those of --config FILE.

    A resumed run takes options that neither gives from the run that saved the checkpoint.

    Args:
        backend: The backend.
        backend_settings: The type of its own options.
        arguments: The words of the command line.
        start: The checkpoint to resume from, if it has been found; None to find what --resume names.
        most_threads: How many threads of a rank it may take over; None for as many as this machine has cores.

    Raises:
        Finished: The run to resume has finished.
        UsageError, UnsupportedError, TaskInputError: Something in them cannot be used.
    """
    known = _first_look(backend, arguments)
    from_file = read_option_file(known.config) if known.config else {}
    start = start or _start(known, from_file)
    told = _task_of(start, known, from_file) if start else {}
    told |= from_file if known.task is None else {"task": known.task}
    task_name = told.get("task", RunOptions.model_fields["task"].default)
    task_class = load_task(str(task_name))

    models: dict[str, type[BaseModel]] = {
        "run": RunOptions,
        f"backend {backend}": backend_settings,
        f"task {task_class.name}": task_class.Settings,
    }
    namespace, unknown = _run_parser(backend, models).parse_known_args(arguments)
    fields = [name for model in models.values() for name in model.model_fields]
    _refuse_unknown(backend, fields, unknown, known.config, from_file)
    from_line = {name: value for name, value in vars(namespace).items() if name not in ("config", "dry_run")}

    given = {**from_file, **from_line}
    inherited = inherited_options(start.config, backend, given, most_threads) if start is not None else {}
    merged = {**inherited, **given}
    chosen = validated(backend_settings, merged)
    implied = {"precision": chosen.implied_precision} if chosen.implied_precision else {}
    run = validated(RunOptions, {**implied, **merged})
    check_settings(chosen, run)
    if run.min_nodes is not None and task_class.has_batch_norm:
        raise UsageError(
            f"--min-nodes {run.min_nodes}: BatchNorm computes another thing when ranks are more or fewer; leave it out"
        )
    task_settings = validated(task_class.Settings, merged)
    if start is not None:
        check_same_trajectory(start, run, task_settings)
        _check_fetched(task_settings, given)
    names = tuple(name for name in inherited if name not in given)
    return Options(run, chosen, task_class, task_settings, start, namespace.dry_run, names)


def _first_look(backend: str, arguments: list[str]) -> argparse.Namespace:
    """Reads what decides which other options there are."""
    parser = Parser(backend, add_help=False)
    parser.add_argument("--task")
    parser.add_argument("--config", type=named_path, action=Once)
    parser.add_argument("--resume", nargs="?", const=LATEST)
    parser.add_argument("--output-dir", type=named_path)
    return parser.parse_known_args(arguments)[0]


def _check_fetched(task_settings: TaskSettings, given: Mapping[str, Any]) -> None:
    """Refuses to download what a checkpoint names, and the user does not."""
    for name in task_settings.fetched():
        if name not in given:
            value = getattr(task_settings, name)
            raise UsageError(
                f"--resume: the checkpoint asks to download {_option(name)} {value}; if you trust it, add "
                f"{_option(name)} {value}"
            )


def _run_parser(backend: str, models: Mapping[str, type[BaseModel]]) -> argparse.ArgumentParser:
    """Makes the parser of a training, which may be a dry run; that is no option of a run, and in no record."""
    parser = option_parser(backend, {})
    parser.add_argument(
        "--dry-run", action="store_true", default=False, help="show what the run would take, and start nothing"
    )
    add_options(parser, models)
    return parser


def _refuse_unknown(
    backend: str, fields: list[str], unknown: list[str], file: Path | None, from_file: Mapping[str, Any]
) -> None:
    """Refuses the first of the unknown words of the command line, and the first unknown option of the file."""
    if unknown:
        option = unknown[0].partition("=")[0]
        options = [_option(name) for name in ("config", "dry_run", *fields)]
        raise _unknown(f"unknown option {option}", option, options, backend)
    for name in from_file:
        if name not in fields:
            raise _unknown(f"--config {file}: there is no option {name!r}", name, fields, backend)


def _unknown(what: str, name: str, names: Sequence[str], backend: str) -> UsageError:
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"see launch/run.sh {backend} --help"
    return UsageError(f"{what}; {hint}")


def check_settings(settings: BackendSettings, run: RunOptions) -> None:
    """Refuses options of the backend that contradict those of the run."""
    device = run.device if run.device != "auto" else "cuda" if count_gpus() else "cpu"
    settings.check(
        precision=run.precision,
        optimizer=run.optimizer,
        grad_compression=run.grad_compression,
        place=Place(device, run.num_nodes),
    )


def _task_of(start: Start, known: argparse.Namespace, from_file: Mapping[str, Any]) -> dict[str, str]:
    """Returns the task that a checkpoint names, if it is Lockstep's: importing another module would run its code."""
    name = start.config.task
    if name not in TASKS and known.task is None and "task" not in from_file:
        raise UsageError(
            f"--resume: the checkpoint names the task {name}, whose code is not Lockstep's; if you trust it, "
            f"add --task {name}"
        )
    return {"task": name}


def _start(known: argparse.Namespace, from_file: Mapping[str, Any]) -> Start | None:
    """Finds the checkpoint to resume from, if --resume is given."""
    resume = known.resume if known.resume is not None else from_file.get("resume")
    output_dir = known.output_dir if known.output_dir is not None else from_file.get("output_dir")
    if resume is None:
        return None
    return find_start(str(resume), Path(str(output_dir)) if output_dir is not None else None)


def option_parser(command: str, models: Mapping[str, type[BaseModel]]) -> argparse.ArgumentParser:
    """Makes a parser for the fields of these models, by title; options that are not given are not in its result."""
    parser = Parser(command, argument_default=argparse.SUPPRESS)
    parser.add_argument(
        "--config",
        type=named_path,
        action=Once,
        metavar="FILE",
        help="file of options, a YAML or JSON mapping; the command line overrides it",
    )
    add_options(parser, models)
    return parser


def add_options(parser: argparse.ArgumentParser, models: Mapping[str, type[BaseModel]]) -> None:
    """Adds an option for each field of these models, in groups by title.

    Args:
        parser: The parser; options that are not given must not be in its result (`argument_default=SUPPRESS`).
        models: The models by the title of their group.
    """
    for title, model in models.items():
        if not model.model_fields:
            continue
        group = parser.add_argument_group(title)
        for name, field in model.model_fields.items():
            if field.annotation in _FLAGS:
                group.add_argument(_option(name), action=argparse.BooleanOptionalAction, help=_help(field))
            else:
                group.add_argument(_option(name), help=_help(field), **_form(field))


def option_words(values: Mapping[str, Any]) -> list[str]:
    """Writes options as the command line has them, each as one word, from their values by name."""
    words = []
    for name, value in values.items():
        option = _option(name)
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            several = value if isinstance(value, list) else [value]
            words += [f"{option}={str(one).removesuffix('.0') if isinstance(one, float) else one}" for one in several]
    return words


def settings_in(settings: type[BackendSettings], words: Sequence[str]) -> BackendSettings:
    """Returns the options of a backend alone that are among these words of a command line."""
    parser = Parser("", argument_default=argparse.SUPPRESS, add_help=False)
    add_options(parser, {"": settings})
    known, _ = parser.parse_known_args(list(words))
    found: BackendSettings = validated(settings, vars(known))
    return found


def own_options(backend: str, values: Mapping[str, Any]) -> list[str]:
    """Returns the options of a backend alone that differ from its defaults, as the command line has them.

    Args:
        backend: The backend, which may be an adapter that is not on this machine; then it has no defaults.
        values: Its options by name.
    """
    try:
        defaults = find_backend(backend).settings().model_dump(mode="json")
    except UnsupportedError:
        defaults = {}
    return option_words({name: value for name, value in values.items() if value not in (None, defaults.get(name))})


def _form(field: FieldInfo) -> dict[str, Any]:
    """Returns how argparse is to read the values of a field.

    An option that may be given without a value declares the value that it then has ("alone"). One that may be given
    several times declares what its values are called ("each"), and so may another whose values are texts ("metavar").
    """
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    if "each" in extra:
        return {"action": "append", "metavar": extra["each"]}
    alone = {"nargs": "?", "const": extra["alone"]} if "alone" in extra else {}
    return {"metavar": extra.get("metavar") or _metavar(field), **alone}


def _metavar(field: FieldInfo) -> str:
    annotations = list(_annotations(field.annotation))
    names = {int: "N", float: "X", Path: "PATH"}
    known = [names[kind] for kind in annotations if kind in (int, float, Path)]
    choices = ["|".join(get_args(kind)) for kind in annotations if get_origin(kind) is Literal]
    name = [*choices, *known, "NAME"][0]
    return f"{name},..." if any(get_origin(kind) is list for kind in annotations) else name


def _annotations(annotation: Any) -> Iterator[Any]:
    """Yields the annotation and those that it is made of: of `list[int] | None`, also `list[int]` and `int`."""
    yield annotation
    if get_origin(annotation) is not Literal:
        for part in get_args(annotation):
            yield from _annotations(part)


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%")
    default = ",".join(map(str, field.default)) if isinstance(field.default, list) else field.default
    if field.annotation is bool:
        default = "on" if default else None
    return text if default in (None, "") or field.default_factory else f"{text} (default: {default})"


def read_option_file(file: Path) -> dict[str, Any]:
    """Reads a configuration file into option names, with underscores, and values; in paths, ~ is the home directory.

    Raises:
        UsageError: It cannot be read, or is not a mapping of names to values.
    """
    try:
        if file.exists() and not file.is_file():
            raise UsageError(f"--config {file}: this is not a file; name a file that holds a YAML or JSON mapping")
        if file.stat().st_size > _MAX_OPTION_FILE_BYTES:
            raise UsageError(
                f"--config {file}: is larger than {_MAX_OPTION_FILE_BYTES} bytes; name a smaller file of options"
            )
        content = yaml.load(file.read_text(encoding="utf-8"), _OptionLoader)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"--config {file}: cannot be read ({error.strerror})") from error
    except _RepeatedKeyError as error:
        raise UsageError(f"--config {file}: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"--config {file}: is not YAML or JSON ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise UsageError(f"--config {file}: must be a mapping of option names to values")
    empty = next((name for name, value in content.items() if value is None), None)
    if empty is not None:
        raise UsageError(f"--config {file}: {empty} has no value; give one, or leave the option out")
    return {
        name.replace("-", "_"): from_home(value) if isinstance(value, str) else value for name, value in content.items()
    }


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def validated(model: type[BaseModel], values: dict[str, Any]) -> Any:
    """Validates those of the values that are fields of the model.

    Raises:
        UsageError: A value cannot be used; the text names the option.
    """
    values = {name: value for name, value in values.items() if name in model.model_fields}
    for name, value in values.items():
        # YAML reads yes, no, on and off as booleans, which pydantic would convert to the numbers 1 and 0.
        annotation = model.model_fields[name].annotation
        if isinstance(value, str) and not is_writable_text(value):
            raise UsageError(f"{_option(name)}: contains a null character, or bytes that are not UTF-8; remove them")
        if value == "" and Path in (annotation, *get_args(annotation)):
            raise UsageError(f"{_option(name)}: is empty; name a path")
        if isinstance(value, bool) and annotation not in _FLAGS:
            raise UsageError(
                f"{_option(name)} {value}: YAML reads this word as a boolean; give a number, or the word in quotes"
            )
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        reason = first["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
        if not first["loc"]:  # about options that contradict each other
            raise UsageError(reason) from error
        raise UsageError(f"{_option(str(first['loc'][0]))} {_shown(first['input'])}: {reason}") from error


def _shown(value: Any) -> str:
    """Shortens a value for a message; a few lines of YAML with aliases may expand to gigabytes."""
    return str(value) if isinstance(value, (str, int, float, Path)) else _SHORT.repr(value)
