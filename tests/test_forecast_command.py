"""``launch/run.sh forecast``: profiles, tables, pages, and the errors of forecasts."""

from __future__ import annotations

import html
import io
import json
import re
import shlex
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from rich.console import Console

from forecast import command, validation
from forecast.network import parse_network
from forecast.profile import GradientTime, Profile, write_profile
from forecast.records import LacksTimes, profile_of_record
from forecast.result import Forecast, ForecastFile, forecast, forecast_file
from forecast.scenario import Scenario, Variant
from forecast.sending import Whole
from forecast.source import read_source
from forecast.table import show
from forecast.validation import MeasuredFile, MeasuredSteps
from launch.errors import UsageError
from records.record import read_record
from tests.browser import Visit, chromium
from tests.forecasting import made_profile, measured_network
from tests.launching import lockstep, train

# In float32, as real models are, and with two micro-steps.
SMALL = "--task token-tagging --dtype float32 --global-batch-size 16 --micro-batch-size 4 --threads-per-rank 1"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a profile, to work in."""
    write_profile(made_profile(), tmp_path)
    (tmp_path / "other.json").write_text('{"schema_version": 1, "kind": "collectives"}')
    of_ddp = {2: (0.001, 1e9), 4: (0.004, 0.5e9)}
    (tmp_path / "measured.json").write_text(measured_network("10gbit", ddp=of_ddp).model_dump_json())
    (tmp_path / "horovod.json").write_text(measured_network(None, horovod={2: (0.001, 1e9)}).model_dump_json())
    asleep = tmp_path / "asleep"
    asleep.mkdir()
    write_profile(made_profile(backend="horovod", own_options=["--wait=sleep"]), asleep)
    (tmp_path / "none.json").write_text(measured_network(None).model_dump_json())
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "record.json").write_text('{"schema_version": 3}')
    content = json.loads((tmp_path / "profile.json").read_text())
    (tmp_path / "newer.json").write_text(json.dumps({**content, "schema_version": 3}))
    (tmp_path / "wrong.json").write_text(json.dumps({**content, "update_seconds": -1}))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


P = "--profile profile.json"
N = "--network 1gbit"
REFUSED = {
    N: ("--profile is missing", "forecast profile"),
    P: ("--network is missing", "25gbit,latency=20us"),
    f"{P} --network 25": ("--network", "'25' is not a bandwidth", "25gbit"),
    f"{P} --network 0gbit": ("0gbit is not possible", "25gbit"),
    f"{P} --network 25gbit,latency=-1us": ("'-1us' is not a latency", "cannot be negative"),
    f"{P} --network 25gbyte": ("'25gbyte'", "kbit, mbit, gbit"),
    f"{P} --network gone.json": ("--network gone.json", "cannot be read"),
    f"{P} --network other.json": ("--network other.json", "launch/run.sh allreduce"),
    f"{P} --network horovod.json": ("has all-reduces of horovod, but none of ddp", "allreduce --backends ddp"),
    "--profile asleep --network horovod.json": (
        "has all-reduces of horovod, but none of horovod --wait=sleep",
        "allreduce --backends horovod --wait=sleep",
    ),
    f"{P} --network none.json": ("has no line through all-reduces", "three sizes"),
    f"{P} --network 1gbit,local=2gbit": ("--network 1gbit,local=2gbit: local= connects", "add --ranks-per-node"),
    f"{P} {N} --ranks 0": ("--ranks 0", "greater than or equal to 1"),
    f"{P} {N} --ranks many": ("--ranks many", "valid integer"),
    f"{P} {N} --ranks 12 --ranks-per-node 8": ("--ranks 12", "not a multiple of --ranks-per-node 8"),
    f"{P} {N} --ranks 4 --same-machine": ("--same-machine", "--processes 4"),
    f"{P} {N} --same-machine --slow-down-of-computing 2": ("--slow-down-of-computing", "leave one of the two out"),
    f"{P} {N} --same-machine --ranks-per-node 2": ("--ranks-per-node 2", "leave one of the two out"),
    f"{P} {N} --slow-down-of-computing 0.5": ("--slow-down-of-computing 0.5", "greater than or equal to 1"),
    f"{P} {N} --cost-per-hour -1": ("--cost-per-hour -1", "greater than 0"),
    f"{P} {N} --algorithm star": ("--algorithm star", "'ring', 'tree', 'hierarchical' or 'central'"),
    f"{P} {N} --output page.pdf": ("--output page.pdf", ".html nor .json"),
    f"{P} {N} --output profile.json": ("--output profile.json: exists already",),
    f"--profile gone {N}": ("--profile gone: cannot be read", "forecast profile"),
    f"--profile empty {N}": ("--profile empty: holds no profile.json and no record.json", "forecast profile"),
    f"--profile broken.json {N}": ("--profile broken.json: is not JSON", "forecast profile"),
    f"--profile other.json {N}": ("--profile other.json: is of the kind 'collectives'", "forecast profile"),
    f"--profile newer.json {N}": ("has schema version 3", "make the profile again"),
    f"--profile wrong.json {N}": ("update_seconds", "greater than or equal to 0"),
    f"--record record.json {N}": ("--record record.json: is no record of this Lockstep", "forecast profile"),
    "profile": ("name a backend first",),
    "profile single": ("single: it has no ranks",),
    "profile fsdp2": ("fsdp2: ranks hold parts",),
    "profile ddp --num-nodes 2": ("--num-nodes 2", "leave it out"),
    "profile ddp --grad-compression powersgd": ("--grad-compression powersgd", "leave it out"),
    "profile ddp --transport shared-memory": ("--transport shared-memory: it stays on one node", "leave it out"),
    "profile ddp --logging-steps 1": ("--logging-steps 1: how often", "leave it out"),
    "profile ddp --engine netns --start-method torchrun": ("--start-method torchrun", "leave one of the two out"),
    "profile ddp --processes 0": ("--processes 0", "greater than or equal to 1"),
    "profile ddp --profile-steps 2": ("--profile-steps 2", "greater than or equal to 6"),
    "profile ddp --output-dir .": ("holds profile.json already", "choose another directory"),
    "profile ddp --output-dir profile.json": ("is a file", "name a directory"),
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_bad_input_is_refused(place: Path, arguments: str) -> None:
    before = sorted(place.rglob("*"))
    with pytest.raises(UsageError) as caught:
        command.run(shlex.split(arguments))
    for part in REFUSED[arguments]:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(place.rglob("*")) == before


def test_a_refusal_is_one_line_and_exit_code_2(place: Path) -> None:
    done = lockstep("forecast", *shlex.split(P), "--network", "25", cwd=place)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


def test_a_forecast_by_hand(place: Path) -> None:
    """Gradients of 4 MB as a whole over 1 GB/s, less headers, on 4 ranks: 6.3 ms beyond a step of 100 ms."""
    options = f"{P} --network 8gbit --ranks 1,4 --sending whole --cost-per-hour 9 --output f.json"
    assert command.run(shlex.split(options)) == 0
    content = ForecastFile.model_validate_json((place / "f.json").read_bytes())
    one, four = content.forecasts[0].rows
    assert (one.efficiency.estimate, one.exposed_seconds.estimate) == (1, 0)
    step = 0.1 + 0.006 * 1514 / 1448
    assert four.step_seconds.estimate == pytest.approx(step)
    assert four.efficiency.estimate == pytest.approx(0.1 / step)
    # An epoch has 25 steps.
    assert four.epoch_seconds.estimate == pytest.approx(25 * step)
    assert four.cost_per_epoch is not None
    assert four.cost_per_epoch.estimate == pytest.approx(4 * 9 * 25 * step / 3600)
    assert four.by_sending["whole"] == four.by_algorithm["ring"] == four.efficiency.estimate
    assert four.by_sending["buckets"] > four.efficiency.estimate > four.by_algorithm["central"]


def test_a_network_that_was_measured(place: Path) -> None:
    """Gradients of 4 MB: over 2 ranks 1 + 4 ms, over 4 ranks 4 + 8; over 8 ranks, on the link that these 4 showed."""
    options = f"{P} --network measured.json --ranks 2,4,8 --sending whole --output f.json"
    assert command.run(shlex.split(options)) == 0
    (found,) = ForecastFile.model_validate_json((place / "f.json").read_bytes()).forecasts
    assert (found.network, found.network_measured) == ("10gbit,latency=0us", True)
    # A ring of N ranks sends 2 (N - 1) messages of 1/N of the bytes each: 6 of 1/4, and 14 of 1/8.
    exposed = [0.005, 0.012, 14 / 6 * 0.004 + (14 / 8) / (6 / 4) * 0.008]
    assert [row.exposed_seconds.estimate for row in found.rows] == pytest.approx(exposed)
    assert "all-reduces were measured on this network, over 2 and 4 ranks" in found.remarks


def test_a_network_of_which_no_limit_is_known(place: Path) -> None:
    """It goes by the name of its file, and no line limits another: 8 ranks have the link of 4, which was the faster."""
    measured = measured_network("slurm", ddp={2: (0.001, 1e9), 4: (0.001, 2e9)})
    (place / "slurm.json").write_text(measured.model_dump_json())
    assert command.run(shlex.split(f"{P} --network slurm.json --ranks 8 --sending whole --output f.json")) == 0
    (found,) = ForecastFile.model_validate_json((place / "f.json").read_bytes()).forecasts
    assert found.network == "slurm"
    assert found.rows[0].exposed_seconds.estimate == pytest.approx(14 / 6 * 0.001 + (14 / 8) / (6 / 4) * 0.002)


def test_a_backend_that_communicates_as_another_has_its_network(place: Path) -> None:
    write_profile(made_profile(backend="accelerate"), place / "empty")
    assert command.run(shlex.split("--profile empty --network measured.json --ranks 2 --output f.json")) == 0
    (found,) = ForecastFile.model_validate_json((place / "f.json").read_bytes()).forecasts
    assert found.backend == "accelerate"


def test_options_of_a_backend_are_told_apart(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that change its all-reduces must be those of the network; others need not."""
    network = measured_network(None, horovod={2: (0.001, 1e9)})
    asleep = [one.model_copy(update={"own_options": ["--wait=sleep"]}) for one in network.series]
    (place / "asleep.json").write_text(network.model_copy(update={"series": asleep}).model_dump_json())
    assert command.run(shlex.split("--profile asleep --network asleep.json --ranks 2 --output f.json")) == 0
    (found,) = ForecastFile.model_validate_json((place / "f.json").read_bytes()).forecasts
    assert found.name == "horovod --wait=sleep"
    assert "horovod --wait=sleep on " in capsys.readouterr().out

    write_profile(made_profile(own_options=["--bucket-cap-mb=1"]), place / "empty")
    assert command.run(shlex.split("--profile empty --network measured.json --ranks 2")) == 0


def test_a_grid_is_one_command_with_a_date(place: Path) -> None:
    options = f"{P} {P} --network 1gbit --network 100mbit --network 10gbit,latency=1ms --ranks 2,4,8 --output f.json"
    assert command.run(shlex.split(options)) == 0
    content = ForecastFile.model_validate_json((place / "f.json").read_bytes())
    assert datetime.fromisoformat(content.created_at) <= datetime.now(timezone.utc)
    assert [one.network for one in content.forecasts] == 2 * [
        *("1gbit,latency=0us", "100mbit,latency=0us", "10gbit,latency=1ms")
    ]
    assert [row.ranks for one in content.forecasts for row in one.rows] == 6 * [2, 4, 8]


def _forecast(network: str, *ranks: int, profile: Profile | None = None) -> Forecast:
    profile = profile or made_profile()
    return forecast(Scenario(profile, parse_network(network)), Variant("ring", profile.sending), list(ranks), 2.0)


def test_advice_says_what_would_help_and_how_much() -> None:
    """4 MB through 0.4 Gbit/s take 146 ms on 8 ranks; half of them, or two steps for one reduction, help."""
    scenario = Scenario(made_profile(sending=Whole()), parse_network("400mbit"))
    found = forecast(scenario, Variant("ring", Whole()), [8], None).advice
    sent = 0.14 * 1514 / 1448
    now = 0.1 / (0.1 + sent)
    eightfold, halved = (0.1 + 7 * 0.09) / (0.1 + 7 * 0.09 + sent), 0.1 / (0.1 + sent / 2)
    becomes = f"efficiency {100 * now:.0f} % becomes"
    eight = "--global-batch-size 1024 --micro-batch-size 16 (8 times the batch)"
    assert found[0] == f"{eight}: {becomes} {100 * eightfold:.0f} % on 8 ranks"
    assert f"--grad-compression fp16: {becomes} {100 * halved:.0f} % on 8 ranks" in found
    assert any(line.startswith("sending in buckets") for line in found)


def test_advice_knows_buckets_smaller_than_a_mebibyte() -> None:
    """Of gradients of 0.6 MB, a bucket of half a MiB takes one, and the first is sent as soon as it is ready."""
    gradients = [GradientTime(name=f"weight{k}", num_bytes=600_000, ready_seconds=0.0075 * k) for k in range(1, 9)]
    found = _forecast("1gbit", 8, profile=made_profile(gradients=gradients)).advice
    assert any(line.startswith("--bucket-cap-mb 0.5: ") for line in found), found


def test_no_algorithm_is_advised() -> None:
    """Between nodes, where a message takes 1 ms, others save most of the rounds, but no option chooses them."""
    network = parse_network("10gbit,latency=1ms,local=1000gbit,local-latency=1us")
    scenario = Scenario(made_profile(sending=Whole()), network, ranks_per_node=8)
    found = forecast(scenario, Variant("ring", Whole()), [64], None)
    assert found.advice
    assert not any("tree" in line or "hierarchical" in line for line in found.advice)


def test_no_advice_where_nothing_would_help() -> None:
    assert _forecast("1000tbit", 64).advice == []


def test_the_tables_fit_into_60_columns() -> None:
    output = io.StringIO()
    show(_forecast("100mbit,latency=20us", 8, 512, 4096), Console(file=output, width=60, markup=False))
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    assert not [line for line in lines if "…" in line]
    for heading in ("ranks +step +efficiency", "ranks +ring +tree", "ranks +buckets +fusion"):
        assert [line for line in lines if re.match(heading, line)], heading


def test_the_page_names_all_and_requests_nothing(place: Path) -> None:
    options = f"{P} --network 1gbit --network 100mbit --ranks 2,64,4096 --cost-per-hour 1 --output f.html"
    assert command.run(shlex.split(options)) == 0
    page = html.unescape((place / "f.html").read_text())
    assert "default-src 'none'" in page
    for words in ("ddp on 1gbit,latency=0us", "ddp on 100mbit", "hierarchical", "central", "fusion", "What would help"):
        assert words in page
    assert len(re.findall(r'<div class="plot"', page)) == 3


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_can_be_read_on_a_phone(place: Path, scheme: str) -> None:
    assert command.run(shlex.split(f"{P} --network 1gbit --network 100mbit --ranks 2,64,4096 --output f.html")) == 0
    with chromium() as browser:
        visit = Visit(browser, place / "f.html", viewport={"width": 420, "height": 900}, color_scheme=scheme)
        try:
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= 420
            paper = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
            assert (visit.requests, visit.complaints) == ([visit.url], [])
        finally:
            visit.close()


def _assert_forecast_of_a_record(run: Path, profile: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    """On machines of their own: one rank computes as it did, and on a network, the last gradients are waited for."""
    output = run.with_suffix(".json")
    assert command.run(shlex.split(f"--record {run} {N} --ranks 1,8 --output {output}")) == 0
    (found,) = ForecastFile.model_validate_json(output.read_bytes()).forecasts
    assert (found.backend, found.network, found.network_measured) == ("ddp", "1gbit,latency=0us", False)
    assert found.gradient_bytes == sum(one.num_bytes for one in profile.gradients)
    assert {*profile.remarks} <= {*found.remarks}
    one, eight = found.rows
    assert one.step_seconds.estimate == found.one_rank_seconds == pytest.approx(profile.work.seconds)
    assert eight.exposed_seconds.estimate > 0
    assert eight.step_seconds.estimate >= one.step_seconds.estimate + eight.exposed_seconds.estimate
    assert f"\nforecast in {output}" in capsys.readouterr().out


def test_a_record_with_a_diagnosis_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--task", "token-tagging", "--num-processes", "2", "--threads-per-rank", "1", "--max-steps", "12")
    train("ddp", tmp_path / "plain", *options)
    with pytest.raises(UsageError, match="lacks the times of forward and backward pass; train once more with --diag"):
        read_source("--record", tmp_path / "plain")
    assert validation.run(["measured", f"1gbit@{tmp_path / 'plain'}"]) == 0
    (run,) = MeasuredFile.model_validate_json(capsys.readouterr().out).runs
    assert (run.backend, run.network, run.ranks, len(run.step_seconds)) == ("ddp", "1gbit,latency=0us", 2, 12 - 5)
    record = train("ddp", tmp_path / "diagnosed", *options, "--diagnose")
    profile = read_source("--record", tmp_path / "diagnosed")
    size = record["ranks"][0]["diagnosis"]["gradient_bytes"]
    assert sum(one.num_bytes for one in profile.gradients) == size
    assert profile.gradients[-1].ready_seconds == pytest.approx(profile.last_backward_seconds)
    assert any("evenly" in remark for remark in profile.remarks)
    assert 0 < profile.work.seconds < sum(record["ranks"][0]["step_seconds"])
    _assert_forecast_of_a_record(tmp_path / "diagnosed", profile, capsys)
    diagnosed = read_record(tmp_path / "diagnosed" / "record.json")
    config = diagnosed.config.model_copy(update={"backend_settings": {"transport": "shared-memory"}})
    with pytest.raises(LacksTimes, match="--transport shared-memory: it stays on one node; choose another run"):
        profile_of_record(diagnosed.model_copy(update={"config": config}))


@pytest.mark.slow
def test_a_profile_is_measured(tmp_path: Path) -> None:
    """Of a real task, in real processes: one, two that do not communicate, and two ranks of DDP, each started twice."""
    done = lockstep(
        *("forecast", "profile", "ddp", *shlex.split(SMALL), "--profile-steps", "6", "--starts", "2"),
        *("--output-dir", tmp_path / "p"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    profile = read_source("--profile", tmp_path / "p")
    assert (profile.backend, profile.transport, profile.samples_per_rank, profile.micro_steps) == ("ddp", "gloo", 8, 2)
    assert [one.num_processes for one in profile.computing] == [1, 2]
    assert profile.num_steps == 2 * 6
    assert all(one.spread_seconds is not None for one in (*profile.computing[1:], *profile.together))
    assert profile.overlap_slow_down is not None
    (reduces,) = profile.collectives
    assert (reduces.num_processes, reduces.transport) == (2, "gloo")
    assert [one.num_bytes for one in reduces.times] == [4**k * 4096 for k in range(7)]
    ready = [one.ready_seconds for one in profile.gradients]
    assert ready == sorted(ready)
    assert 0 < ready[0] <= ready[-1] <= profile.last_backward_seconds < profile.backward_seconds
    assert profile.gradients[0].name.startswith("output.")  # the last layer has its gradient first
    assert {one.name for one in profile.gradients} >= {"embedding.weight", "mixer.weight"}
    told = lockstep("forecast", "--profile", tmp_path / "p", "--network", "1gbit,latency=50us", "--ranks", "2,8")
    assert told.returncode == 0, told.stderr
    assert "one rank alone takes" in told.stdout


def _measured(ranks: int, seconds: float, network: str = "1gbit,latency=0us") -> MeasuredSteps:
    now = datetime.now(timezone.utc)
    started_at = now + timedelta(days=1)
    return MeasuredSteps(backend="ddp", network=network, ranks=ranks, started_at=started_at, step_seconds=[seconds] * 3)


def test_errors_of_forecasts() -> None:
    content = forecast_file("", [_forecast("1gbit", 2, 4)])
    two, four = (row.step_seconds.estimate for row in content.forecasts[0].rows)
    runs = MeasuredFile(runs=[_measured(2, two / 1.1), _measured(4, four / 0.8)])
    found = validation.compare(content, runs)
    assert [one.error for one in found] == pytest.approx([0.1, -0.2])
    assert validation.summary(found) == (
        "mean absolute error 15.0 %, worst 20.0 %; 0 of 2 measured steps are within their intervals"
    )


def test_of_several_runs_the_median_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = forecast_file("", [_forecast("1gbit", 2, 4)])
    (tmp_path / "forecast.json").write_text(content.model_dump_json())
    two, four = (row.step_seconds.estimate for row in content.forecasts[0].rows)
    passes = [[_measured(2, two / 1.1), _measured(4, four)], [_measured(2, two / 1.3)], [_measured(2, two / 1.2)]]
    files = [tmp_path / f"measured-{number}.json" for number in range(len(passes))]
    for path, runs in zip(files, passes, strict=True):
        path.write_text(MeasuredFile(runs=runs).model_dump_json())
    assert validation.run(["compare", str(tmp_path / "forecast.json"), *map(str, files)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "mean absolute error 10.0 %, worst 20.0 %; 1 of 2 measured steps are within their intervals" in printed
    assert "runs of the same kind differ by 18.2 % on average, and by 18.2 % at most" in printed


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "measured NETWORK@RECORD"),
        (["measured", "runs/a"], "write the network and the record"),
        (["measured", "1gbit@nowhere"], "1gbit@nowhere: the record cannot be read"),
        (["measured", "1gbit@other.json"], "is no record of this Lockstep"),
        (["compare", "nowhere.json", "other.json"], "nowhere.json: cannot be read"),
        (["compare", "other.json", "other.json"], "no file of the kind 'forecast'"),
    ],
)
def test_files_that_cannot_be_compared_are_refused(place: Path, arguments: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        validation.run(arguments)


def test_two_forecasts_of_one_backend_are_refused() -> None:
    content = forecast_file("", [_forecast("1gbit", 2), _forecast("1gbit", 2)])
    with pytest.raises(UsageError, match="ddp has two forecasts on 1gbit,latency=0us; make a forecast with"):
        validation.compare(content, MeasuredFile(runs=[_measured(2, 0.1)]))


def test_what_was_measured_first_or_is_something_else_is_refused() -> None:
    content = forecast_file("", [_forecast("1gbit", 2)])
    early = _measured(2, 0.1).model_copy(update={"started_at": datetime(2026, 1, 1, tzinfo=timezone.utc)})
    for run, why in (
        (early, "was measured before the forecast"),
        (_measured(4, 0.1), "4 ranks on 1gbit,latency=0us: has no forecast"),
        (_measured(2, 0.1, "2gbit,latency=0us"), "2gbit,latency=0us: has no forecast"),
        (_measured(2, 0.1).model_copy(update={"samples_per_rank": 1.5}), "has 1.5 samples of each rank in a step"),
        (_measured(2, 0.1).model_copy(update={"gradient_bytes": 7}), "has 7 bytes of gradients, and the forecast is"),
    ):
        with pytest.raises(UsageError, match=why):
            validation.compare(content, MeasuredFile(runs=[run]))
