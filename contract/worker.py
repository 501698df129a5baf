"""What the ranks of a group run: ``python -m contract.worker DIRECTORY [RANK_VARIABLE]``, case after case.

All collectives happen here and no judgement: each rank writes what it saw, one file a case, and
says beforehand what it is about to do, so that a hang can be named.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from backends.interface import Backend, BackendOptions
from backends.registry import load_backend
from contract import scenes
from contract.cases import BY_NAME, INIT_LOSS_SCALE, Case
from watch.rank_files import reporting

SPECIFICATION_NAME = "group.json"


class Phases:
    """Says what a rank is doing, one line a phase with the time it began."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = phases_path(directory, rank)

    def enter(self, phase: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{time.time()} {phase}\n")


def phases_path(directory: Path, rank: int) -> Path:
    """Where a rank says what it is doing."""
    return directory / f"rank{rank}.phases"


def observation_path(directory: Path, case_name: str, rank: int) -> Path:
    """Where a rank leaves what it saw of a case."""
    return directory / f"{case_name}.rank{rank}.pt"


RunCases = Callable[[Backend, list[str], scenes.Scenery, Phases], None]


def run_cases(backend: Backend, case_names: list[str], scenery: scenes.Scenery, phases: Phases) -> None:
    """Runs cases in turn, leaving the observations of each."""
    for name in case_names:
        phases.enter(name)
        run_case(backend, BY_NAME[name], name, scenery)


def run_case(backend: Backend, case: Case, name: str, scenery: scenes.Scenery) -> None:
    """Plays the case's scene and writes what this rank saw, whole or not at all, under `name`."""
    seen = getattr(scenes, case.scene)(backend, case, scenery)
    path = observation_path(scenery.directory, name, scenery.rank)
    torch.save(seen, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def main(arguments: list[str], run: RunCases = run_cases) -> None:
    """Joins the group, runs the cases and leaves; on an error, exits with code 1 at once.

    Args:
        arguments: The directory of the group and, where there are several ranks, the variable with the rank.
        run: Runs the cases.
    """
    directory, rank_variable = Path(arguments[0]), next(iter(arguments[1:]), None)
    with reporting(directory, rank_variable) as rank:
        specification = json.loads((directory / SPECIFICATION_NAME).read_text())
        phases = Phases(directory, rank)
        torch.set_num_threads(1)
        phases.enter("import")
        adapter = load_backend(specification["adapter"])
        phases.enter("construct")
        options = BackendOptions(
            precision=specification["precision"],
            device=specification["device"],
            timeout_seconds=specification["timeout_seconds"],
            init_loss_scale=INIT_LOSS_SCALE,
            skip_nonfinite=True,
            find_unused_parameters=specification["find_unused_parameters"],
        )
        backend = adapter(options)
        scenery = scenes.Scenery(
            world_size=specification["world_size"],
            batch_for=specification["world_size"],
            rank=rank,
            directory=directory,
            single_states=specification["single_states"],
        )
        run(backend, specification["cases"], scenery, phases)
        phases.enter("shutdown")
        backend.shutdown()
        torch.save({}, observation_path(directory, "shutdown", rank))


if __name__ == "__main__":
    main(sys.argv[1:])
