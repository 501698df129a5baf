"""Trainings that a forecast is held against, made on hosts in network namespaces."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from compare.collectives.cluster import Cluster
from engines.netns import NetnsSettings
from forecast import validation
from forecast.algorithms import Algorithm
from forecast.measured_runs import RunFailed, train_what_was_forecast
from forecast.network import parse_network, read_measured
from forecast.profile import Computing
from forecast.result import ForecastFile, forecast, forecast_file
from forecast.scenario import Scenario, Variant
from forecast.sending import Whole
from forecast.validation import MeasuredFile
from launch.errors import UsageError
from records.throughput import NUM_WARMUP_STEPS
from tests.forecasting import certain, collective, made_profile
from tests.launching import needs_namespaces

STEPS = ("--task", "token-tagging", "--dtype", "float32", "--max-steps", "12", "--threads-per-rank", "1")


def _write_forecast(place: Path, network: str, *own_options: str) -> Path:
    computing = [Computing(num_processes=n, step_seconds=certain(0.1), spread_seconds=None) for n in (1, 2)]
    profile = made_profile(samples_per_rank=8, own_options=own_options, computing=computing)
    scenario = Scenario(profile, parse_network(network), same_machine=True)
    path = place / "forecast.json"
    path.write_text(
        forecast_file("", [forecast(scenario, Variant("ring", profile.sending), [2], None)]).model_dump_json()
    )
    return path


@needs_namespaces
@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_each_forecast_gets_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, runs = _write_forecast(tmp_path, "1gbit", "--bucket-cap-mb=2"), tmp_path / "runs"
    words = ["run", str(path), str(runs), *STEPS]
    assert validation.run(words) == 0
    (measured,) = MeasuredFile.model_validate_json(capsys.readouterr().out).runs
    assert (measured.name, measured.network, measured.ranks) == ("ddp --bucket-cap-mb=2", "1gbit,latency=0us", 2)
    assert len(measured.step_seconds) == 12 - NUM_WARMUP_STEPS
    assert measured.samples_per_rank == 8
    assert measured.gradient_bytes

    # The same command leaves what is there alone.
    shutil.rmtree(runs / "ddp-bucket-cap-mb-2-2-1gbit" / "node1")
    assert validation.run(words) == 0
    assert MeasuredFile.model_validate_json(capsys.readouterr().out).runs == [measured]

    # A run that fails ends the series with its reason.
    assert validation.run([*words[:2], str(tmp_path / "others"), *STEPS, "--model", "bert-tiny"]) == 1
    assert "ddp --bucket-cap-mb=2 with 2 ranks on 1gbit,latency=0us did not complete: " in capsys.readouterr().err


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "runs" / "ddp-2-1gbit" / "node0"
    place.mkdir(parents=True)
    (place / "record.json").write_text("{")
    with pytest.raises(UsageError, match="ddp-2-1gbit: holds a damaged record; remove it"):
        validation.run(["run", str(_write_forecast(tmp_path, "1gbit")), str(tmp_path / "runs")])


def test_options_of_a_backend_alone_are_refused(tmp_path: Path) -> None:
    path = _write_forecast(tmp_path, "1gbit")
    with pytest.raises(UsageError, match="--bucket-cap-mb: the forecast holds the options of ddp alone; leave it out"):
        validation.run(["run", str(path), str(tmp_path / "runs"), "--max-steps", "12", "--bucket-cap-mb", "3"])
    assert not (tmp_path / "runs").exists()


def test_runs_with_other_options_are_not_taken_for_those_that_are_asked_for(tmp_path: Path) -> None:
    words = ["run", str(_write_forecast(tmp_path, "1gbit")), str(tmp_path / "runs")]
    (tmp_path / "runs" / "ddp-2-1gbit").mkdir(parents=True)
    (tmp_path / "runs" / "ddp-2-1gbit" / "record.json").write_text("{")  # it is looked at if options are the same
    for options, why in (
        (["--max-steps", "12"], "damaged record"),
        (["--max-steps", "13"], "instead of '--max-steps 13'"),
    ):
        with pytest.raises(UsageError, match=why):
            validation.run([*words, *options])


def test_runs_for_another_forecast_are_not_taken_for_those_of_this_one(tmp_path: Path) -> None:
    path, runs = _write_forecast(tmp_path, "1gbit"), tmp_path / "runs"
    words = ["run", str(path), str(runs), "--max-steps", "12"]
    (runs / "ddp-2-1gbit").mkdir(parents=True)
    (runs / "ddp-2-1gbit" / "record.json").write_text("{")  # it is looked at if the forecast is the same
    with pytest.raises(UsageError, match="damaged record"):
        validation.run(words)
    made = ForecastFile.model_validate_json(path.read_bytes())
    path.write_text(made.model_copy(update={"created_at": "2026-11-01T12:00:00+00:00"}).model_dump_json())
    with pytest.raises(UsageError) as refusal:
        validation.run(words)
    assert str(refusal.value) == (
        f"{runs}: its runs are for the forecast of {made.created_at} instead of that of 2026-11-01T12:00:00+00:00; "
        "give the same, or name another directory"
    )
    (runs / "options.json").write_text('["--max-steps", "12"]\n')  # as an earlier version noted them
    with pytest.raises(UsageError, match="damaged record"):
        validation.run(words)
    (runs / "options.json").write_text('{"options": "all"}\n')
    with pytest.raises(UsageError, match=r"options\.json: cannot be used .* name another directory"):
        validation.run(words)


def _written(
    place: Path, num_ranks: int, algorithm: Algorithm = "ring", sending: Whole | None = None, **where: Any
) -> Path:
    """A file with a forecast of a profile whose one and two processes compute alike."""
    computing = [Computing(num_processes=n, step_seconds=certain(0.1), spread_seconds=None) for n in (1, 2)]
    profile = made_profile(computing=computing)
    variant = Variant(algorithm, sending or profile.sending)
    found = forecast(Scenario(profile, parse_network("1gbit"), **where), variant, [num_ranks], None)
    path = place / "forecast.json"
    path.write_text(forecast_file("", [found]).model_dump_json())
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"same_machine": True, "algorithm": "tree"},
        {"same_machine": True, "sending": Whole()},
        {"sending": Whole()},
        {"slow_down": 2.0},
        {"ranks_per_node": 2},
    ],
    ids=["tree", "whole", "whole elsewhere", "slower", "two on a node"],
)
def test_what_hosts_on_this_machine_do_not_do_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = _written(tmp_path, 2, **changes)
    with pytest.raises(UsageError, match="forecast without --ranks-per-node, --slow-down-of-computing, --algorithm"):
        validation.run(["run", str(path), str(tmp_path / "runs")])


@pytest.mark.parametrize(
    ("num_ranks", "options", "needed"),
    [
        (2, ["--threads-per-rank", "1"], None),
        (2, ["--threads-per-rank", "2"], 4),
        (4, ["--threads-per-rank", "1"], 4),
        (4, ["--task", "text-classification", "--threads-per-rank", "1"], 4),
        (4, ["--task", "paced", "--threads-per-rank", "1"], None),
        (4, ["--config", "options.yaml"], None),
    ],
)
def test_a_forecast_for_machines_of_their_own_needs_ranks_that_share_no_cores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    num_ranks: int,
    options: list[str],
    needed: int | None,
) -> None:
    """On two cores; or ranks of a task that waits instead of computing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(validation, "num_cpus", lambda: 2)
    started: list[list[str]] = []

    def train(forecasts: ForecastFile, directory: Path, options: list[str], say: object) -> None:
        started.append(options)
        raise RunFailed("not started")

    monkeypatch.setattr(validation, "train_what_was_forecast", train)
    (tmp_path / "options.yaml").write_text("task: paced\nthreads_per_rank: 1\n")
    path = _written(tmp_path, num_ranks)
    words = ["run", str(path), str(tmp_path / "runs"), *options]
    if needed is None:
        assert validation.run(words) == 1
        assert started == [options]
        assert "ranks that share nothing: what they take from each other on this machine" in capsys.readouterr().err
        return
    with pytest.raises(
        UsageError, match=f"need {needed} cores of their own, and this machine has 2; forecast with --sa"
    ):
        validation.run(words)
    assert not started


def test_the_threads_of_the_profile_have_to_be_given(tmp_path: Path) -> None:
    path = _written(tmp_path, 2)
    with pytest.raises(UsageError, match="give --threads-per-rank, as it was in the profile"):
        validation.run(["run", str(path), str(tmp_path / "runs"), "--task", "paced"])


def test_a_forecast_of_an_earlier_version_is_to_be_made_again(tmp_path: Path) -> None:
    """It does not say whether its ranks share anything."""
    path = _written(tmp_path, 2)
    file = json.loads(path.read_text())
    file["forecasts"][0] |= {"is_as_profiled": False, "has_own_machines": None}
    path.write_text(json.dumps(file))
    with pytest.raises(UsageError, match="the forecast is of an earlier version; make it again"):
        validation.run(["run", str(path), str(tmp_path / "runs")])


def test_links_within_a_node_are_refused(tmp_path: Path) -> None:
    path = _write_forecast(tmp_path, "1gbit,local=10gbit")
    with pytest.raises(
        UsageError, match="local-latency=0us: hosts on this machine have a bandwidth and no links within"
    ):
        validation.run(["run", str(path), str(tmp_path / "runs")])


def test_a_run_has_the_network_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the options of allreduce to those of the run that is held against the forecast."""
    limits = NetnsSettings.model_validate({"bandwidth": "1gbit", "latency": "5ms", "loss": "0.1%"})
    name, limit = read_measured(Cluster("netns", limits, (), None).network)
    assert name == "1gbit,latency=5ms,loss=0.1%"
    assert limit == parse_network("1gbit,latency=5ms")
    profile, started = made_profile(), list[list[str]]()
    scenario = Scenario(profile, limit, measured=(collective(2, 0.001, 1e9),), name=name)
    found = forecast_file("", [forecast(scenario, Variant("ring", profile.sending), [2], None)])

    def refuse(arguments: list[str]) -> None:
        started.append(arguments)
        raise UsageError("not started")

    monkeypatch.setattr("launch.own_command.run_command", refuse)
    with pytest.raises(UsageError, match="not started"):
        train_what_was_forecast(found, tmp_path, [], print)
    assert [word for word in started[0] if word in ("--bandwidth=1gbit", "--latency=5ms", "--loss=0.1%")] == [
        *("--bandwidth=1gbit", "--latency=5ms", "--loss=0.1%")
    ]
