"""The catalogue of traps: what goes wrong in real projects, and which check or test catches it.

``python -m contract.traps > docs/traps.md`` renders it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict

from contract.check import all_checks

_VERDICTS = ("caught", "impossible", "open")


class Trap(BaseModel):
    """One way to get data-parallel training wrong.

    Attributes:
        trap: What goes wrong, in one sentence.
        verdict: "caught" by checks or tests; "impossible", because of how things are built here;
            "open", because something is missing to test it.
        how: Why it is impossible, or what is missing; for a trap that is caught, anything worth adding.
        tests: Tests outside the contract that catch it, as file::name.
    """

    model_config = ConfigDict(extra="forbid")

    trap: str
    verdict: Literal["caught", "impossible", "open"]
    how: str = ""
    tests: tuple[str, ...] = ()


def load_traps() -> dict[str, Trap]:
    """Reads the catalogue; returns the traps by id."""
    content = yaml.safe_load(Path(__file__).with_name("traps.yaml").read_text(encoding="utf-8"))
    return {trap_id: Trap.model_validate(trap) for trap_id, trap in content.items()}


def render() -> str:
    """Returns the catalogue as Markdown, with the checks and tests that catch each trap."""
    catching: dict[str, list[str]] = {}
    for check in all_checks().values():
        for trap_id in check.traps:
            catching.setdefault(trap_id, []).append(check.id)
    traps = load_traps()
    counts = {verdict: sum(trap.verdict == verdict for trap in traps.values()) for verdict in _VERDICTS}
    lines = [
        "# Traps",
        "",
        f"{len(traps)} ways to get data-parallel training wrong, found in published scripts or in libraries. Of these, "
        f"{counts['caught']} are caught by a check or a test, {counts['impossible']} cannot happen by design, and "
        f"{counts['open']} cannot be tested yet.",
        "",
        "`C..` are checks of the contract: `launch/run.sh contract --explain C16` shows what one demands. This page is "
        "made by `python -m contract.traps > docs/traps.md` from [contract/traps.yaml](../contract/traps.yaml).",
        "",
        "| id | trap | verdict | caught by | why, or how |",
        "| --- | --- | --- | --- | --- |",
    ]
    for trap_id, trap in traps.items():
        by = [*catching.get(trap_id, []), *(f"`{test.removeprefix('tests/')}`" for test in trap.tests)]
        lines.append(f"| {trap_id} | {_cell(trap.trap)} | {trap.verdict} | {', '.join(by)} | {_cell(trap.how)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(render())
