"""The verdict of a report: nobody who took part is passed over, and no sentence says more than was found."""

from __future__ import annotations

from compare.report.verdict import describe_verdict
from compare.results import Entrant, Results
from parity.verdict import Parity
from tests.sample_results import sample_results
from tests.sample_standings import ONE_RANK, TWO_RANKS

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


def test_who_is_left_out_under_some_conditions_alone_is_named_with_them() -> None:
    results = sample_results()
    alone, beside = _everywhere(results, "horovod")
    beside.parity, beside.ranked = Parity(verdict="not comparable", detail="step 4 differs"), False
    verdict = describe_verdict(results)
    assert f"Not ranked, because of a computation that differs: horovod ({TWO_RANKS}) and accelerate." in verdict
    alone.num_runs, alone.failures, alone.ranked = 0, ["rank 0: out of luck"], False
    assert f"Failed, and left out: horovod ({ONE_RANK}) and apex." in describe_verdict(results)
