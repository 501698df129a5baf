"""What a reader sees first: the same verdict in every form, one opponent, and a warning where one is due."""

from __future__ import annotations

import io
import re
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console

from compare.numbers import NOTHING, longer
from compare.report.first_screen import first_screen
from compare.report.html import render_html
from compare.report.lost_speed import where_speed_is_lost, where_speed_is_lost_elsewhere
from compare.report.markdown import escape, render_markdown
from compare.report.pages import STEPS_NAME, write_pages
from compare.report.sections import look_of
from compare.report.tables import standing as standing_of
from compare.report.trust import Ground, grounds_of
from compare.report.verdict import breakdown_of, describe_verdict
from compare.results import RESULTS_NAME, Entrant, Interval, Placing, Results
from compare.steps import HeldMemory
from parity.verdict import Parity
from tests.sample_results import disturbed_results, empty_results, sample_results
from tests.sample_standings import HOSTILE

MIB = 2**20


def _terminal(results: Results, directory: Path, width: int = 200) -> str:
    screen = io.StringIO()
    write_pages({}, results, directory, Console(file=screen, width=width))
    return screen.getvalue()


def _text_of(page: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", page))


def _placing(results: Results, label: str) -> Placing:
    return next(one for one in results.standings[0].placings if one.label == label)


def test_the_steps_of_another_report_do_not_stay_beside_a_new_one(tmp_path: Path) -> None:
    results = sample_results()
    pages, steps = {RESULTS_NAME: results.model_dump_json()}, tmp_path / STEPS_NAME
    for earlier, stays in (("", False), (results.model_dump_json(), True), ("{}", False)):
        (tmp_path / RESULTS_NAME).write_text(earlier)
        steps.write_text("")
        write_pages(pages, results, tmp_path, Console(file=io.StringIO()))
        assert steps.exists() == stays


def test_the_verdict_reads_as_advice() -> None:
    speed, gain, *left = sample_results().verdict
    assert speed.startswith("On 2 ranks of this machine, ddp and ddp #2 are equally fast (within 1.3 %); ")
    assert f"; horovod takes 22 % longer [18, 26]; {HOSTILE} takes 230 % longer [210, 250]; for both, most of " in speed
    assert speed.endswith(" for both, most of the difference is communication and waiting.")
    assert gain == (
        "A second rank gives 1.6 times the speed of one; at most 1.9 is possible here; "
        "one process with all cores would be as fast (within 3.0 %)."
    )
    assert left[:2] == ["Not ranked, because of a computation that differs: accelerate.", "Failed, and left out: apex."]


@pytest.mark.parametrize("results", [sample_results(), disturbed_results()], ids=["sample", "disturbed"])
def test_all_forms_say_the_same(results: Results, tmp_path: Path) -> None:
    page, markdown, terminal = render_html(results), render_markdown(results), _terminal(results, tmp_path)
    screen = first_screen(results, look_of(results))
    for sentence in [*screen.verdict, *screen.warnings]:
        assert sentence in unescape(page)
        assert escape(sentence) in markdown
        assert sentence in " ".join(terminal.split())
    for table in screen.tables:
        for row in table.rows:
            for i, cell in enumerate(row.cells):
                assert cell.text in unescape(page)
                assert escape(cell.text) in markdown
                assert i > 2 or cell.text in terminal


def test_the_terminal_fits_into_60_columns(tmp_path: Path) -> None:
    assert all(len(line) <= 60 for line in _terminal(sample_results(), tmp_path, width=60).splitlines()[:-1])


def test_there_is_one_opponent_and_no_two_figures_for_one_thing() -> None:
    results = sample_results()
    page = _text_of(render_html(results))
    assert page.count("the fastest") == 0  # two are equally fast
    for standing in results.standings:
        assert standing.opponent == "ddp, 2 ranks"
    horovod = _placing(results, "horovod, 2 ranks")
    (pair,) = [one for one in results.groups[1].comparisons if one.second == "horovod"]
    assert horovod.longer == pair.slowdown
    assert longer(pair.slowdown) == "+22 % [+18, +26]"
    assert "22.0 %" not in page


@pytest.mark.parametrize(
    ("interval", "claim", "words"),
    [
        (Interval(estimate=0.02, low=-0.015, high=0.055), "none", "horovod may be as fast, or differ by up to 5.5 %"),
        (Interval(estimate=0.03, low=0.005, high=0.055), "none", "horovod probably takes longer, by up to 5.5 %"),
        (Interval(estimate=0.026, low=0.003, high=0.049), "none", "horovod probably takes longer, by up to 4.9 %"),
        (Interval(estimate=-0.03, low=-0.055, high=-0.005), "none", "horovod probably takes less time, by up to 5.5 %"),
        (Interval(estimate=-0.1, low=-0.12, high=-0.08), "faster", "horovod takes 10 % less time [8.0, 12]"),
        (None, "too few", "horovod cannot be compared after so few starts"),
    ],
)
def test_nothing_is_said_that_the_interval_does_not_say(interval: Interval | None, claim: str, words: str) -> None:
    results = sample_results()
    horovod = _placing(results, "horovod, 2 ranks")
    horovod.longer, horovod.claim = interval, claim  # type: ignore[assignment]
    assert words in describe_verdict(results)[0]


@pytest.mark.parametrize(
    ("longer_by", "claim", "words"),
    [
        (Interval(estimate=-0.05, low=-0.08, high=-0.02), "faster", "A second rank makes it slower: 0.95 times"),
        (Interval(estimate=0.0, low=-0.05, high=0.04), "none", "gives nothing that this race could show: 0.95 to 1.04"),
        (Interval(estimate=0.026, low=0.003, high=0.049), "none", "second rank probably makes it faster: 1.00 to 1.05"),
        (Interval(estimate=-0.05, low=-0.098, high=-0.002), "none", "probably makes it slower: 0.90 to 1.00 times"),
        (Interval(estimate=0.8, low=0.7, high=0.9), "slower", "A second rank gives 1.8 times the speed of one"),
        (Interval(estimate=0.04, low=0.02, high=0.06), "slower", "A second rank gives 1.04 times the speed of one"),
    ],
)
def test_more_ranks_are_judged_by_the_fastest_alone(longer_by: Interval, claim: str, words: str) -> None:
    results = sample_results()
    single = _placing(results, "single, 1 rank")
    single.longer, single.claim = longer_by, claim  # type: ignore[assignment]
    assert words in describe_verdict(results)[1]


def test_nothing_is_said_of_limits_with_too_few_starts() -> None:
    results = sample_results()
    limit = next(one for one in results.standings[0].limits if one.num_processes > 1)
    limit.claim, limit.longer = "too few", None
    assert "possible here" not in describe_verdict(results)[1]


def test_without_limits_none_are_spoken_of() -> None:
    results = sample_results()
    results.standings[0].limits.clear()
    assert describe_verdict(results)[1] == "A second rank gives 1.6 times the speed of one."
    first, _ = first_screen(results, look_of(results)).tables
    assert "of what is possible (%)" not in first.columns


def test_the_loss_is_divided_by_what_is_possible() -> None:
    results = sample_results()
    _, ranks = first_screen(results, look_of(results)).figures
    lost = "Of the ideal 2.00 times, 0.10 are lost to memory bandwidth, caches and the clock and 0.29 to communication"
    assert f"{lost} and waiting." in ranks.caption
    assert lost in render_markdown(results)
    base = results.standings[0].base
    assert base is not None
    base.claim, claim = "none", base.claim
    assert where_speed_is_lost(results.standings[0], None) == ""  # nothing was gained that could be divided
    base.claim = claim
    results.standings[0].limits[0].longer = Interval(estimate=0.1, low=0.0, high=0.2)  # slower than those that wait
    _, ranks = first_screen(results, look_of(results)).figures
    assert "lost" not in ranks.caption


def test_the_loss_under_other_conditions_is_said_below() -> None:
    results = sample_results()
    assert where_speed_is_lost_elsewhere(results) == []
    other = results.standings[0].model_copy(update={"conditions": "bf16, 32 samples a step"})
    without_limits = other.model_copy(update={"limits": []})
    results.standings.extend([other, without_limits])
    (said,) = where_speed_is_lost_elsewhere(results)
    assert said.startswith("bf16, 32 samples a step: Of the ideal 2.00 times, 0.10 are lost to memory bandwidth")
    assert said in render_markdown(results)
    assert said in unescape(render_html(results))


def test_the_clock_and_waiting_have_their_part_of_the_loss() -> None:
    results = sample_results()
    standing = results.standings[0]
    standing.core_slowdown = 1.01
    breakdown = breakdown_of(standing.placings[0], results)
    assert breakdown is not None
    breakdown.waiting, breakdown.unresolved = breakdown.communication / 2, {}
    said = where_speed_is_lost(standing, breakdown)
    assert "0.02 are lost to busy cores that slow each other down, 0.08 to memory bandwidth and caches, 0.2" in said
    assert said.endswith("0.20 to communication and 0.10 to waiting for the slowest rank.")
    standing.core_slowdown = 1.5  # more than is lost
    said = where_speed_is_lost(standing, None)
    assert said.endswith("0.10 are lost to busy cores that slow each other down and 0.29 to communication and waiting.")
    standing.core_slowdown = 0.9  # noise
    assert "busy cores" not in where_speed_is_lost(standing, None)


def test_the_reason_is_communication_or_waiting_where_they_are_told_apart() -> None:
    results = sample_results()
    ddp, horovod = _entrant(results, "ddp").breakdown, _entrant(results, "horovod").breakdown
    assert ddp is not None
    assert horovod is not None
    horovod.waiting = 0.0
    assert "horovod takes 22 % longer [18, 26], most of it communication;" in describe_verdict(results)[0]
    horovod.communication, horovod.waiting = ddp.communication, horovod.communication - ddp.communication
    assert "horovod takes 22 % longer [18, 26], most of it waiting;" in describe_verdict(results)[0]


def test_nothing_is_said_to_be_possible_that_was_not_shown() -> None:
    results = sample_results()
    limit = next(one for one in results.standings[0].limits if one.num_processes == 2)
    limit.longer, limit.claim = Interval(estimate=-0.1, low=-0.25, high=0.05), "none"
    gain = describe_verdict(results)[1]
    assert "no loss to communication was shown (at most 25 % of a step)" in gain
    assert "is possible here" not in gain
    limit.longer = Interval(estimate=0.02, low=0.0, high=0.05)
    assert "no loss to communication was shown; one" in describe_verdict(results)[1]
    limit.longer = Interval(estimate=-0.03, low=-0.056, high=-0.004)
    assert "; ranks probably lose time to communication (at most 5.6 % of a step); one" in describe_verdict(results)[1]


def test_other_conditions_are_a_row_each() -> None:
    results = sample_results()
    _, others = first_screen(results, look_of(results)).tables
    assert [row.cells[0].text for row in others.rows] == [
        "fp32, 32 samples a step",
        "fp32, 32 samples a step in 4 parts",
    ]
    assert others.rows[0].cells[3].text == "accelerate +0.8 % [-1.2, +2.8]; horovod +28 % [+23, +33]"
    assert len(others.columns) == 5  # nobody worked alone
    results.standings[1].limits = results.standings[0].limits
    _, others = first_screen(results, look_of(results)).tables
    assert others.columns[5:] == ["of what is possible (%)", "one process with all cores takes longer by"]
    assert [cell.text for cell in others.rows[0].cells[5:]] == ["84.6", "+1.0 % [-1.0, +3.0]"]
    assert [cell.text for cell in others.rows[1].cells[5:]] == [NOTHING, NOTHING]
    whole = results.standings[0].limits[1].model_copy(update={"label": "one process on one GPU"})
    results.standings[2].limits = [whole]
    _, others = first_screen(results, look_of(results)).tables
    assert others.columns[6] == "one process with all cores or one process on one GPU takes longer by"


def test_a_small_difference_is_seen_beside_one_that_is_off_the_scale() -> None:
    results = sample_results()
    forest, _ = first_screen(results, look_of(results)).figures
    drawing = str(forest.plots[0].drawing)
    assert "+230 % [+210, +250]" in drawing
    ticks = [int(tick) for tick in re.findall(r'class="tick"[^>]*>(-?\d+)<', drawing)]
    assert max(ticks) < 50
    assert HOSTILE in unescape(forest.plots[0].label)
    edge = "What takes more than twice as long is at the right edge, outside of the scale."
    assert edge in forest.caption
    for placing in results.standings[0].placings:
        if placing.longer is not None and placing.longer.estimate > 1:
            placing.longer = Interval(estimate=0.5, low=0.4, high=0.6)
    forest, _ = first_screen(results, look_of(results)).figures
    assert edge not in forest.caption


def test_an_interval_of_few_starts_does_not_hide_the_rest() -> None:
    results = sample_results()
    horovod = _placing(results, "horovod, 2 ranks")
    horovod.samples_per_second = Interval(estimate=489, low=1.0, high=9e6)
    horovod.longer, horovod.claim = Interval(estimate=0.2, low=-0.9, high=40.0), "none"
    for figure in first_screen(results, look_of(results)).figures:
        ticks = re.findall(r'class="tick"[^>]*>(-?[\d,]+)<', str(figure.plots[0].drawing))
        assert max(int(tick.replace(",", "")) for tick in ticks) < 1000


def repeated_phrases(sentence: str) -> set[tuple[str, ...]]:
    """Returns what occurs more than once in a sentence: five words in a row, whatever the figures between them."""
    words = re.findall(r"[^\W\d]+", sentence)
    phrases = [tuple(words[i : i + 5]) for i in range(len(words) - 4)]
    return {phrase for phrase in phrases if phrases.count(phrase) > 1}


def test_nothing_is_said_twice() -> None:
    """No sentence of more than a few words occurs in two places, and no phrase twice in a sentence of the verdict.

    Titles and drawings are for those who do not see.
    """
    results = sample_results()
    page = render_html(results)
    page = re.sub(r"<(script|style|title|svg|table)\b.*?</\1>", "", page, flags=re.DOTALL)
    texts = [unescape(text).strip() for text in re.findall(r">([^<>]+)<", page)]
    sentences = [sentence for text in texts for sentence in re.split(r"(?<=\.)\s+", text) if len(sentence.split()) > 9]
    sentences = [sentence for sentence in sentences if sentence.endswith(".")]
    assert len(sentences) > 20
    assert {sentence for sentence in sentences if sentences.count(sentence) > 1} == set()
    assert [sentence for sentence in results.verdict if repeated_phrases(sentence)] == []


def test_entrants_of_which_the_same_is_said_share_a_row() -> None:
    results = sample_results()
    for group in results.groups:
        for entrant in group.entrants:
            entrant.parity = results.groups[0].entrants[0].parity
    page = render_html(results)
    (table,) = re.findall(r'aria-label="Whether each entrant.*?</table>', page, re.DOTALL)
    assert table.count("<tr") == 2
    assert '<th scope="row">all</th>' in table


def test_a_pull_request_takes_the_markdown() -> None:
    text = render_markdown(sample_results())
    assert len(text) < 65_536
    shown = text.partition("<details>")[0]
    assert len(shown.splitlines()) < 60
    assert text.count("<details>") == text.count("</details>") >= 6


def test_an_empty_report_has_an_empty_first_screen(tmp_path: Path) -> None:
    assert "No run could be used." in _terminal(empty_results(), tmp_path)
    assert "No run could be used." in render_markdown(empty_results())


def _entrant(results: Results, name: str) -> Entrant:
    return next(one for one in results.groups[1].entrants if one.name == name)


def test_who_sends_too_much_is_named_though_it_computes_the_same(tmp_path: Path) -> None:
    results = sample_results()
    _entrant(results, "ddp").excess = 1.02
    results.verdict = describe_verdict(results)
    assert not any("what its gradients need" in sentence for sentence in results.verdict)
    assert not any(ground.question == "Bytes sent" for ground in grounds_of(results))
    _entrant(results, "horovod").excess = 3.54
    _entrant(results, "accelerate").excess = 2.0
    results.verdict = describe_verdict(results)
    same = "horovod computes the same but sends 3.5 times what its gradients need."
    assert same in results.verdict
    assert "accelerate sends 2.0 times what its gradients need." in results.verdict
    named = "horovod sends 3.5 and accelerate 2.0 times what their gradients need"
    assert Ground("Bytes sent", named, "bad") in grounds_of(results)
    for text in (unescape(render_html(results)), render_markdown(results), _terminal(results, tmp_path)):
        assert same in " ".join(text.split())


def test_what_sharding_saves_is_said_where_it_matters() -> None:
    results = sample_results()
    held = HeldMemory(parameters=100 * MIB, gradients=100 * MIB, optimizer=200 * MIB, activations=None, buffers=0)
    part = HeldMemory(parameters=50 * MIB, gradients=50 * MIB, optimizer=100 * MIB, activations=None, buffers=0)
    _entrant(results, "ddp").memory, _entrant(results, "ddp #2").memory = held, held
    assert not any("shards weights" in sentence for sentence in describe_verdict(results))
    _entrant(results, "horovod").memory = part
    said = (
        "horovod shards weights: each rank holds 200 MiB of weights, gradients and optimizer state, where one of ddp "
        "holds 400 MiB."
    )
    assert said in describe_verdict(results)
    _entrant(results, "ddp").peak_memory_bytes = _entrant(results, "ddp #2").peak_memory_bytes = 4000 * MIB
    assert said not in describe_verdict(results)


@pytest.mark.parametrize(
    ("interval", "claim", "words"),
    [
        (Interval(estimate=-0.1, low=-0.12, high=-0.08), "faster", "horovod takes 10 % less time [8.0, 12]"),
        (None, "too few", "horovod cannot be compared after so few starts"),
    ],
)
def test_an_approximation_does_not_win(interval: Interval | None, claim: str, words: str) -> None:
    """It is the fastest here, and the verdict still begins with the exact ones."""
    results = sample_results()
    standing, entrant = results.standings[0], _entrant(results, "horovod")
    placing = _placing(results, "horovod, 2 ranks")
    standing.placings.remove(placing)
    standing.approximations.append(placing.model_copy(update={"longer": interval, "claim": claim}))
    entrant.parity, entrant.ranked = Parity(verdict="approximate", detail="as fp16", distance=0.0123), False
    speed, _, approximate, astray, *_ = describe_verdict(results)
    assert "horovod" not in speed
    assert approximate == f"Only an approximation, and not ranked; beside ddp, {words}."
    assert astray == "The weights of horovod are off by 1.2 % of the way that training moved them."
    assert "on purpose, horovod only approximately" in grounds_of(results)[0].answer
    table = first_screen(results, look_of(results)).tables[0]
    assert next(row.cells[0].text for row in table.rows if row.mark) == "≈ horovod, 2 ranks"
    assert standing_of(entrant) == "approximate"


def test_only_the_fastest_is_said_to_take_the_least_time() -> None:
    """A reader may have named another opponent, which the picture then shows at zero, with some to the left of it."""
    results = sample_results()
    assert "the least time" in str(first_screen(results, look_of(results)).figures[0].plots[0].drawing)
    opponent, other, *rest = results.standings[0].placings
    shorter = other.model_copy(update={"longer": Interval(estimate=-0.02, low=-0.03, high=-0.01), "claim": "faster"})
    first = results.standings[0].model_copy(update={"placings": [opponent, shorter, *rest]})
    results = results.model_copy(update={"standings": [first, *results.standings[1:]]})
    drawing = str(first_screen(results, look_of(results)).figures[0].plots[0].drawing)
    assert "the least time" not in drawing
    assert "compared with" in drawing
