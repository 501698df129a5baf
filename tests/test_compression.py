"""Compressed gradients: what a run says of them, how it goes on, and what a report says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backends.registry import BACKENDS, find_backend
from compare.report.trust import grounds_of
from compare.results import Results
from records.checkpoint import checkpoint_path
from tests.launching import lockstep, require_backend, train
from tests.resuming import RUN, UnbrokenRuns, assert_same_run

WIDE = ("--num-processes", "2", "--hidden-size", "40", "--num-layers", "1", "--dtype", "float32")
PAIRS = [
    pytest.param(backend, compression, id=f"{backend}-{compression}")
    for backend, row in BACKENDS.items()
    for compression in row.capabilities.compressions
]
WASTEFUL = "tests.variants_of_ddp:WastefulDDP"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> UnbrokenRuns:
    return UnbrokenRuns(tmp_path_factory)


@pytest.mark.parametrize(("backend", "compression"), PAIRS)
def test_the_setting_is_read_back_and_the_training_is_another(
    tmp_path: Path, unbroken: UnbrokenRuns, backend: str, compression: str
) -> None:
    require_backend(backend)
    exact = json.loads((unbroken("ddp", *WIDE) / "record.json").read_text())
    record = train(backend, tmp_path / "run", *RUN, *WIDE, "--grad-compression", compression)
    assert {rank["effective_settings"]["grad_compression"] for rank in record["ranks"]} == {compression}
    assert len({rank["weights_sha256"] for rank in record["ranks"]}) == 1
    assert record["ranks"][0]["weights_sha256"] != exact["ranks"][0]["weights_sha256"]
    assert record["steps"][-1]["loss"] == pytest.approx(exact["steps"][-1]["loss"], rel=0.1)


def test_a_run_with_half_of_the_digits_goes_on_to_the_last_bit(tmp_path: Path, unbroken: UnbrokenRuns) -> None:
    whole = unbroken("ddp", *WIDE, "--grad-compression", "bf16")
    train("ddp", tmp_path / "run", "--resume", checkpoint_path(whole, 3))
    assert_same_run(tmp_path / "run", whole)


def test_powersgd_repeats_itself_and_starts_afresh_from_a_checkpoint(tmp_path: Path, unbroken: UnbrokenRuns) -> None:
    options = (*WIDE, "--grad-compression", "powersgd")
    whole = unbroken("ddp", *options)
    train("ddp", tmp_path / "again", *RUN, *options)
    assert_same_run(tmp_path / "again", whole)
    seeds = [train("ddp", tmp_path / f"seed-{seed}", *RUN, *options, "--seed", seed) for seed in ("1", "2")]
    assert seeds[0]["ranks"][0]["weights_sha256"] != seeds[1]["ranks"][0]["weights_sha256"]
    record = train("ddp", tmp_path / "run", "--resume", checkpoint_path(whole, 4))
    assert any("has nothing of what PowerSGD has left out" in warning for warning in record["warnings"])
    # The first step is the exact one of the same weights.
    ours, theirs = (json.loads((one / "record.json").read_text())["steps"] for one in (tmp_path / "run", whole))
    assert ours[4]["loss"] == theirs[4]["loss"]
    assert ours[-1]["loss"] != theirs[-1]["loss"]


def test_powersgd_finishes_one_bucket_before_the_next(tmp_path: Path) -> None:
    """Otherwise ranks soon reduce different matrices together: gloo aborts, or both wait."""
    options = ("--model", "bert-tiny", "--max-seq-length", "16", "--max-steps", "6", "--no-evaluate", "--timeout", "30")
    compressed = ("--grad-compression", "powersgd", "--bucket-cap-mb", "1")
    record = train("ddp", tmp_path / "run", *options, *compressed, "--num-processes", "2", "--save-every", "never")
    assert len({rank["weights_sha256"] for rank in record["ranks"]}) == 1


def test_fp16_may_overflow_twice(tmp_path: Path) -> None:
    """A scaled gradient that overflows when it is compressed makes all ranks skip, until the scale is small enough."""
    options = (*WIDE, "--precision", "fp16", "--init-loss-scale", "131072")
    record = train("ddp", tmp_path / "run", *RUN, *options, "--grad-compression", "fp16")
    skipped = [step["skipped"] for step in record["steps"]]
    assert skipped[:2] == [True, True]
    assert not skipped[-1]
    assert len({rank["weights_sha256"] for rank in record["ranks"]}) == 1


def test_a_run_goes_on_with_its_own_compression_alone(unbroken: UnbrokenRuns) -> None:
    whole = unbroken("ddp", *WIDE, "--grad-compression", "bf16")
    for backend, option in (("ddp", ("--grad-compression", "none")), ("single", ("--num-processes", "1"))):
        done = lockstep(backend, "--resume", checkpoint_path(whole, 3), *option)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert "--grad-compression" in line


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of real runs, timed and diagnosed: exact ones, one as fp16, and one that sends too much."""
    directory = tmp_path_factory.mktemp("report")
    task = ("--task", "token-tagging", "--dtype", "float32", "--hidden-size", "64", "--max-steps", "12")
    runs: dict[str, tuple[str, ...]] = {
        "single": ("single",),
        "yardstick": ("single", "--micro-batch-size", "16"),
        "ddp": ("ddp",),
        "fp16": ("ddp", "--grad-compression", "fp16"),
        "wasteful": (WASTEFUL,),
        "sharded": ("fsdp2",),
    }
    made = []
    for name, (backend, *options) in runs.items():
        ranks = () if backend == "single" else ("--num-processes", "2")
        for purpose in (("--diagnose",),) if name == "yardstick" else ((), ("--diagnose",)):
            made.append(directory / f"{name}{'-diagnosed' if purpose else ''}")
            train(backend, made[-1], *task, *ranks, *options, *purpose)
    records = [one / "record.json" for one in made]
    done = lockstep("report", *records, "--output-dir", directory / "report")
    assert done.returncode == 0, done.stderr
    return directory / "report"


@pytest.fixture(scope="module")
def results(report: Path) -> Results:
    return Results.model_validate_json((report / "results.json").read_bytes())


def _entrants(results: Results) -> dict[str, Any]:
    (group,) = [one for one in results.groups if one.group.num_processes == 2]
    return {one.settings.get("grad_compression", one.backend): one for one in group.entrants}


def test_an_approximation_is_shown_beside_the_ranking_and_never_in_it(report: Path, results: Results) -> None:
    fp16 = _entrants(results)["fp16"]
    assert fp16.parity.verdict == "approximate"
    assert 0 < fp16.parity.distance < 0.05
    assert not fp16.ranked
    (standing,) = [one for one in results.standings if one.approximations]
    assert [one.name for one in standing.approximations] == [fp16.name]
    assert fp16.name not in [one.name for one in [*standing.placings, *standing.limits]]
    (sentence,) = [one for one in results.verdict if "Only an approximation, and not ranked" in one]
    assert fp16.name in sentence
    assert any(one.startswith(f"The weights of {fp16.name} are off by ") for one in results.verdict)
    assert f"≈ {fp16.name}, 2 ranks" in (report / "report.md").read_text().replace("\\", "")
    assert "only approximately" in grounds_of(results)[0].answer
    assert all(one.parity.verdict in ("reference", "bitwise", "rounding") for one in _ranked(results))


def test_an_approximation_is_no_reference(tmp_path: Path, unbroken: UnbrokenRuns) -> None:
    """Where one process did not take part, the first exact entrant is the reference."""
    records = [unbroken("ddp", *WIDE, *more) / "record.json" for more in (("--grad-compression", "bf16"), ())]
    done = lockstep("report", *records, "--output-dir", tmp_path / "report")
    assert done.returncode == 0, done.stderr
    results = Results.model_validate_json((tmp_path / "report" / "results.json").read_bytes())
    verdicts = {compression: one.parity.verdict for compression, one in _entrants(results).items()}
    assert verdicts == {"bf16": "approximate", "ddp": "reference"}, verdicts


def _ranked(results: Results) -> list[Any]:
    return [one for group in results.groups for one in group.entrants if one.ranked]


def test_bytes_are_compared_with_what_gradients_need(report: Path, results: Results) -> None:
    entrants = _entrants(results)
    # The loss is reduced, too, with a few numbers.
    assert entrants["ddp"].excess == pytest.approx(1, abs=0.01)
    assert entrants["fp16"].excess == pytest.approx(1, abs=0.01)
    assert entrants["fp16"].wire.ring_bound == entrants["ddp"].wire.ring_bound / 2
    # AdamW has two numbers for each weight.
    assert entrants[WASTEFUL].excess == pytest.approx(3, abs=0.02)
    assert entrants[WASTEFUL].parity.verdict in ("bitwise", "rounding")
    said = f"{WASTEFUL} computes the same but sends 3.0 times what its gradients need."
    assert said in results.verdict
    assert said in (report / "report.md").read_text().replace("\\", "")
    (ground,) = [one for one in grounds_of(results) if one.question == "Bytes sent"]
    assert ground.state == "bad"
    # The gradients once, and the weights for the forward and for the backward pass, but for those of the root.
    assert 0.5 < entrants["fsdp2"].excess < 1.1
    assert entrants["fsdp2"].wire.ring_bound == pytest.approx(1.5 * entrants["ddp"].wire.ring_bound, rel=0.01)


def test_what_sharding_saves_is_shown(report: Path, results: Results) -> None:
    parts, whole = (find_backend(name) and _entrants(results)[name].memory for name in ("fsdp2", "ddp"))
    assert parts.parameters < 0.6 * whole.parameters
    assert parts.between_steps < 0.6 * whole.between_steps
    assert "What the tensors of a rank hold" in (report / "report.html").read_text()
    assert "optimizer state (MiB)" in (report / "report.md").read_text()
    # This model is so small that it does not matter.
    assert not any("shards weights" in sentence for sentence in results.verdict)
