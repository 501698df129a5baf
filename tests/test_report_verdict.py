"""The verdict of a report: nobody who took part is passed over, and no sentence says more than was found."""

from __future__ import annotations

from compare.report.verdict import describe_verdict
from compare.results import Entrant, Results
from parity.verdict import Parity
from tests.sample_results import sample_results

UNKNOWN = Parity(verdict="unknown", detail="no diagnosis run of the reference completed")


def _everywhere(results: Results, name: str) -> list[Entrant]:
    return [entrant for group in results.groups for entrant in group.entrants if entrant.name == name]


def test_who_could_not_be_judged_is_named() -> None:
    results = sample_results()
    for horovod in _everywhere(results, "horovod"):
        horovod.parity, horovod.ranked = UNKNOWN, False
    said = "Not ranked, because it could not be told whether the same is computed: horovod."
    assert said in describe_verdict(results)
    for horovod in _everywhere(results, "horovod"):
        horovod.num_runs, horovod.failures = 0, ["rank 1: out of luck"]
    assert said not in describe_verdict(results)  # it failed, which is said instead
