"""The environment of a run of a race, in which two starts of one program differ as little as possible."""

from __future__ import annotations

import os

from compare.race.plan import PlannedRun, RacePlan

# Which small pages a process gets decides which of them share lines of its caches, for as long as it lives: the speed
# of a start differs by a per cent and more from that of the next. Few large pages leave less to chance. Both variables
# only ask the kernel: one is read by PyTorch's allocator, the other by glibc's.
_HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def variables_of(plan: RacePlan, run: PlannedRun) -> dict[str, str]:
    """Returns the variables that a run has beside those of this process.

    They ask for huge pages, unless the user wants none or has set them; those of the entrant come last.
    """
    asked = {name: value for name, value in _HUGE_PAGES.items() if plan.options.placement and name not in os.environ}
    return {**asked, **dict(run.entrant.variables)}
