"""The table of docs/contract.md: ``python -m tests.contract_table DIRECTORY``.

It holds every backend to the contract. The report of each is kept there, and not made again. The seconds mean
something on an idle machine only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contract.check import State
from launch.starters.environment import command_environment
from launch.starters.interface import PROJECT_DIRECTORY

# With options of their own, as far as they change what travels.
ADAPTERS = (
    *("single", "ddp", "ddp --transport shared-memory", "fsdp2", "fsdp2 --no-reshard-after-forward"),
    *("deepspeed", "deepspeed --zero-stage 2", "horovod", "accelerate", "fabric", "tests.by_hand:ByHandBackend"),
)
WORLD_SIZES = (1, 2, 3, 4)
_STATES = {
    State.PASSED: "passed",
    State.UNSUPPORTED: "unsupported, and refused",
    State.EXPECTED_FAILURE: "expected failure",
    State.FAILED: "failed",
    State.NOT_RUN: "not run",
}


def main(arguments: Sequence[str]) -> None:
    """Makes the reports that are missing, and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.contract_table", description=__doc__)
    parser.add_argument("directory", type=Path, help="where the reports are kept")
    directory: Path = parser.parse_args(arguments).directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    reports = [
        _report(adapter, directory / f"{adapter.partition(':')[0].replace(' ', '')}.json") for adapter in ADAPTERS
    ]
    print(f"| `launch/run.sh contract` | {' | '.join(ADAPTERS)} |")
    print("| --- |" + " --- |" * len(ADAPTERS))
    for state, words in _STATES.items():
        _row(words, [sum(check["state"] == state.value for check in report["checks"]) for report in reports])
    for world_size in WORLD_SIZES:
        _row(f"cases passed with {world_size} rank{'s' * (world_size > 1)}", [_passed(r, world_size) for r in reports])
    _row("seconds", [round(report["seconds"]) for report in reports])


def _report(adapter: str, path: Path) -> dict[str, Any]:
    if not path.exists():
        subprocess.run(
            [sys.executable, "-m", "launch", "contract", *adapter.split(), "--json", str(path)],
            cwd=PROJECT_DIRECTORY,
            env={**command_environment(), "PYTHONPATH": str(PROJECT_DIRECTORY)},
            stdout=subprocess.DEVNULL,
            check=False,  # the table shows what failed
        )
    report: dict[str, Any] = json.loads(path.read_bytes())
    return report


def _passed(report: dict[str, Any], world_size: int) -> int:
    results = [result for check in report["checks"] for result in check["results"]]
    return Counter((result["world_size"], result["state"]) for result in results)[world_size, State.PASSED.value]


def _row(words: str, cells: Sequence[int]) -> None:
    print(f"| {words} | {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main(sys.argv[1:])
