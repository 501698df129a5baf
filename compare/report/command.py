"""``lockstep report``: the report of a race, or of any records, wherever they were made."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from compare.collectives.measurement import read_collectives
from compare.race.run import RaceDirectory, RacePlan
from compare.report.results import RESULTS_NAME, CollectiveSeries, Results
from launch.arguments import Parser, named_path
from launch.display import console
from launch.errors import UsageError, refused_path
from records.config import RunConfig
from records.files import write_atomically
from records.names import RECORD_NAME
from records.record import RunRecord, read_record

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_FILE_BYTES = 256 * 2**20


def run(arguments: list[str]) -> int:
    """Makes a report from the command line; returns the exit code."""
    parser = Parser(
        "report",
        operands="FILE ...",
        description="Makes the report of a race, or of any records, wherever they were made.",
    )
    parser.add_argument(
        "files",
        nargs="+",
        type=named_path,
        metavar="FILE",
        help="records of runs, results of collectives",
    )
    parser.add_argument(
        "--output-dir",
        type=named_path,
        default=Path(),
        help="receives report.html, report.md, results.json",
    )
    parser.add_argument("--title", default="Data-parallel backends compared")
    parser.add_argument("--target-accuracy", type=float, default=0.9, help="the accuracy whose time is reported")
    parser.add_argument("--overwrite", action="store_true", help="replace a report that is there")
    asked = parser.parse_args(arguments)
    require_plotting()
    if not 0 < asked.target_accuracy <= 1:  # nan, too
        raise UsageError(f"--target-accuracy {asked.target_accuracy:g}: give a share above 0, and at most 1")
    try:
        _require_room(asked.output_dir, overwrite=asked.overwrite)
        records, collectives = read_inputs(asked.files)
    except OSError as error:
        raise refused_path(error) from error
    from compare.report.analysis import NothingToReport, analyse

    try:
        results = analyse(
            records,
            title=asked.title,
            collectives=collectives,
            commands={"this report": shlex.join(["launch/run.sh", *sys.argv[1:]])},
            target=asked.target_accuracy,
        )
        pages = _render(results)
    except NothingToReport as error:
        raise UsageError(f"{len(asked.files)} file(s): {error}") from error
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UsageError(f"these records do not fit together ({error!r}); leave out those edited by hand") from error
    _write(pages, results.verdict, asked.output_dir, console())
    return 0


def read_inputs(paths: Sequence[Path]) -> tuple[list[tuple[str, RunRecord]], list[CollectiveSeries]]:
    """Reads records of runs and results of collectives.

    Raises:
        UsageError: A file is neither, or of another version; the text names it.
    """
    records: list[tuple[str, RunRecord]] = []
    collectives: list[CollectiveSeries] = []
    for path in paths:
        kind = _kind(path)
        try:
            if kind == "collectives":
                collectives += read_collectives(path).series
            else:
                record = read_record(path)
                RunConfig.model_validate(record.config)  # whose fields everything from here on relies on
                records.append((str(path), record))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: is no {kind} that can be read ({_first_line(error)}); leave it out") from error
    seen: dict[str, str] = {}
    for name, record in records:
        digest = hashlib.sha256(record.model_dump_json().encode()).hexdigest()
        if digest in seen:
            raise UsageError(f"{name}: is the same run as {seen[digest]}; give each record once")
        seen[digest] = name
    return records, collectives


def _kind(path: Path) -> str:
    """Tells what a file holds before it is read whole."""
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: is no file; name a record.json")
    if path.exists() and path.stat().st_size > _MAX_FILE_BYTES:
        raise UsageError(f"{path}: larger than any record ({path.stat().st_size} bytes); leave it out")
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); name a record.json") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not JSON ({_first_line(error)}); is it torn?") from error
    if not isinstance(content, dict) or "schema_version" not in content:
        raise UsageError(f"{path}: is neither a record of a run nor of collectives; leave it out")
    if content.get("kind") == "collectives":
        return "collectives"
    wanted = RunRecord.model_fields["schema_version"].default
    if content["schema_version"] != wanted:
        version = str(content["schema_version"])[:40]
        raise UsageError(f"{path}: a record of schema version {version}, this program reads {wanted}; run it again")
    return "record"


def _first_line(error: BaseException) -> str:
    errors: Callable[[], list[dict[str, object]]] | None = getattr(error, "errors", None)
    if errors is not None:  # pydantic's text has a line for each error
        first = errors()[0]
        where = ".".join(str(part) for part in first["loc"])  # type: ignore[attr-defined]
        return f"{where}: {first['msg']}"[:200]
    return " ".join(str(error).split())[:200]


def _require_room(directory: Path, *, overwrite: bool) -> None:
    for name in (RESULTS_NAME, "report.md", "report.html"):
        if (directory / name).exists() and not overwrite:
            raise UsageError(f"--output-dir {directory}: holds {name} already; add --overwrite or choose another")


def write_report(directory: RaceDirectory, plan: RacePlan, terminal: Console) -> int:
    """Writes the report of a race into its directory; returns the exit code."""
    records, collectives = read_inputs([*directory.records(), *directory.measured_collectives()])
    from compare.report.analysis import NothingToReport, analyse

    options = plan.options
    try:
        results = analyse(
            [(_run_name(Path(name)), record) for name, record in records],
            title="Race of data-parallel backends",
            collectives=collectives,
            problems=[*plan.left_out, *directory.failures(without_record=True)],
            commands={"the race, and with it every figure": plan.command, **_commands_of_runs(records)},
            facts={
                "blocks": options.repeats,
                "steps of a timed run": options.timed_steps,
                "order": f"drawn anew for each block, --order-seed {options.order_seed}",
            },
            target=options.target_accuracy,
        )
    except NothingToReport as error:
        for line in directory.failures():
            print(f"lockstep: {line}", file=sys.stderr)
        print(f"lockstep: {error}; logs are in {directory.path / 'failed'}", file=sys.stderr)
        return 1
    _write(_render(results), results.verdict, directory.path, terminal)
    return 0


def _run_name(path: Path) -> str:
    return path.stem if path.name != RECORD_NAME else path.parent.name


def _commands_of_runs(records: Sequence[tuple[str, RunRecord]]) -> dict[str, str]:
    """One command of each purpose and backend."""
    commands: dict[str, str] = {}
    for _, record in records:
        race = record.config.get("race") or {"purpose": "timed"}
        commands.setdefault(f"a {race['purpose']} run of {record.config['backend']}", record.config["launch_command"])
    return commands


def require_plotting() -> None:
    """Makes sure that a report can be drawn.

    Raises:
        UsageError: A package is missing; the text says what to install.
    """
    for package in ("plotly", "jinja2", "psutil", "scipy"):
        if find_spec(package) is None:
            raise UsageError(f"{package} is missing; pip install 'lockstep[compare]', or use launch/run.sh, which does")


def _render(results: Results) -> dict[str, str]:
    from compare.report.html import render_html
    from compare.report.markdown import render_markdown

    return {
        RESULTS_NAME: results.model_dump_json(indent=1) + "\n",
        "report.md": render_markdown(results),
        "report.html": render_html(results),
    }


def _write(pages: dict[str, str], verdict: Sequence[str], directory: Path, terminal: Console) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            write_atomically(directory / name, text)
    except OSError as error:
        raise UsageError(f"--output-dir {directory}: {error.strerror}; choose another directory") from error
    for sentence in verdict:
        terminal.print(sentence)
    terminal.print(f"report: {directory / 'report.html'} (also report.md, {RESULTS_NAME})")
