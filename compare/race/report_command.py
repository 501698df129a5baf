"""``launch/run.sh report``: the report of any records, wherever they were made, of races, or of earlier results."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from compare.race.directory import RaceDirectory
from compare.race.report import files_of, finish, info_of, name_of
from compare.report.baseline import Baseline, GateOptions, read_baseline
from compare.report.info import NothingToReport, ReportInfo, UnknownOpponent
from compare.report.pages import require_packages, require_room
from compare.report.reading import kind_of, read_inputs, read_results_file
from compare.report.runs import Run
from compare.results import CollectiveSeries, Results
from launch.arguments import Parser, command_line, named_path
from launch.display import console
from launch.errors import UsageError, refused_path
from launch.options import add_options, validated


class ReportOptions(BaseModel):
    """What a user may ask of a report."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    output_dir: Path = Field(Path(), description="receives report.html, report.md, results.json, steps.csv")
    title: str = Field("Data-parallel backends compared", description="title of the report")
    target_accuracy: float = Field(0.9, gt=0, le=1, description="the report gives the time until this accuracy")
    opponent: str | None = Field(None, description="compare all others with this entrant (default: with the fastest)")
    overwrite: bool = Field(False, description="replace the report in --output-dir")


class _Material(NamedTuple):
    """What a report is made of."""

    runs: list[Run]
    collectives: list[CollectiveSeries]
    info: ReportInfo


def run(arguments: list[str]) -> int:
    """Makes a report from the command line; returns the exit code."""
    parser = Parser(
        "report",
        operands="PATH ...",
        argument_default=argparse.SUPPRESS,
        description="Makes the report of any records, wherever they were made, or of races; or that of a results.json "
        "again.",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        type=named_path,
        metavar="PATH",
        help="records of runs, results of collectives, directories of races; or one results.json alone",
    )
    add_options(parser, {"report": ReportOptions, "gate": GateOptions})
    asked = vars(parser.parse_args(arguments))
    options: ReportOptions = validated(ReportOptions, asked)
    gate: GateOptions = validated(GateOptions, asked)
    require_packages()
    try:
        if not options.overwrite:
            require_room(options.output_dir)
        baseline = read_baseline(gate)
        results, runs = _results(asked["paths"], options, asked)
    except OSError as error:
        raise refused_path(error) from error
    if baseline is not None:
        results = _judged(results, baseline)
    return finish(results, runs, options.output_dir, console())


def _results(paths: Sequence[Path], options: ReportOptions, asked: dict[str, Any]) -> tuple[Results, list[Run]]:
    """Returns what a report says, and the runs that it is made of; of a results.json these are not known."""
    if len(paths) == 1 and not paths[0].is_dir() and kind_of(paths[0]) == "results":
        for option in {"target_accuracy", "opponent"} & set(asked):
            raise UsageError(
                f"--{option.replace('_', '-')}: cannot be changed in {paths[0]}, which holds results; leave it out, or "
                "give the records"
            )
        results = read_results_file(paths[0])
        return results.model_copy(update={"title": options.title} if "title" in asked else {}), []
    from compare.report.analysis import analyse

    material = _read(paths, options, asked)
    try:
        return analyse(material.runs, material.collectives, material.info), material.runs
    except UnknownOpponent as error:
        raise UsageError(f"--opponent {error}") from error
    except NothingToReport as error:
        raise UsageError(f"{', '.join(map(str, paths[:3]))}{' ...' * (len(paths) > 3)}: {error}") from error
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"cannot compare these records ({error!r}); pass fewer files to find the inconsistent one"
        ) from error


def _judged(results: Results, baseline: Baseline) -> Results:
    from compare.report.gate import judge

    return judge(results, baseline)


def _read(paths: Sequence[Path], options: ReportOptions, asked: dict[str, Any]) -> _Material:
    """Reads records, and races with what they know besides their records."""
    races = {path: RaceDirectory(path) for path in paths if RaceDirectory(path).holds_race}
    files = [file for path in paths for file in (files_of(races[path]) if path in races else [path])]
    inputs = read_inputs(files)
    infos = {path: info_of(race, race.plan()) for path, race in races.items()}
    names: dict[str, str] = {}
    for path, race in races.items():
        prefix = f"{path.resolve().name}/" if len(races) > 1 else ""
        names |= {str(file): prefix + name_of(file) for file in files_of(race)}
    runs = [dataclasses.replace(run, name=names.get(run.name, run.name)) for run in inputs.runs]
    return _Material(runs, inputs.collectives, _info(options, asked, infos))


def _info(options: ReportOptions, asked: dict[str, Any], races: dict[Path, ReportInfo]) -> ReportInfo:
    """Puts together what races tell; with several of them, each part says of which race it is."""
    commands = {"this report": command_line(sys.argv[1:], without="--output-dir")}
    if len(races) == 1:
        (info,) = races.values()
        chosen = {name: getattr(options, name) for name in ("title", "target_accuracy", "opponent") if name in asked}
        return dataclasses.replace(info, commands={**info.commands, **commands}, **chosen)
    problems: list[str] = []
    facts: dict[str, Any] = {}
    for path, info in races.items():
        name = path.resolve().name
        problems += [f"{name}: {problem}" for problem in info.problems]
        facts |= {f"{name}: {fact}": value for fact, value in info.facts.items()}
        commands |= {f"{name}: {what}": command for what, command in info.commands.items()}
    return ReportInfo(
        title=options.title,
        problems=problems,
        commands=commands,
        facts=facts,
        target_accuracy=options.target_accuracy,
        opponent=options.opponent,
    )
