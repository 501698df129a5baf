"""Shows the results of an adapter: rows on the terminal, JSON in a file, and the explanation of a clause."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from contract.check import Check, State
from contract.checks.judging import IN_FLOAT32
from contract.promises import find_promise
from contract.suite import Result, Suite
from contract.traps import load_traps
from contract.verdicts import Verdict, summarise
from records.environment import describe_environment
from records.files import write_atomically

_STYLES = {
    State.PASSED: "green",
    State.FAILED: "bold red",
    State.NOT_RUN: "red",
    State.UNSUPPORTED: "cyan",
    State.UNAVAILABLE: "yellow",
    State.EXPECTED_FAILURE: "magenta",
}


class Rows:
    """Prints what the suite is doing, and a row for each check as soon as all of its cases are judged.

    Checks that fail of what an earlier row says share one row, which comes last.
    """

    def __init__(self, suite: Suite, terminal: Console, *, is_whole: bool) -> None:
        self._suite, self._terminal, self._is_whole = suite, terminal, is_whole
        self._left = Counter(instance.check.id for instance in suite.instances)
        self._results: list[Result] = []
        # By cause, the check whose row says it; by state and such a check, the others that have its cause.
        self._told: dict[str, str] = {}
        self._alike: dict[tuple[State, str], list[str]] = {}
        self._place = ""
        self._width = max(len(instance.check.title) for instance in suite.instances)
        self._print("check", "clause", Text("result"), "where, or why")

    def add(self, result: Result) -> None:
        """Takes the next result, and prints the row of its check if that is complete and says something new."""
        self._results.append(result)
        check = result.instance.check
        self._left[check.id] -= 1
        if self._left[check.id]:
            return
        (verdict,) = [verdict for verdict in self.verdicts() if verdict.check is check]
        if verdict.causes and verdict.causes <= self._told.keys():
            teller = min(self._told[cause] for cause in verdict.causes)
            self._alike.setdefault((verdict.state, teller), []).append(check.id)
            return
        for cause in verdict.causes:
            self._told.setdefault(cause, check.id)
        detail = _where(verdict)
        if verdict.reason:
            detail = verdict.reason if verdict.state is not State.PASSED else f"{detail}; {verdict.reason}"
        self._print(check.id, check.title, Text(verdict.state.value, style=_STYLES[verdict.state]), detail)

    def verdicts(self) -> list[Verdict]:
        """Returns the verdicts on all checks that have a result so far."""
        known = self._suite.known_failures if self._suite.unavailable_reason is None else {}
        return summarise(self._results, known, is_whole=self._is_whole)

    def enter(self, place: str) -> None:
        """Prints which group or job the suite has begun, unless a status line on a terminal shows it."""
        if place != self._place and not self._terminal.is_terminal:
            self._terminal.print(f"{place}: {len(self._results)} of {len(self._suite.instances)} results so far")
        self._place = place

    def close(self, seconds: float) -> None:
        """Prints which checks share a reason, and a line with the number of checks in each state."""
        for (state, teller), alike in self._alike.items():
            text = (
                f"{', '.join(sorted(alike))}:  ",
                (state.value, _STYLES[state]),
                f", for the reason given at {teller}",
            )
            self._terminal.print(Text.assemble(*text))
        if not self._suite.float64:
            self._terminal.print(
                f"{self._suite.adapter} declares that it cannot average float64: its cases in float64 ran in float32, "
                f"and were judged by its rounding ({IN_FLOAT32:g})"
            )
        verdicts = self.verdicts()
        counts = [f"{_count(verdicts, state)} {state.value}" for state in State if _count(verdicts, state)]
        self._terminal.print(f"{self._suite.name} on {self._suite.device}: {', '.join(counts)} in {seconds:.0f} s")

    def _print(self, check: str, clause: str, state: Text, detail: str) -> None:
        state.pad_right(max(len(state.value) for state in State) - len(state))
        self._terminal.print(Text.assemble(f"{check:5}  {clause:{self._width}}  ", state, f"  {detail}"))


def _count(verdicts: list[Verdict], state: State) -> int:
    return sum(verdict.state is state for verdict in verdicts)


def _where(verdict: Verdict) -> str:
    """Returns the world sizes and precisions at which a check has passed."""
    passed = [result.instance for result in verdict.results if result.state is State.PASSED]
    sizes = sorted({instance.world_size for instance in passed})
    precisions = dict.fromkeys(instance.case.precision for instance in passed)
    ranks = f"{', '.join(map(str, sizes))} rank{'s' if sizes != [1] else ''}"
    return f"{ranks}; {', '.join(precisions)}" if passed else ""


def write_json(suite: Suite, verdicts: list[Verdict], seconds: float, path: Path) -> None:
    """Writes every verdict and every single result as JSON, in one atomic step."""
    content: dict[str, Any] = {
        "schema_version": 1,
        "adapter": suite.adapter,
        "settings": suite.own.settings.model_dump(mode="json", exclude_unset=True),
        "device": suite.device,
        "float64": suite.float64,
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
    """Prints the clause, how and where it is checked, the promises that it is about, and the traps that it catches."""
    cases = [f"{case.name} ({case.precision}; {', '.join(map(str, case.world_sizes))})" for case in check.cases]
    terminal.print(Text(f"{check.id}  {check.clause}", style="bold"))
    if check.explanation:
        terminal.print(Text(f"\n{check.explanation}"))
    terminal.print(Text(f"\nCases (precision; numbers of ranks): {', '.join(cases)}"))
    terminal.print(Text("\nPromises in backends/interface.py:"))
    for quote in check.promises:
        terminal.print(Text(f"  {find_promise(quote)}"))
    traps = load_traps()
    if check.traps:
        terminal.print(Text("\nTraps it catches:"))
    for trap in check.traps:
        terminal.print(Text(f"  {trap:4}{traps[trap].trap}"))
