"""The environment of a run of a race, in which two starts of one program differ as little as possible."""

from __future__ import annotations

from compare.race.plan import PlannedRun, RacePlan

# Which small pages a process gets decides which of them share lines of its caches, for as long as it lives: the speed
# of a start differs by a per cent and more from that of the next. Few large pages leave less to chance. Both variables
# only ask the kernel: one is read by PyTorch's allocator, the other by glibc's.
_HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def variables_of(plan: RacePlan, run: PlannedRun) -> dict[str, str]:
    """Returns the environment variables of a run: huge pages, unless the user wants none, and those of its entrant."""
    return {**(_HUGE_PAGES if plan.options.placement else {}), **dict(run.entrant.variables)}
