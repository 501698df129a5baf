"""Showing how an adapter fared: a table for people, JSON for machines, and what a check is about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from contract.check import Check, State
from contract.suite import Suite, Verdict
from contract.traps import load_traps
from launch.record import describe_environment, write_atomically

_STYLES = {
    State.PASSED: "green",
    State.FAILED: "bold red",
    State.UNSUPPORTED: "cyan",
    State.UNAVAILABLE: "yellow",
    State.EXPECTED_FAILURE: "magenta",
}


def show(suite: Suite, verdicts: list[Verdict], seconds: float, terminal: Console) -> None:
    """Prints a row for each check and a line that counts them."""
    table = Table("check", "clause", "result", "where, why", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for verdict in verdicts:
        detail = _where(verdict)
        if verdict.reason:
            detail = verdict.reason if verdict.state is not State.PASSED else f"{detail}; {verdict.reason}"
        state = Text(verdict.state.value, style=_STYLES[verdict.state])
        table.add_row(verdict.check.id, verdict.check.title, state, Text(detail))
    terminal.print(table)
    counts = [f"{_count(verdicts, state)} {state.value}" for state in State if _count(verdicts, state)]
    terminal.print(Text(f"{suite.adapter} on {suite.device}: {', '.join(counts)} in {seconds:.0f} s"))


def _count(verdicts: list[Verdict], state: State) -> int:
    return sum(verdict.state is state for verdict in verdicts)


def _where(verdict: Verdict) -> str:
    """The world sizes and precisions a check passed at."""
    passed = [result.instance for result in verdict.results if result.state is State.PASSED]
    sizes = sorted({instance.world_size for instance in passed})
    precisions = dict.fromkeys(instance.case.precision for instance in passed)
    ranks = f"{', '.join(map(str, sizes))} rank{'s' if sizes != [1] else ''}"
    return f"{ranks}; {', '.join(precisions)}" if passed else ""


def write_json(suite: Suite, verdicts: list[Verdict], seconds: float, path: Path) -> None:
    """Writes every verdict and every single result, whole or not at all."""
    content: dict[str, Any] = {
        "schema_version": 1,
        "adapter": suite.adapter,
        "device": suite.device,
        "seconds": round(seconds, 1),
        "seconds_by_group": {place: round(spent, 1) for place, spent in suite.seconds.items()},
        "environment": describe_environment(with_torch=True).model_dump(mode="json"),
        "checks": [
            {
                "id": verdict.check.id,
                "clause": verdict.check.clause,
                "traps": list(verdict.check.traps),
                "state": verdict.state.value,
                "reason": verdict.reason or None,
                "results": [
                    {
                        "case": result.instance.case.name,
                        "world_size": result.instance.world_size,
                        "precision": result.instance.case.precision,
                        "state": result.state.value,
                        "reason": result.reason or None,
                        "link": result.link or None,
                    }
                    for result in verdict.results
                ],
            }
            for verdict in verdicts
        ],
    }
    write_atomically(path.absolute(), json.dumps(content, indent=1, allow_nan=False) + "\n")


def explain(check: Check, terminal: Console) -> None:
    """Prints the clause, how it is checked, where, and the traps it catches."""
    cases = [f"{case.name} ({case.precision}; {', '.join(map(str, case.world_sizes))})" for case in check.cases]
    terminal.print(Text(f"{check.id}  {check.clause}", style="bold"))
    if check.explanation:
        terminal.print(Text(f"\n{check.explanation}"))
    terminal.print(Text(f"\nEvidence (precision; ranks): {', '.join(cases)}"))
    traps = load_traps()
    if check.traps:
        terminal.print(Text("\nTraps it catches:"))
    for trap in check.traps:
        terminal.print(Text(f"  {trap:4}{traps[trap].trap}"))
