"""``launch/run.sh contract ADAPTER``: holds an adapter to the contract and shows the result of each clause."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from contract.options import ContractOptions, known_check
from launch.arguments import Parser, named_path
from launch.display import console
from launch.errors import UsageError
from launch.options import add_options, validated
from launch.signals import Interrupted, signals_raised

if TYPE_CHECKING:
    from contract.suite import Suite


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "contract",
        operands="ADAPTER",
        argument_default=argparse.SUPPRESS,
        description="Proves, clause by clause, that N ranks of an adapter compute what one process computes.",
    )
    parser.add_argument(
        "adapter", nargs="?", default=None, help="a backend, or your own adapter as package.module:Class"
    )
    add_options(parser, {"contract": ContractOptions})
    parser.add_argument(
        "--json",
        type=named_path,
        default=None,
        metavar="FILE",
        help="write all results to this file; it must not exist yet",
    )
    parser.add_argument(
        "--explain",
        default=None,
        metavar="ID",
        help="show what a check demands, how it works and which traps it catches",
    )
    return parser


def run(arguments: list[str]) -> int:
    """Runs the command; returns 0 if nothing failed, 1 if something did, 2 if the adapter cannot run here at all.

    Raises:
        UsageError, UnsupportedError: The request cannot be served.
    """
    asked = _parser().parse_args(arguments)
    if asked.explain is not None:
        _explain(asked.explain, asked.adapter)
        return 0
    if asked.adapter is None:
        raise UsageError("name an adapter: a backend, or your own as package.module:Class; see --help")
    options: ContractOptions = validated(ContractOptions, vars(asked))
    target = _target(asked.json)
    directory = Path(tempfile.mkdtemp(prefix="lockstep-contract-"))
    failed = False
    try:
        with signals_raised():
            suite, failed = _prove(asked.adapter, directory, options, target)
    except Interrupted as interruption:
        _tell(f"interrupted by {interruption}; all ranks have been ended")
        return 128 + interruption.signal_number
    finally:
        if not failed:
            shutil.rmtree(directory, ignore_errors=True)
    if failed:
        _tell(f"{asked.adapter} breaks the contract; the logs of its ranks are in {directory}")
        return 1
    if suite.unavailable_reason is not None:
        _tell(f"nothing was proven: {asked.adapter} cannot run here: {suite.unavailable_reason}")
        return 2
    return 0


def _tell(text: str) -> None:
    print(f"lockstep: {text}", file=sys.stderr)


def _explain(check_id: str, adapter: str | None) -> None:
    if adapter is not None:
        raise UsageError(f"--explain takes no adapter, but got {adapter}; leave it out")
    from contract.check import all_checks
    from contract.report import explain

    try:
        check = all_checks()[known_check(check_id)]
    except ValueError as error:
        raise UsageError(f"--explain {check_id}: {error}") from error
    explain(check, console())


def _prove(adapter: str, directory: Path, options: ContractOptions, target: Path | None) -> tuple[Suite, bool]:
    """Shows each check as soon as it is judged; returns the suite, and whether any check failed or never ran."""
    from contract.check import State
    from contract.report import Rows, write_json
    from contract.suite import Suite

    terminal = console()
    began = time.monotonic()
    with terminal.status("") as status:

        def follow(place: str, phase: str) -> None:
            status.update(f"{place}: {phase}" if phase else place)
            rows.enter(place)

        suite = Suite(adapter, directory, options, on_phase=follow)
        if not suite.instances:
            raise UsageError("no clause matches --num-processes, --precision and --check together; relax one of them")
        rows = Rows(suite, terminal, is_whole=options.is_whole)
        for result in suite.results():
            rows.add(result)
    seconds = time.monotonic() - began
    rows.close(seconds)
    verdicts = rows.verdicts()
    if target is not None:
        write_json(suite, verdicts, seconds, target)
    return suite, any(verdict.state in (State.FAILED, State.NOT_RUN) for verdict in verdicts)


def _target(path: Path | None) -> Path | None:
    """Refuses a file that cannot be written, before anything runs."""
    if path is None:
        return None
    try:
        if path.exists():
            raise UsageError(f"--json {path}: exists already; remove it or choose another file")
        if not path.absolute().parent.is_dir():
            raise UsageError(f"--json {path}: there is no directory {path.parent}; create it first")
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise UsageError(f"--json {path}: {error.strerror} there; choose another directory") from error
    return path
