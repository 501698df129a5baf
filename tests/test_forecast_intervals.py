"""Between what a forecast lies: its intervals against cases by hand, on the terminal, on the page and in files."""

from __future__ import annotations

import html
import io
import json

import pytest
from rich.console import Console

from compare.results import Interval
from forecast.network import UNLIMITED, parse_network
from forecast.profile import Computing, Profile
from forecast.report import render
from forecast.result import ForecastFile, forecast, forecast_file
from forecast.scenario import Scenario, Variant
from forecast.sending import Buckets, Whole
from forecast.table import amount_with_ends, seconds_with_ends, share_with_ends, show
from launch.starters.interface import PROJECT_DIRECTORY
from tests.forecasting import collective, made_profile

BUCKETS = Buckets(first_bytes=1_000_000, bucket_bytes=1_000_000)
RING = Variant("ring", BUCKETS)


def _profile() -> Profile:
    """A step of one rank takes 90 to 120 ms; a gradient of 1 MB is ready every 15 ms."""
    seconds = Interval(estimate=0.1, low=0.09, high=0.12)
    return made_profile(
        sending=BUCKETS, computing=[Computing(num_processes=1, step_seconds=seconds, spread_seconds=None)]
    )


def _scenario() -> Scenario:
    """On a network where two ranks reduce 1 MB in 10 to 25 ms."""
    fit = collective(2, latency=0.0, bandwidth=5e7)
    measured = fit.model_copy(update={"bytes_per_second": Interval(estimate=5e7, low=4e7, high=1e8)})
    return Scenario(_profile(), UNLIMITED, measured=(measured,), name="lab")


def _ends(value: Interval | None) -> list[float | None]:
    assert value is not None
    return [value.low, value.estimate, value.high]


def test_slow_computing_hides_what_fast_computing_exposes() -> None:
    """Computing of 120 ms hides all reductions of 10 ms but the last.

    After one of 90 ms, the first gradient is ready at 13.5 ms, and 4 reductions of 25 ms end 59.5 ms after the last one
    is ready at 54 ms. At the ends of the step, where both are fast or both are slow, 10 and 46 ms are exposed.
    """
    assert _ends(_scenario().exposed_interval(RING, 2)) == pytest.approx([0.010, 0.035, 0.0595])
    assert _ends(_scenario().step_interval(RING, 2)) == pytest.approx([0.090 + 0.010, 0.135, 0.120 + 0.046])
    # What is sent after the backward pass is not hidden by anything.
    assert _ends(_scenario().exposed_interval(Variant("ring", Whole()), 2)) == pytest.approx([0.040, 0.080, 0.100])
    assert _ends(_scenario().exposed_interval(RING, 1)) == [0, 0, 0]


def test_an_epoch_and_its_cost_have_the_ends_of_their_steps() -> None:
    """It has 50 steps of two ranks, of which each costs 9 in an hour."""
    (row,) = forecast(_scenario(), RING, [2], 9.0).rows
    assert _ends(row.epoch_seconds) == pytest.approx([5.0, 6.75, 8.3])
    assert _ends(row.cost_per_epoch) == pytest.approx([2 * 9 * seconds / 3600 for seconds in (5.0, 6.75, 8.3)])
    (free,) = forecast(_scenario(), RING, [2], None).rows
    assert free.cost_per_epoch is None


def _shown(width: int) -> str:
    output = io.StringIO()
    found = forecast(Scenario(_profile(), parse_network("1gbit")), RING, [8, 64], None)
    show(found, Console(file=output, width=width, markup=False))
    assert max(map(len, output.getvalue().splitlines())) <= width
    return output.getvalue()


def test_a_wider_terminal_shows_more_ends() -> None:
    rows = forecast(Scenario(_profile(), parse_network("1gbit")), RING, [8, 64], None).rows
    narrow, usual, wide = map(_shown, (60, 80, 120))
    for row in rows:
        step, efficiency = seconds_with_ends(row.step_seconds), share_with_ends(row.efficiency)
        assert all(step in text and efficiency in text for text in (narrow, usual, wide))
        epoch, exposed = seconds_with_ends(row.epoch_seconds), seconds_with_ends(row.exposed_seconds)
        assert [epoch in text for text in (narrow, usual, wide)] == [False, True, True]
        assert [exposed in text for text in (narrow, usual, wide)] == [False, False, True]


def test_the_page_has_all_ends() -> None:
    found = forecast(_scenario(), RING, [2, 4], 9.0)
    page = html.unescape(render(forecast_file("launch/run.sh forecast", [found])))
    row = found.rows[0]
    assert row.cost_per_epoch is not None
    for cell in (
        seconds_with_ends(row.exposed_seconds),
        seconds_with_ends(row.epoch_seconds),
        amount_with_ends(row.cost_per_epoch),
    ):
        assert "[" in cell
        assert cell in page


@pytest.mark.parametrize(
    ("low", "estimate", "high", "text"),
    [
        (None, 0.0, None, "0 us"),
        (0.0, 0.0, 0.035, "0 ms [0, 35.0]"),
        (None, 0.0000123, None, "12.3 us"),
        (1.25, 1.5, 2.0, "1.50 s [1.25, 2.00]"),
        (None, 5400.0, None, "90.0 min"),
        (7200.0, 9000.0, 36000.0, "2.50 h [2.00, 10.0]"),
    ],
)
def test_a_duration_and_its_ends_have_one_unit(
    low: float | None, estimate: float, high: float | None, text: str
) -> None:
    assert seconds_with_ends(Interval(estimate=estimate, low=low, high=high)) == text


def test_files_without_these_ends_can_be_read() -> None:
    content = json.loads(forecast_file("", [forecast(_scenario(), RING, [2], 9.0)]).model_dump_json())
    assert content["schema_version"] == 2
    (row,) = content["forecasts"][0]["rows"]
    for name in ("exposed_seconds", "epoch_seconds", "cost_per_epoch"):
        row[name] = row[name]["estimate"]
    old = ForecastFile.model_validate({**content, "schema_version": 1}).forecasts[0].rows[0]
    assert _ends(old.exposed_seconds) == [None, pytest.approx(0.035), None]
    assert _ends(old.epoch_seconds) == [None, pytest.approx(6.75), None]
    path = PROJECT_DIRECTORY / "docs" / "results" / "forecast-2026-11-25" / "forecast.json"
    assert ForecastFile.model_validate_json(path.read_bytes()).schema_version == 1
