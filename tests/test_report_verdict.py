"""The verdict of a report: nobody who took part is passed over, and no sentence says more than was found."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from compare.report.first_screen import first_screen
from compare.report.pages import write_pages
from compare.report.sections import look_of
from compare.report.verdict import describe_verdict
from compare.results import Claim, Entrant, Interval, Results
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


def test_without_rivals_the_opponent_is_the_only_one_that_is_ranked() -> None:
    """Others with as many ranks may have been timed, too: approximations, limits, and who computes something else."""
    results = sample_results()
    standing = results.standings[0]
    standing.placings = [standing.placings[0], *(one for one in standing.placings if one.num_processes == 1)]
    assert describe_verdict(results)[0] == "On 2 ranks of this machine, only ddp is ranked: 627 samples/s."


@pytest.mark.parametrize(
    ("rate", "words"), [(600, "ddp took the least time"), (700, "the others are compared with ddp")]
)
def test_after_too_few_starts_samples_a_second_say_who_took_the_least_time(rate: float, words: str) -> None:
    """A reader may have named another opponent than the fastest."""
    results = sample_results()
    rival = results.standings[0].rivals[1]
    rival.longer, rival.claim, rival.samples_per_second = None, "too few", Interval(estimate=rate)
    assert words in describe_verdict(results)[0]
    drawing = str(first_screen(results, look_of(results)).figures[0].plots[0].drawing)
    assert ("the least time" in drawing) == ("the least time" in words)


@pytest.mark.parametrize(
    ("longer", "claim", "words"),
    [
        (Interval(estimate=-0.154, low=-0.17, high=-0.14), "faster", "85 % of what is possible here is reached; one"),
        (Interval(estimate=0.03, low=0.02, high=0.04), "slower", "No more is possible; one process"),
    ],
)
def test_no_more_is_reached_than_is_possible(longer: Interval, claim: Claim, words: str) -> None:
    """Processes that work alone may seem slower than those that communicate."""
    results = sample_results()
    standing = results.standings[0]
    standing.placings = standing.rivals
    limit = standing.limits[0]
    limit.longer, limit.claim = longer, claim
    assert describe_verdict(results)[1].startswith(words)


@pytest.mark.parametrize(
    ("network", "where"),
    [
        ("4 nodes", "On 2 ranks (4 nodes), "),
        ("2 network namespaces, 1gbit", "On 2 ranks of this machine (2 network namespaces, 1gbit), "),
    ],
)
def test_ranks_on_several_machines_are_not_on_this_one(network: str, where: str) -> None:
    results = sample_results()
    results.standings[0].network = network
    assert describe_verdict(results)[0].startswith(where)


def test_the_list_that_the_verdict_speaks_of_is_below_it_in_a_terminal(tmp_path: Path) -> None:
    results = sample_results()
    screen = io.StringIO()
    write_pages({}, results, tmp_path, Console(file=screen, width=200))
    _, said, below = screen.getvalue().partition(f"{len(results.problems)} things could not be used or compared;")
    assert said
    assert all(f"- {problem}" in below for problem in results.problems)
