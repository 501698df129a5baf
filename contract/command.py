"""``launch/run.sh contract ADAPTER``: holds an adapter to the contract and shows how each clause fared."""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from backends.devices import count_gpus
from backends.interface import PRECISIONS
from launch.arguments import Parser, named_path
from launch.display import console
from launch.errors import UsageError
from launch.signals import Interrupted, signals_raised

if TYPE_CHECKING:
    from contract.suite import Suite

_MAX_PROCESSES = 64


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "contract",
        operands="ADAPTER",
        description="Proves, clause by clause, that N ranks of an adapter compute what one process computes.",
    )
    parser.add_argument("adapter", nargs="?", help="a backend, or your own adapter as package.module:Class")
    parser.add_argument("--num-processes", metavar="N,...", help="world sizes (default: 1,2,4 as each check needs)")
    parser.add_argument("--precision", metavar="P,...", help=f"precisions (default: {','.join(PRECISIONS)})")
    parser.add_argument("--check", metavar="ID,...", help="only these checks")
    parser.add_argument("--device", metavar="auto|cpu|cuda", default="auto", help="where to compute (default: auto)")
    parser.add_argument("--json", type=named_path, metavar="FILE", help="write all results there; must not exist yet")
    parser.add_argument("--explain", metavar="ID", help="say what a check demands, which traps it catches, and how")
    return parser


def run(arguments: list[str]) -> int:
    """Runs the command; returns 0 if nothing failed, 1 if something did, 2 if the adapter cannot run here at all.

    Raises:
        UsageError, UnsupportedError: The request cannot be served.
    """
    options = _parser().parse_args(arguments)
    from contract.check import all_checks
    from contract.report import explain
    from contract.suite import Suite

    checks = all_checks()
    if options.explain is not None:
        if options.adapter is not None:
            raise UsageError(f"--explain takes no adapter, but got {options.adapter}; leave it out")
        explain(checks[_known(options.explain, list(checks), "--explain")], console())
        return 0
    if options.adapter is None:
        raise UsageError("name an adapter: a backend, or your own as package.module:Class; see --help")
    world_sizes = None if options.num_processes is None else _world_sizes(options.num_processes)
    precisions = _chosen(options.precision, list(PRECISIONS), "--precision")
    check_ids = _chosen(options.check, list(checks), "--check")
    target = _target(options.json)
    device = options.device
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {device}: choose auto, cpu or cuda")
    if device == "cuda" and count_gpus() == 0:
        raise UsageError("--device cuda: no GPU is visible here; use --device cpu or check the driver")

    directory = Path(tempfile.mkdtemp(prefix="lockstep-contract-"))
    make_suite = functools.partial(
        Suite,
        options.adapter,
        directory,
        device=device,
        world_sizes=world_sizes,
        precisions=precisions,
        check_ids=check_ids,
    )
    is_whole = options.num_processes is None and options.precision is None
    failed = False
    try:
        with signals_raised():
            suite, failed = _prove(make_suite, is_whole=is_whole, target=target)
    except Interrupted as interruption:
        print(f"lockstep: interrupted by {interruption}; all ranks have been ended", file=sys.stderr)
        return 128 + interruption.signal_number
    finally:
        if not failed:
            shutil.rmtree(directory, ignore_errors=True)
    if failed:
        print(
            f"lockstep: {options.adapter} breaks the contract; what its ranks said is in {directory}", file=sys.stderr
        )
        return 1
    if suite.unavailable_reason is not None:
        print(
            f"lockstep: nothing was proven: {options.adapter} cannot run here: {suite.unavailable_reason}",
            file=sys.stderr,
        )
        return 2
    return 0


def _prove(make_suite: Callable[..., Suite], *, is_whole: bool, target: Path | None) -> tuple[Suite, bool]:
    """Shows how each check fares as it is judged; returns the suite, and whether any check failed."""
    from contract.check import State
    from contract.report import Rows, write_json

    terminal = console()
    began = time.monotonic()
    with terminal.status("") as status:

        def follow(place: str, phase: str) -> None:
            status.update(f"{place}: {phase}" if phase else place)
            rows.enter(place)

        suite = make_suite(on_phase=follow)
        if not suite.instances:
            raise UsageError("no check fits these --num-processes, --precision and --check together; ask for more")
        rows = Rows(suite, terminal, is_whole=is_whole)
        for result in suite.results():
            rows.add(result)
    seconds = time.monotonic() - began
    rows.close(seconds)
    verdicts = rows.verdicts()
    if target is not None:
        write_json(suite, verdicts, seconds, target)
    return suite, any(verdict.state is State.FAILED for verdict in verdicts)


def _world_sizes(text: str) -> list[int]:
    sizes = []
    for word in text.split(","):
        if not word.strip().isdecimal() or not 1 <= int(word) <= _MAX_PROCESSES:
            raise UsageError(f"--num-processes {text}: {word!r} is no number from 1 to {_MAX_PROCESSES}")
        sizes.append(int(word))
    return sizes


def _chosen(text: str | None, known: list[str], option: str) -> list[str]:
    if text is None:
        return known
    words = [_known(word.strip(), known, option) for word in text.split(",")]
    return [word for word in known if word in words]


def _known(word: str, known: list[str], option: str) -> str:
    if word not in known:
        named = ", ".join(known) if len(known) < 10 else f"{known[0]} to {known[-1]}"
        raise UsageError(f"{option} {word}: there is no such thing; choose from {named}")
    return word


def _target(path: Path | None) -> Path | None:
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
