"""The verdict of a report: nobody who took part is passed over, and no sentence says more than was found."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from compare.report.first_screen import first_screen
from compare.report.html import render_html
from compare.report.markdown import render_markdown
from compare.report.pages import write_pages
from compare.report.sections import look_of
from compare.report.verdict import describe_verdict
from compare.results import Claim, Entrant, Interval, Results
from parity.verdict import Parity
from tests.sample_results import sample_results
from tests.sample_standings import HOSTILE, ONE_RANK, TWO_RANKS
from tests.test_report_first_screen import repeated_phrases

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


@pytest.mark.parametrize(
    ("low", "high", "equal", "within"),
    [
        (-0.01, 0.045, "ddp, ddp #2 and horovod", "4.5"),
        (-0.01, 0.06, "ddp and ddp #2", "4.0"),
        (0.003, 0.045, "ddp and ddp #2", "4.0"),
    ],
)
def test_equally_fast_are_only_those_of_whom_any_two_are(low: float, high: float, equal: str, within: str) -> None:
    """Both others may differ from ddp by 4 % at most; what is known of each other decides."""
    results = sample_results()
    for rival in results.standings[0].rivals[1:3]:
        rival.longer, rival.claim = Interval(estimate=0.01, low=-0.02, high=0.04), "none"
    group = results.groups[1]
    slowdown = Interval(estimate=(low + high) / 2, low=low, high=high)
    pair = {"first": "horovod", "second": "ddp #2", "slowdown": slowdown, "claim": "none"}
    group.comparisons.append(group.comparisons[0].model_copy(update=pair))
    speed = describe_verdict(results)[0]
    assert f"{equal} are equally fast (within {within} %)" in speed
    assert ("horovod may be as fast, or differ by up to 4.0 %" in speed) == ("horovod" not in equal)


def test_who_probably_takes_longer_is_not_called_as_fast() -> None:
    """All intervals lie above zero, but not wholly beyond the smallest claim: no sentence and no caption says less."""
    results = sample_results()
    standing = results.standings[0]
    standing.placings = standing.rivals[:2]
    for placing in (standing.placings[1], standing.limits[1]):
        placing.longer, placing.claim = Interval(estimate=0.026, low=0.003, high=0.049), "none"
    speed, gain, *_ = describe_verdict(results)
    assert speed.endswith("ddp took the least time; ddp #2 probably takes longer, by up to 4.9 %.")
    assert gain.endswith("; one process with all cores probably takes longer, by up to 4.9 %.")
    forest = first_screen(results, look_of(results)).figures[0]
    assert "A hollow mark means that a difference is not certain." in forest.caption


@pytest.mark.parametrize(
    ("others", "who"),
    [
        ([], "both"),
        (["ddp #2"], "all of these"),
        (["accelerate"], f"horovod and {HOSTILE}"),
        (["accelerate", "ddp #2"], "all but accelerate"),
    ],
)
def test_a_reason_is_said_once_for_all_for_whom_it_holds(others: list[str], who: str) -> None:
    """Accelerate communicates less than ddp where it was diagnosed, so that this is no reason."""
    results = sample_results()
    standing = results.standings[0]
    opponent, _, horovod, hostile = standing.rivals
    _, diagnosed = _everywhere(results, "horovod")
    (again,) = _everywhere(results, "ddp #2")
    again.breakdown = diagnosed.breakdown
    standing.placings = [opponent, *(horovod.model_copy(update={"name": name}) for name in others), horovod, hostile]
    speed = describe_verdict(results)[0]
    assert speed.endswith(f"[210, 250]; for {who}, most of the difference is communication and waiting.")
    assert repeated_phrases(speed) == set()


def test_reasons_that_several_share_are_one_clause(monkeypatch: pytest.MonkeyPatch) -> None:
    results = sample_results()
    standing = results.standings[0]
    opponent, _, horovod, _ = standing.rivals
    reasons = {"a": "communication", "b": "communication", "c": "waiting", "d": "waiting"}
    standing.placings = [opponent, *(horovod.model_copy(update={"name": name}) for name in reasons)]
    monkeypatch.setattr("compare.report.verdict._reason", lambda placing, *_: reasons[placing.name])
    speed = describe_verdict(results)[0]
    assert speed.endswith("; for a and b, most of the difference is communication, and for c and d, waiting.")
    assert repeated_phrases(speed) == set()


def test_what_was_not_shown_of_several_entrants_is_said_once() -> None:
    results = sample_results()
    standing = results.standings[0]
    for placing, low, high in zip(standing.rivals[1:], (-0.02, 0.001, 0.002), (0.07, 0.08, 0.11), strict=True):
        placing.longer, placing.claim = Interval(estimate=(low + high) / 2, low=low, high=high), "none"
    speed = describe_verdict(results)[0]
    assert "; ddp #2 may be as fast, or differ by up to 7.0 %; " in speed
    assert speed.endswith(f"; horovod and {HOSTILE} probably take longer, by up to 8.0 and 11 %.")
    for placing in standing.rivals[2:]:
        placing.longer = Interval(estimate=0.0, low=-0.08, high=0.08)
    speed = describe_verdict(results)[0]
    assert f"; ddp #2, horovod and {HOSTILE} may each be as fast, or differ by up to 7.0, 8.0 and 8.0 %." in speed


def test_what_holds_for_several_approximations_is_said_once() -> None:
    results = sample_results()
    standing = results.standings[0]
    standing.approximations = standing.rivals[2:]
    standing.placings = [one for one in standing.placings if one not in standing.approximations]
    for distance, one in zip((0.0123, 0.2), standing.approximations, strict=True):
        *_, entrant = _everywhere(results, one.name)
        entrant.parity, entrant.ranked = Parity(verdict="approximate", detail="as fp16", distance=distance), False
    _, _, approximate, astray, *_ = describe_verdict(results)
    assert approximate == (
        f"Only an approximation, and not ranked; beside ddp, horovod takes 22 % longer [18, 26]; {HOSTILE} takes 230 % "
        "longer [210, 250]; for both, most of the difference is communication and waiting."
    )
    assert astray.startswith(f"The weights of horovod and {HOSTILE} are off by 1.2 and 20 % of the way that training ")


def test_settings_that_no_name_says_are_once_in_every_form_of_a_report(tmp_path: Path) -> None:
    results = sample_results()
    for horovod in _everywhere(results, "horovod"):
        horovod.own_settings = ["--start-method=mpirun", "HOROVOD_CYCLE_TIME=0.1"]
    results.verdict = describe_verdict(results)
    assert "Settings of their own: horovod: --start-method=mpirun HOROVOD_CYCLE_TIME=0.1." in results.verdict
    screen = io.StringIO()
    write_pages({}, results, tmp_path, Console(file=screen, width=200))
    forms = [render_html(results), render_markdown(results).replace("\\", ""), screen.getvalue()]
    assert [form.count("--start-method=mpirun HOROVOD_CYCLE_TIME=0.1") for form in forms] == [1, 1, 1]


def test_settings_that_differ_by_conditions_are_said_with_them() -> None:
    """As in a report of two races with other numbers of ranks, each with --tune."""
    results = sample_results()
    for horovod, own in zip(_everywhere(results, "horovod"), ("--wait=sleep", "HOROVOD_NOTE=a b"), strict=True):
        horovod.own_settings = [own]
    verdict = describe_verdict(results)
    own = f"horovod ({ONE_RANK}): --wait=sleep; horovod ({TWO_RANKS}): 'HOROVOD_NOTE=a b'"
    assert f"Settings of their own: {own}." in verdict


@pytest.mark.parametrize(
    "name",
    [
        "ddp (--transport shared-memory NCCL_ALGO=Ring)",
        "ddp (tuned: --transport=shared-memory NCCL_ALGO=Ring)",  # as a race of an earlier version goes on
    ],
)
def test_settings_of_which_a_name_is_made_are_not_said_again(name: str) -> None:
    results = sample_results()
    (again,) = _everywhere(results, "ddp #2")
    again.name, again.own_settings = name, ["--transport=shared-memory", "NCCL_ALGO=Ring"]
    assert not any(sentence.endswith("of its own.") for sentence in describe_verdict(results))
