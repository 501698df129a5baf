"""``launch/run.sh contract ADAPTER``: holds an adapter to the contract and shows the result of each clause."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from backends.registry import find_backend
from contract.options import ContractOptions, OwnOptions, known_check
from launch.arguments import Parser, named_path, require_new_file
from launch.display import console
from launch.errors import UsageError
from launch.options import add_options, validated
from launch.signals import Interrupted, signals_raised
from records.environment import describe_environment
from records.files import write_atomically
from tasks.interface import Task
from tasks.registry import load_task

# Takes an adapter, its own options, a directory for files, options and the file for results; returns the exit code.
_Prove = Callable[[str, OwnOptions, Path, ContractOptions, Path | None], int]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "contract",
        operands="ADAPTER",
        argument_default=argparse.SUPPRESS,
        description="Proves, clause by clause, that N ranks of an adapter compute what one process computes. The "
        "options of the adapter alone may follow, such as --zero-stage 2 for deepspeed.",
    )
    parser.add_argument(
        "adapter", nargs="?", default=None, help="a backend, or your own adapter as package.module:Class"
    )
    add_options(parser, {"contract": ContractOptions})
    parser.add_argument(
        "--task",
        default=None,
        metavar="NAME",
        help="prove it on this task in place of the contract's own: a name, or package.module:Class; the options of "
        "the task may follow",
    )
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
    """Runs the command; returns 0 if nothing failed, 1 if something did, 2 if nothing could be tried.

    Raises:
        UsageError, UnsupportedError: The request cannot be served.
    """
    parser = _parser()
    asked, rest = parser.parse_known_args(arguments)
    if asked.explain is not None:
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        _explain(asked.explain, asked.adapter)
        return 0
    if asked.adapter is None:
        raise UsageError("name an adapter: a backend, or your own as package.module:Class; see --help")
    options: ContractOptions = validated(ContractOptions, vars(asked))
    require_new_file("--json", asked.json)
    settings_class = find_backend(asked.adapter).settings
    models: dict[str, type[BaseModel]] = {f"backend {asked.adapter}": settings_class}
    task_class = None if asked.task is None else _own_task(asked.task, options)
    if task_class is not None:
        models[f"task {asked.task}"] = task_class.Settings
    own_parser = Parser("contract", operands="ADAPTER", argument_default=argparse.SUPPRESS)
    add_options(own_parser, models)
    given = vars(own_parser.parse_args(rest))
    # With --task, the options of the task are among them, too.
    own = OwnOptions(tuple(rest), validated(settings_class, given))
    prove = _prove_clauses if task_class is None else _task_prover(asked.task, task_class, given)
    directory = Path(tempfile.mkdtemp(prefix="lockstep-contract-"))
    code = 0
    try:
        with signals_raised():
            code = prove(asked.adapter, own, directory, options, asked.json)
    except Interrupted as interruption:
        code = 128 + interruption.signal_number
        # A time limit ends what hangs with SIGTERM, and then one wants to know what it was.
        where = f"; the logs of its ranks are in {directory}" if interruption.signal_number == signal.SIGTERM else ""
        _tell(f"interrupted by {interruption}; all ranks have been ended{where}")
        return code
    finally:
        if code not in (1, 128 + signal.SIGTERM):
            shutil.rmtree(directory, ignore_errors=True)
    if code == 1:
        what = (
            "breaks the contract" if asked.task is None else f"is not proven to train {asked.task} as one process does"
        )
        _tell(f"{asked.adapter} {what}; the logs of its ranks are in {directory}")
    return code


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


def _nothing_proven(adapter: str, reason: str) -> int:
    _tell(f"nothing was proven: {adapter} cannot run here: {reason}")
    return 2


def _own_task(name: str, options: ContractOptions) -> type[Task]:
    """Loads a task of the user's own.

    Raises:
        UsageError, TaskInputError: There is no such task, or clauses were asked for, too.
    """
    if options.check:
        raise UsageError(
            f"--check {','.join(options.check)} names clauses, which are about other tasks than --task {name}; "
            "leave one of the two out"
        )
    return load_task(name)


def _task_prover(name: str, task_class: type[Task], given: dict[str, Any]) -> _Prove:
    """Returns what proves a task with the options that were given for it.

    Raises:
        UsageError, TaskInputError: The task cannot use its options.
    """
    task = task_class(validated(task_class.Settings, given))

    def prove(adapter: str, own: OwnOptions, directory: Path, options: ContractOptions, target: Path | None) -> int:
        from contract.own_task import OwnTask, prove_task

        reason = find_backend(adapter).unavailable_reason()
        if reason is not None:
            return _nothing_proven(adapter, reason)
        task.prepare()
        proofs = prove_task(adapter, own.settings, OwnTask(name, task), options, directory, console())
        if target is not None:
            content = {
                "schema_version": 1,
                "adapter": adapter,
                "settings": own.settings.model_dump(mode="json", exclude_unset=True),
                "proofs": [{"state": one.state, **one.facts} for one in proofs],
                "environment": describe_environment(with_torch=True).model_dump(mode="json"),
            }
            write_atomically(target.absolute(), json.dumps(content, indent=1) + "\n")
        counts = Counter(proof.state for proof in proofs)
        console().print(f"{adapter}, {name}: " + ", ".join(f"{number} {state}" for state, number in counts.items()))
        if not counts.keys() - {"unsupported"}:
            return _nothing_proven(adapter, "it supports none of what was asked for")
        return 1 if counts["failed"] or counts["unknown"] else 0

    return prove


def _prove_clauses(
    adapter: str, own: OwnOptions, directory: Path, options: ContractOptions, target: Path | None
) -> int:
    """Shows each check as soon as it is judged; returns the exit code, which is 2 if nothing was proven."""
    from contract.check import State
    from contract.report import Rows, write_json
    from contract.suite import Suite

    terminal = console()
    began = time.monotonic()
    running = "the start"
    with terminal.status("") as status:

        def follow(place: str, phase: str) -> None:
            nonlocal running
            running = f"{place}: {phase}" if phase else place
            status.update(running)
            rows.enter(place)

        suite = Suite(adapter, directory, options, own=own, on_phase=follow)
        if not suite.instances:
            raise UsageError("no clause matches --num-processes, --precision and --check together; relax one of them")
        rows = Rows(suite, terminal, is_whole=options.is_whole)
        try:
            for result in suite.results():
                rows.add(result)
        except Interrupted:
            _tell(f"what was running: {running}")
            raise
    seconds = time.monotonic() - began
    rows.close(seconds)
    verdicts = rows.verdicts()
    if target is not None:
        write_json(suite, verdicts, seconds, target)
    states = {verdict.state for verdict in verdicts}
    if states & {State.FAILED, State.NOT_RUN}:
        return 1
    if suite.unavailable_reason is not None:
        return _nothing_proven(adapter, suite.unavailable_reason)
    if not states & {State.PASSED, State.EXPECTED_FAILURE}:
        missing = next((verdict.reason for verdict in verdicts if verdict.state is State.UNAVAILABLE), None)
        return _nothing_proven(adapter, missing or "it supports none of what was asked for")
    return 0
