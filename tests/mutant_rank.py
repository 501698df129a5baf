"""What the ranks of a mutant test run: ``python -m tests.mutant_rank DIRECTORY``, each case as it is or mutated."""

from __future__ import annotations

import sys
from contextlib import nullcontext

from backends.interface import Backend
from contract.cases import BY_NAME
from contract.scenes import Scenery
from contract.worker import Phases, main, run_case
from tests.mutants import MUTANTS


def run_mutants(backend: Backend, names: list[str], scenery: Scenery, phases: Phases) -> None:
    for name in names:
        phases.enter(name)
        mutation, _, case_name = name.rpartition("--")
        with MUTANTS[mutation].apply(backend) if mutation else nullcontext():
            run_case(backend, BY_NAME[case_name], name, scenery)


if __name__ == "__main__":
    main(sys.argv[1:], run_mutants)
