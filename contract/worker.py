"""What each rank of a group runs: ``python -m contract.worker DIRECTORY [RANK_VARIABLE]``, one case after the other.

The ranks communicate here, and nothing is judged: each rank writes what it observes of a case into a file. Before
each phase it writes the name of the phase, so that a hang can be named.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from backends.interface import Backend, BackendOptions
from backends.registry import find_backend, load_backend
from contract import scenes
from contract.case import INIT_LOSS_SCALE, Case
from contract.cases import BY_NAME
from training.optimizer import import_compiler
from watch.rank_files import reporting

SPECIFICATION_NAME = "group.json"


class Specification(BaseModel):
    """What the ranks of a group are told.

    Attributes:
        adapter: The name of a backend, or "module:Class".
        world_size: The number of ranks.
        precision: For the backend's options.
        device: For the backend's options.
        skip_nonfinite: For the backend's options.
        find_unused_parameters: For the backend's options.
        grad_compression: For the backend's options.
        settings: The options of the adapter alone.
        timeout_seconds: For the backend's options.
        cases: The names of the cases to run.
        single_states: For each case that resumes from the single-process backend, the file of its state.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    adapter: str
    world_size: int
    precision: str
    device: str
    skip_nonfinite: bool
    find_unused_parameters: bool
    grad_compression: str
    settings: dict[str, Any]
    timeout_seconds: float
    cases: list[str]
    single_states: dict[str, Path]


class Phases:
    """The file in which a rank notes its phases: a line for each, with the time at which it began."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = phases_path(directory, rank)

    def enter(self, phase: str) -> None:
        """Notes that this rank begins a phase."""
        with self._path.open("a") as file:
            file.write(f"{time.time()} {phase}\n")


def phases_path(directory: Path, rank: int) -> Path:
    """Returns the file in which a rank notes its phases."""
    return directory / f"rank{rank}.phases"


def observation_path(directory: Path, case_name: str, rank: int) -> Path:
    """Returns the file in which a rank leaves what it has observed of a case."""
    return directory / f"{case_name}.rank{rank}.pt"


RunCases = Callable[[Backend, list[str], scenes.Scenery, Phases], None]


def run_cases(backend: Backend, case_names: list[str], scenery: scenes.Scenery, phases: Phases) -> None:
    """Runs cases in turn; each leaves its observations."""
    for name in case_names:
        phases.enter(name)
        run_case(backend, BY_NAME[name], name, scenery)


def run_case(backend: Backend, case: Case, name: str, scenery: scenes.Scenery) -> None:
    """Runs the scene of a case, and writes what this rank has observed under `name`, in one atomic step."""
    seen = getattr(scenes, case.scene)(backend, case, scenery)
    path = observation_path(scenery.directory, name, scenery.rank)
    torch.save(seen, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def load_libraries(directory: str, rank_variable: str | None = None) -> None:
    """Imports what each rank would import, for a starter whose ranks are copies of one process; not the adapter.

    An adapter that hangs or fails while it is imported does so in a rank, which says so.
    """
    import_compiler()
    gc.freeze()  # nobody looks for garbage among what was imported


def main(arguments: list[str], run: RunCases = run_cases) -> None:
    """Joins the group, runs the cases and leaves the group; an error ends the process at once with code 1.

    Args:
        arguments: The directory of the group and, where there are several ranks, the variable that holds the rank.
        run: Runs the cases.
    """
    directory, rank_variable = Path(arguments[0]), next(iter(arguments[1:]), None)
    with reporting(directory, rank_variable) as rank:
        specification = Specification.model_validate_json((directory / SPECIFICATION_NAME).read_bytes())
        phases = Phases(directory, rank)
        torch.set_num_threads(1)
        phases.enter("import")
        adapter = load_backend(specification.adapter)
        phases.enter("construct")
        options = BackendOptions(
            precision=specification.precision,
            device=specification.device,
            timeout_seconds=specification.timeout_seconds,
            init_loss_scale=INIT_LOSS_SCALE,
            skip_nonfinite=specification.skip_nonfinite,
            find_unused_parameters=specification.find_unused_parameters,
            grad_compression=specification.grad_compression,
            settings=find_backend(specification.adapter).settings.model_validate(specification.settings),
        )
        backend = adapter(options)
        scenery = scenes.Scenery(
            world_size=specification.world_size,
            batch_for=specification.world_size,
            rank=rank,
            directory=directory,
            single_states=specification.single_states,
            float64=adapter.capabilities.float64,
        )
        run(backend, specification.cases, scenery, phases)
        phases.enter("shutdown")
        backend.shutdown()
        torch.save({}, observation_path(directory, "shutdown", rank))


if __name__ == "__main__":
    main(sys.argv[1:])
