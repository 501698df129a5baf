"""Loops written by hand: they compute what adapters compute, take part in a race, and are compared in its report."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from scipy import stats
from torch.testing import assert_close

from backends.registry import BACKENDS
from compare.bare.job import BareJob, Outcome, Settings, Step
from compare.race.bare import add_loops, why_no_loop
from compare.race.entrants import make_plan, read_run_options
from compare.race.live import LiveEntrant
from compare.race.messages import Turn
from compare.race.options import RaceOptions
from compare.race.plan import Entrant, PlannedRun
from compare.race.tuning import can_be_tuned
from compare.report.bare import adapter_cost_blocks, adapter_cost_lines, adapter_costs_of
from compare.report.grouping import EntrantRuns
from compare.report.page import Table
from compare.report.runs import RaceFacts, Run, TurnFacts
from compare.results import AdapterCost, Interval, Results, Role
from launch.starters.interface import PROJECT_DIRECTORY
from records.record import RankRecord, RunRecord, read_record
from tasks.interface import Batch
from tests import apex_double
from tests.apex_double import CALLS
from tests.launching import lockstep, require_backend, run_config

NUM_STEPS = 12
ON_CPU = [name for name, row in BACKENDS.items() if "cpu" in row.capabilities.precisions]
STEPS = ["--global-batch-size", "16", "--threads-per-rank", "1", "--save-every", "never", f"--max-steps={NUM_STEPS}"]
# The last of three global batches of an epoch is short, and has fewer micro-batches than the others.
TRAINING = [*STEPS, "--task", "token-tagging", "--dtype", "float32", "--num-train-samples", "36"]
OF_BERT = [*STEPS, "--vocab-size", "1000", "--dropout", "0.3", "--no-evaluate"]
RACE = ["compare", "--bare", "--no-limits", "--task", "token-tagging", "--global-batch-size", "16"]
RACE += ["--diagnosis-steps", "10", "--timed-steps", "30", "--repeats", "3", "--no-collectives", "--no-wait-for-idle"]

PROGRAMS = ("compare.race.rank", "compare.race.bare_rank")
# An adapter and its loop, and what they stand for.
TWINS: dict[str, Role] = {"ddp": "backend", "ddp (by hand)": "bare"}


def _both(options: list[str], num_ranks: int, place: Path) -> list[RunRecord]:
    """Trains with the adapter and with the loop, each in one turn of its own processes, and returns their records."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_DIRECTORY)}
    with ExitStack() as stack:
        entrants = [
            stack.enter_context(
                LiveEntrant(
                    [*options, f"--num-processes={num_ranks}", f"--output-dir={place / program}"],
                    num_processes=num_ranks,
                    address=place / f"to-{program}",
                    environment=environment,
                    rank_program=program,
                )
            )
            for program in PROGRAMS
        ]
        for entrant in entrants:
            entrant.get_ready()
        for entrant in entrants:
            entrant.take(Turn(warm_through=1, through=NUM_STEPS))
            assert entrant.end() is None
    return [read_record(place / program / "record.json") for program in PROGRAMS]


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=pytest.mark.slow) if name != "ddp" else name for name in ON_CPU]
)
@pytest.mark.usefixtures("forked_programs")  # as entrants are in the races of other tests
def test_a_loop_computes_what_its_adapter_computes(backend: str, accumulation: int, tmp_path: Path) -> None:
    require_backend(backend)
    num_ranks = BACKENDS[backend].capabilities.max_world_size or 2
    options = [backend, *TRAINING, f"--micro-batch-size={16 // num_ranks // accumulation}"]
    adapter, bare = _both(options, num_ranks, tmp_path)
    assert [len(rank.step_seconds) for rank in bare.ranks] == [NUM_STEPS] * num_ranks
    for ours, theirs in zip(adapter.steps, bare.steps, strict=True):
        assert (ours.epoch, ours.num_samples, ours.skipped) == (theirs.epoch, theirs.num_samples, theirs.skipped)
        assert theirs.loss == pytest.approx(ours.loss, rel=1e-5)
        assert theirs.grad_norm == pytest.approx(ours.grad_norm, rel=1e-4)
        assert theirs.learning_rate == pytest.approx(ours.learning_rate, rel=1e-12)
    ours, theirs = (load_file(tmp_path / program / "model.safetensors") for program in PROGRAMS)
    assert_close(theirs, ours, rtol=1e-5, atol=1e-6)
    assert len({rank.weights_sha256 for rank in bare.ranks}) == 1
    assert bare.quality == pytest.approx(adapter.quality, rel=1e-4)
    for ours, theirs in zip(adapter.ranks, bare.ranks, strict=True):
        for name in ("samples", "tokens", "positions", "work"):
            assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize("batching", ["packed", pytest.param("padded", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("forked_programs")
def test_a_loop_draws_the_dropout_of_its_adapter(batching: str, tmp_path: Path) -> None:
    """The masks of BERT follow from the seed of the step and the number of the sample."""
    options = ["ddp", *OF_BERT, f"--batching={batching}", "--micro-batch-size=4"]
    adapter, bare = _both(options, 2, tmp_path)
    for record in (adapter, bare):
        assert (record.config.batching, record.task["dropout"]) == (batching, 0.3)
    for ours, theirs in zip(adapter.steps, bare.steps, strict=True):
        assert theirs.loss == pytest.approx(ours.loss, rel=1e-4)
        assert theirs.grad_norm == pytest.approx(ours.grad_norm, rel=1e-3)


def test_the_loop_of_apex_calls_it_in_this_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it computes is not checked here, since Apex's kernels need a GPU."""
    apex_double.install(monkeypatch)
    monkeypatch.delitem(sys.modules, "compare.bare.apex", raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", lambda transport: CALLS.append(transport))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: CALLS.append("leave"))
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    from compare.bare.apex import train

    batch = Batch({"x": torch.ones(4, 1)}, num_tokens=4, num_positions=4)
    outcomes: list[Outcome] = []
    settings = Settings("cpu", "fp32", 2, 2, 0, 0.1, 0.0, 1.0, 65536.0)
    steps = [Step([(batch, 1.0), (batch, 1.0)], 8)] * 2
    train(
        BareJob(
            torch.nn.Linear(1, 1), steps, lambda model, one: model(one.tensors["x"]).sum(), outcomes.append, settings
        )
    )
    a_step = ["disable_allreduce", "forward", "backward, unscale later", "enable_allreduce", "forward"]
    a_step += ["backward, unscale", "master_params", "step", "zero_grad"]
    assert ["gloo", "initialize O0", "wrap", *a_step, *a_step, "leave"] == CALLS
    assert [outcome.learning_rate for outcome in outcomes] == pytest.approx([0.1, 0.05])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"optimizer": "sgd"}, "supports only --optimizer adamw"),
        ({"lr_scheduler": "cosine", "torch_compile": True}, "supports only --lr-scheduler linear, --no-torch-compile"),
        ({"on_nan": "skip"}, "supports only --on-nan stop"),
        ({"find_unused_parameters": True}, "supports only --no-find-unused-parameters"),
        ({"backend_settings": {"knob": 1}}, "supports only the library's own defaults"),
        ({"device": "cuda", "num_processes": 1000}, "supports only one rank on each GPU"),
        ({"backend": "tests.by_hand:ByHandBackend"}, "no loop was written by hand for tests.by_hand:ByHandBackend"),
    ],
)
def test_what_a_loop_cannot_do_is_said_in_a_line(
    changes: dict[str, object], reason: str | None, tmp_path: Path
) -> None:
    simple = {"optimizer": "adamw", "lr_scheduler": "linear"}
    config = run_config("ddp", 2, tmp_path, micro_batch_size=8).model_copy(update=simple | changes)
    found = why_no_loop(config)
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_an_entrant_has_a_loop_unless_its_settings_are_of_the_library(tmp_path: Path) -> None:
    simple = {"optimizer": "adamw", "lr_scheduler": "linear"}
    config = run_config("ddp", 2, tmp_path, micro_batch_size=8).model_copy(update=simple)
    plain = Entrant(backend="ddp", num_processes=2, precision="fp32", accumulation=1, global_batch_size=16)
    of_a_run = ("--batching=padded", "--allocator=glibc", "--scheduling=batch")
    padded = plain.model_copy(update={"variant": "padded", "options": of_a_run})
    of_the_library: list[dict[str, object]] = [
        {"options": ("--bucket-cap-mb=1",)},
        {"options": ("--batching=padded", "--grad-compression=fp16")},
        {"options": ("--start-method=spawn",)},
        {"variables": (("NCCL_ALGO", "Ring"),)},
    ]
    without = [plain.model_copy(update={"variant": "mine", **settings}) for settings in of_the_library]
    configs, left_out = dict.fromkeys((plain, padded, *without), config), list[str]()
    add_loops(configs, left_out)
    loops = [entrant for entrant in configs if entrant.role == "bare"]
    assert [(loop.name, loop.options) for loop in loops] == [
        ("ddp (by hand)", ()),
        ("ddp (padded) (by hand)", of_a_run),
    ]
    runs = [PlannedRun(entrant=loop, purpose="timed", block=1, position=0).name for loop in loops]
    assert runs == [f"timed-001-00-{name}-2x-fp32-a1-g16" for name in ("ddp-by-hand", "ddp-padded-by-hand")]
    said = "ddp (mine), 2 rank(s), fp32, 8 x 1: has no loop written by hand beside it"
    assert [line[: len(said)] for line in left_out] == [said] * len(without)


def test_a_loop_has_the_options_of_its_entrant_and_is_not_tuned() -> None:
    entrants = ["padded=ddp:--batching padded", "slim=ddp:--bucket-cap-mb 1"]
    options = RaceOptions(backends=["ddp"], entrant=entrants, num_processes=[2], limits=False, tune=True, bare=True)
    plan, configs = make_plan(options, read_run_options(["--task=token-tagging", "--device=cpu"], None))
    assert {who.name: config.batching for who, config in configs.items()} == {
        "ddp": "packed",
        "ddp (padded)": "padded",
        "ddp (slim)": "packed",
        "ddp (by hand)": "packed",
        "ddp (padded) (by hand)": "padded",
    }
    assert [(who.name, who.role) for who in can_be_tuned(plan.entrants)] == [("ddp", "backend")]


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_has_a_loop(name: str, tmp_path: Path) -> None:
    defaults = BACKENDS[name].settings().model_dump(mode="json")
    simple = {"backend": name, "backend_settings": defaults, "optimizer": "adamw", "lr_scheduler": "linear"}
    assert why_no_loop(run_config("ddp", 1, tmp_path, micro_batch_size=8).model_copy(update=simple)) is None
    loop = PROJECT_DIRECTORY / "compare" / "bare" / f"{name}.py"
    assert 30 <= len(loop.read_text().splitlines()) <= 50  # as docs/race.md says


def test_a_race_in_which_no_loop_can_take_part_is_refused(tmp_path: Path) -> None:
    done = lockstep(*RACE, "--backends", "single", "--optimizer", "sgd", "--output-dir", tmp_path / "race")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "--bare: no loop written by hand can take part" in line
    assert "--optimizer adamw" in line
    assert not (tmp_path / "race").exists()


@pytest.mark.slow
def test_a_race_says_what_an_adapter_costs(tmp_path: Path) -> None:
    own = "tests.by_hand:ByHandBackend"
    options = ["--backends", f"single,{own}", "--entrant", "padded=single:--batching padded", "--num-processes", "1"]
    done = lockstep(*RACE, "--no-diagnosis", *options, "--output-dir", tmp_path / "race")
    assert done.returncode == 0, done.stderr
    results = Results.model_validate_json((tmp_path / "race" / "results.json").read_bytes())
    (group,) = results.groups
    assert [entrant.name for entrant in group.entrants] == ["single", "single (padded)", own]
    assert [cost.name for cost in results.adapter_costs] == ["single", "single (padded)"]
    for cost in results.adapter_costs:
        assert (cost.group, cost.num_starts) == (group.group.key, 3)
        assert cost.time is not None
        assert cost.time.low is not None
        assert cost.cpu_seconds is not None
        assert cost.cpu_seconds_interval is not None
    assert any(f"no loop was written by hand for {own}" in line for line in results.problems)
    assert not any("by hand" in what for what in results.commands)  # it has no command of its own
    for page in ("report.md", "report.html"):
        assert "What the adapters cost" in (tmp_path / "race" / page).read_text()
    kept = (tmp_path / "race" / "records").glob("timed-*-single-*by-hand-1x-*.json")
    loops = [path for path in kept if not path.name.endswith(".race.json")]
    assert sorted(("-padded-" in path.name, read_record(path).config.batching) for path in loops) == [
        *[(False, "packed")] * 3,
        *[(True, "padded")] * 3,
    ]


def _start(who: EntrantRuns, block: int, cpu_seconds: Sequence[float], instructions: Sequence[int | None]) -> Run:
    """A start of an adapter or of its loop, with what each turn took; the first turn was the warm-up."""
    turns = [
        TurnFacts(
            round=number,
            position=0,
            first_step=1 + 3 * number,
            num_steps=2,
            step_seconds=[0.1, 0.1],
            cpu_seconds=seconds,
            instructions=counted,
            foreign_share=0.0,
        )
        for number, (seconds, counted) in enumerate(zip(cpu_seconds, instructions, strict=True))
    ]
    facts = RaceFacts(
        race="made up",
        purpose="timed",
        entrant=who.name,
        role=who.role,
        block=block,
        position=0,
        busy_share=0.0,
        gpu_processes=0,
        foreign_share=0.0,
        matmul_flops_per_second=None,
        turns=turns,
    )
    record = RunRecord.model_construct(ranks=[RankRecord.model_construct(samples=[4] * 12) for _ in range(2)])
    return Run(f"{who.name}-{block}.json", record, facts)


def _entrants(roles: Mapping[str, Role]) -> list[EntrantRuns]:
    """Entrants of ddp without runs; a loop reads back none of the settings that are in force."""
    return [
        EntrantRuns(name, json.dumps({"name": name, "in force": {} if role == "bare" else {"a": 1}}), "ddp", role)
        for name, role in roles.items()
    ]


def _cost(ratios: Sequence[float], last_count: int | None = 1000) -> AdapterCost:
    """What an adapter costs that takes so many times the CPU seconds and instructions of its loop in each start."""
    adapter, loop = _entrants(TWINS)
    for block, ratio in enumerate(ratios):
        counts = (1, round(1000 * ratio), round(1000 * ratio))
        adapter.timed.append(_start(adapter, block, (1.0, 1.0, 4.0 * ratio - 1.0), counts))
        loop.timed.append(_start(loop, block, (9.0, 1.0, 3.0), (1, 1000, last_count)))
    (cost,) = adapter_costs_of(["here"], [[adapter, loop]])
    return cost


def test_each_variant_is_compared_with_its_own_loop() -> None:
    """And one without a loop with none."""
    variants: dict[str, Role] = {"ddp (padded)": "backend", "ddp (slim)": "backend", "ddp (padded) (by hand)": "bare"}
    entrants = _entrants(TWINS | variants)
    seconds = {"ddp": 1.1, "ddp (padded)": 2.4, "ddp (slim)": 1.0, "ddp (by hand)": 1.0, "ddp (padded) (by hand)": 2.0}
    for who in entrants:
        who.timed += [_start(who, block, (9.0, seconds[who.name]), (None, None)) for block in range(3)]
    costs = adapter_costs_of(["here"], [entrants])
    found = {cost.name: cost.cpu_seconds for cost in costs}
    assert found == pytest.approx({"ddp": 0.1, "ddp (padded)": 0.2})
    # Two ranks with four samples in each step of a tenth of a second.
    rates = [one for cost in costs for one in (cost.samples_per_second, cost.bare_samples_per_second)]
    assert [one and one.estimate for one in rates] == pytest.approx([80.0] * 4)


def test_cpu_seconds_and_instructions_have_an_interval_over_starts() -> None:
    ratios = (1.01, 1.02, 1.06)
    cost = _cost(ratios)
    assert cost.num_starts == 3
    logs = np.log(ratios)
    mean, (low, high) = logs.mean(), stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    for share, interval in (
        (cost.cpu_seconds, cost.cpu_seconds_interval),
        (cost.instructions, cost.instructions_interval),
    ):
        assert share == pytest.approx(0.03)
        assert interval is not None
        assert [interval.estimate, interval.low, interval.high] == pytest.approx(np.expm1([mean, low, high]).tolist())


def test_too_few_starts_have_no_interval() -> None:
    cost = _cost((1.02, 1.04))
    assert cost.cpu_seconds == pytest.approx(0.03)
    assert cost.cpu_seconds_interval is None
    assert cost.instructions_interval is None


def test_where_some_instructions_were_not_counted_there_is_nothing_to_compare() -> None:
    cost = _cost((1.01, 1.02, 1.06), last_count=None)
    assert (cost.instructions, cost.instructions_interval) == (None, None)
    assert cost.cpu_seconds_interval is not None


def test_a_report_shows_intervals_where_there_are_some() -> None:
    time = Interval(estimate=0.01, low=0.002, high=0.019)
    older = AdapterCost(group="here", name="ddp", num_starts=6, time=time, cpu_seconds=0.004, instructions=None)
    newer = older.model_copy(update={"cpu_seconds_interval": Interval(estimate=0.005, low=-0.001, high=0.011)})
    said = "ddp, here, beside a loop written by hand: time +1.0 % [+0.2, +1.9] and CPU seconds"
    assert adapter_cost_lines([older, newer]) == [f"{said} +0.4 %", f"{said} +0.5 % [-0.1, +1.1]"]
    _, table = adapter_cost_blocks([older, newer])
    assert isinstance(table, Table)
    assert [row.cells[3].text for row in table.rows] == ["+0.4", "+0.5 (-0.1 to +1.1)"]
