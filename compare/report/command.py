"""``launch/run.sh report``: the report of any records, wherever they were made."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from compare.report.info import NothingToReport, ReportInfo, UnknownOpponent
from compare.report.pages import render, require_packages, require_room, write_pages
from compare.report.reading import read_inputs
from launch.arguments import Parser, command_line, named_path
from launch.display import console
from launch.errors import UsageError, refused_path
from launch.options import add_options, validated


class ReportOptions(BaseModel):
    """What a user may ask of a report."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    output_dir: Path = Field(Path(), description="receives report.html, report.md, results.json")
    title: str = Field("Data-parallel backends compared", description="title of the report")
    target_accuracy: float = Field(0.9, gt=0, le=1, description="the report gives the time until this accuracy")
    opponent: str | None = Field(None, description="compare all others with this entrant (default: with the fastest)")
    overwrite: bool = Field(False, description="replace the report that output_dir holds")


def run(arguments: list[str]) -> int:
    """Makes a report from the command line; returns the exit code."""
    parser = Parser(
        "report",
        operands="FILE ...",
        argument_default=argparse.SUPPRESS,
        description="Makes the report of any records, wherever they were made.",
    )
    parser.add_argument(
        "files",
        nargs="+",
        type=named_path,
        metavar="FILE",
        help="records of runs, results of collectives",
    )
    add_options(parser, {"report": ReportOptions})
    asked = vars(parser.parse_args(arguments))
    files: list[Path] = asked["files"]
    options: ReportOptions = validated(ReportOptions, asked)
    require_packages()
    try:
        if not options.overwrite:
            require_room(options.output_dir)
        inputs = read_inputs(files)
    except OSError as error:
        raise refused_path(error) from error
    from compare.report.analysis import analyse

    info = ReportInfo(
        title=options.title,
        commands={"this report": command_line(sys.argv[1:], without="--output-dir")},
        target_accuracy=options.target_accuracy,
        opponent=options.opponent,
    )
    try:
        results = analyse(inputs.runs, inputs.collectives, info)
        pages = render(results)
    except NothingToReport as error:
        raise UsageError(f"{len(files)} file(s): {error}") from error
    except UnknownOpponent as error:
        raise UsageError(f"--opponent {error}") from error
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"cannot compare these records ({error!r}); pass fewer files to find the inconsistent one"
        ) from error
    write_pages(pages, results, options.output_dir, console())
    return 0
