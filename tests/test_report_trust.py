"""What a report says of how far it can be trusted."""

from __future__ import annotations

import pytest

from compare.machine_facts import Idleness
from compare.report.html import render_html
from compare.report.markdown import render_markdown
from compare.report.trust import Ground, grounds_of, warnings_of
from compare.results import Interval, Results
from parity.verdict import Parity
from tests.sample_results import disturbed_results, sample_results

ONE = "the only entrant that was judged"


def test_a_good_race_has_no_warning() -> None:
    results = sample_results()
    assert warnings_of(results) == []
    assert 'class="warning"' not in render_html(results)
    assert "Warning" not in render_markdown(results)
    states = {ground.question: ground.state for ground in grounds_of(results)}
    assert states == {"Same computation": "bad", "Idle machine": "good", "Repeated": "good", "Overlooked": "good"}


def test_a_disturbed_and_short_race_has_a_banner() -> None:
    results = disturbed_results()
    disturbed, short = warnings_of(results)
    assert disturbed.startswith("The machine was disturbed: other programs took 43 % of its cores (up to 81 %).")
    assert "each entrant was started 2 times" in short
    page = render_html(results)
    assert page.index('class="warning"') < page.index('class="verdict"')
    assert {ground.state for ground in grounds_of(results)} == {"bad"}


def test_a_race_that_could_not_see_enough_says_so() -> None:
    results = sample_results()
    (rival,) = (one for one in results.standings[0].rivals if one.label == "ddp #2, 2 ranks")
    rival.detectable = 0.12
    (warning,) = warnings_of(results)
    assert "one race of five like this misses a difference of 12 %" in warning


def test_a_little_disturbance_is_only_told() -> None:
    results = sample_results().model_copy(update={"idleness": Idleness(mean=0.05, largest=0.4)})
    assert warnings_of(results) == []
    assert any("5.0 % of the cores, at most 40 %" in ground.answer for ground in grounds_of(results))


def test_all_conditions_count() -> None:
    """Of conditions other than the first, the report says which."""
    results = sample_results()
    second = results.standings[1]
    second.rivals[1].detectable, second.rivals[1].claim = 0.07, "none"
    (warning,) = warnings_of(results)
    assert f"misses a difference of 7.0 % ({second.conditions}). Give it more time" in warning
    (overlooked,) = (ground for ground in grounds_of(results) if ground.question == "Overlooked")
    assert overlooked.state == "bad"
    assert f"one race of five misses a difference of 7.0 % ({second.conditions})" in overlooked.answer
    second.num_starts = 1
    assert "each entrant was started once" in warnings_of(results)[0]


def test_an_entrant_with_too_few_starts_hides_nothing_under_other_conditions() -> None:
    results = sample_results()
    first, second = results.standings[:2]
    first.rivals[1].detectable, first.rivals[1].claim = None, "too few"
    second.rivals[1].detectable, second.rivals[1].claim = 0.07, "none"
    assert any(f"misses a difference of 7.0 % ({second.conditions})" in warning for warning in warnings_of(results))
    (overlooked,) = (ground for ground in grounds_of(results) if ground.question == "Overlooked")
    assert overlooked.state == "bad"
    assert f"misses a difference of 7.0 % ({second.conditions})" in overlooked.answer
    assert overlooked.answer.endswith(f"too few starts of {first.rivals[1].label}")
    second.rivals[1].claim, second.rivals[1].detectable = "too few", None
    first.rivals[1].claim, first.rivals[1].detectable = "none", 0.03
    (overlooked,) = (ground for ground in grounds_of(results) if ground.question == "Overlooked")
    assert overlooked.answer.endswith(f"too few starts of {second.rivals[1].label} ({second.conditions})")


def test_who_could_not_be_judged_leaves_it_open_whether_all_compute_the_same() -> None:
    results = sample_results()
    entrants = [entrant for group in results.groups for entrant in group.entrants]
    for entrant in entrants:
        if entrant.name == "accelerate":
            entrant.parity = Parity(verdict="bitwise", detail="the same bits")
    assert grounds_of(results)[0] == Ground(
        "Same computation", "all 8 entrants train the same model, up to rounding", "good"
    )
    for entrant in entrants:
        if entrant.name == "horovod":
            entrant.parity = Parity(verdict="unknown", detail="no diagnosis run of the reference completed")
    said = "all 6 judged entrants train the same model, up to rounding; of horovod, it could not be told"
    assert grounds_of(results)[0] == Ground("Same computation", said, "open")


@pytest.mark.parametrize(
    ("verdicts", "answer", "state"),
    [
        (["reference"], "was not checked", "open"),
        (["reference", "reference"], "was not checked", "open"),
        (["unknown", "unknown"], "was not checked; of ddp and horovod, it could not be told", "open"),
        (["rounding"], f"{ONE} trains the same model as the reference, up to rounding", "good"),
        (["not comparable"], f"{ONE} computes something else", "bad"),
        (["reference", "bitwise"], "both entrants train the same model, to the last bit", "good"),
    ],
)
def test_nothing_was_checked_only_if_nobody_was_compared(verdicts: list[str], answer: str, state: str) -> None:
    results = sample_results()
    results.groups = results.groups[1:]
    results.groups[0].entrants = results.groups[0].entrants[: len(verdicts)]
    for entrant, verdict in zip(results.groups[0].entrants, verdicts, strict=True):
        entrant.parity = Parity(verdict=verdict, detail="")
    assert grounds_of(results)[0] == Ground("Same computation", answer, state)


def _ground(results: Results, question: str) -> Ground:
    (found,) = (ground for ground in grounds_of(results) if ground.question == question)
    return found


def test_what_was_shown_is_shown_of_those_that_are_meant() -> None:
    """What limits, approximations and others with fewer ranks take is shown with its interval, and decides nothing."""
    results = sample_results()
    results.standings = results.standings[:1]
    standing = results.standings[0]
    standing.rivals[1].claim = "slower"
    shown = "every difference from ddp, 2 ranks was shown"
    both = f"nothing: of those with as many ranks and of the fastest with the fewest ranks, {shown}"
    assert _ground(results, "Overlooked") == Ground("Overlooked", both, "good")
    opponent, single = standing.placings[0], standing.base
    standing.placings = standing.rivals
    rivals = f"nothing: of those with as many ranks, {shown}"
    assert _ground(results, "Overlooked") == Ground("Overlooked", rivals, "good")
    assert single is not None
    # A reader has named one process, and nobody else has as few ranks.
    standing.opponent = single.label
    standing.placings = [
        single.model_copy(update={"longer": None, "claim": None}),
        opponent.model_copy(update={"longer": Interval(estimate=-0.38, low=-0.4, high=-0.36), "claim": "faster"}),
    ]
    nobody = "not told, since all others have more ranks than single, 1 rank"
    assert _ground(results, "Overlooked") == Ground("Overlooked", nobody, "open")


def test_starts_are_those_of_every_entrant() -> None:
    """One that failed in most of its starts does not make the race too short, but its difference may be overlooked."""
    results = sample_results()
    standing = results.standings[0]
    standing.num_starts = 8
    assert _ground(results, "Repeated") == Ground("Repeated", "8 starts of each entrant, 48 turns in all", "good")
    (horovod,) = (entrant for entrant in results.groups[1].entrants if entrant.name == "horovod")
    horovod.num_runs = 2
    (placing,) = (one for one in standing.rivals if one.name == "horovod")
    placing.longer, placing.claim, placing.detectable = None, "too few", None
    said = "8 starts of ddp, 2 ranks, 48 turns in all; of the others, at least 2"
    assert _ground(results, "Repeated") == Ground("Repeated", said, "bad")
    overlooked = _ground(results, "Overlooked")
    assert overlooked.state == "bad"
    assert overlooked.answer.endswith("; and perhaps much: too few starts of horovod, 2 ranks")
    assert warnings_of(results) == []
    standing.num_starts = 2
    (warning,) = warnings_of(results)
    assert "ddp, 2 ranks, with which all others are compared, was started 2 times" in warning
