"""What the ranks of a mutant test run: ``python -m tests.mutant_rank DIRECTORY``, one mutated case after the other."""

from __future__ import annotations

import sys
from pathlib import Path

from backends.interface import Backend
from contract.scenes import Scenery
from contract.worker import Phases, main, run_case
from tests.mutants import MUTANTS


def run_mutants(backend: Backend, names: list[str], scenery: Scenery, phases: Phases) -> None:
    for name in names:
        phases.enter(name)
        mutant = MUTANTS[name.partition("--")[0]]
        with mutant.apply(backend):
            run_case(backend, mutant.case, name, scenery)


if __name__ == "__main__":
    main(Path(sys.argv[1]), run_mutants)
