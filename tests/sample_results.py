"""A made-up result of every kind that a report can meet, hostile names included. No number here was measured."""

from __future__ import annotations

import random

from compare.machine_facts import Idleness, Place
from compare.report.verdict import describe_verdict
from compare.results import (
    CollectiveFit,
    CollectivePoint,
    CollectiveSeries,
    Comparison,
    Curve,
    Entrant,
    Group,
    GroupResult,
    Interval,
    Results,
    Scaling,
    ScalingPoint,
    SeedRow,
)
from compare.steps import Breakdown, Wire
from parity.verdict import Parity
from tests.sample_peers import sample_peers
from tests.sample_standings import HOSTILE, ONE_RANK, TWO_RANKS, sample_standings

HOSTILE_TEXTS = [
    '"><img src="https://example.org/x" onerror="window.executed = true">',
    "</script><script>window.executed = true</script><!--",
    "<a href='javascript:window.executed=true'>link</a> <b>bold</b> {{ 7 * 7 }} %{x}",
]

_SETTINGS = {"threads": "1", "dtype of attention output": "torch.float32", "gradient clipping": "1.0"}
_PARITY = {
    "single": Parity(verdict="reference", detail="one process, no communication", first_step=None, parameter=None),
    "ddp": Parity(
        verdict="bitwise", detail="the bits of the reference in all 20 steps", first_step=None, parameter=None
    ),
    "horovod": Parity(
        verdict="rounding",
        detail="largest relative difference 3.1e-7 in 20 steps",
        first_step=2,
        parameter="encoder.layer.0.attention.self.query.weight",
    ),
    "accelerate": Parity(
        verdict="not comparable",
        detail="left the reference in step 4 by 2.3e-2: gradients are half as large",
        first_step=4,
        parameter="classifier.weight",
    ),
    "ddp #2": Parity(verdict="bitwise", detail="the bits of the reference in all 20 steps"),
    HOSTILE: Parity(verdict="rounding", detail="largest relative difference 4e-7", first_step=3, parameter="a<b>c"),
}


def sample_results(steps_a_run: int = 120, losses: int = 600) -> Results:
    """Builds the same result each time; `steps_a_run` and `losses` make it as large as wanted."""
    dice = random.Random(7)
    results = Results(
        title="Sample data for tests: four backends on two cores",
        created_at="2026-01-02T03:04:05Z",
        verdict=[],
        groups=[_one_rank(dice, steps_a_run), _two_ranks(dice, steps_a_run)],
        standings=sample_standings(),
        peers=[sample_peers(TWO_RANKS, HOSTILE)],
        curves=[
            _curve(dice, "ddp", 0.051, losses, top=0.924, reached=15.3),
            _curve(dice, "horovod", 0.066, losses, top=0.924, reached=19.8),
            _curve(dice, "accelerate", 0.053, losses, top=0.84, reached=None),
        ],
        seed_table=[
            SeedRow(
                hardware="2 x Sample CPU",
                backend=backend,
                train_seconds=seconds,
                f1=0.9309,
                roc_auc=0.9802,
                accuracy=accuracy,
                batch_size="32 = 2 x 8 x 2",
            )
            for backend, seconds, accuracy in [("ddp", 30.6, 0.924), ("horovod", 39.6, 0.9241), (HOSTILE, 101.0, None)]
        ],
        scaling=[
            _scaling("ddp", "strong", [618, 1090, 1800]),
            _scaling("horovod", "strong", [600, 980, 1500]),
            _scaling("ddp", "weak", [618, 1190, 2300]),
        ],
        collectives=[
            _collective("ddp", "gloo", 25e-6, 2.2e9),
            _collective("horovod", "gloo", 400e-6, 1.6e9),
            _collective("horovod", "<b>mpi</b>", 90e-6, 1.9e9),
        ],
        places=[
            Place(
                machine="2 x Sample CPU",
                software="Python 3.11.7; torch 2.13.0; commit 0123456789ab",
                num_runs=40,
                idleness="at most 0.3 of a core was busy before each run",
            )
        ],
        idleness=Idleness(mean=0.004, largest=0.031),
        problems=["runs/sample-7: not a record (no such field: steps)", *HOSTILE_TEXTS],
        commands={
            "races": "lockstep race --backends single,ddp,horovod,accelerate --repeats 8 --output-dir runs/race",
            "this page": "lockstep report runs/race",
            HOSTILE_TEXTS[1]: "echo '</script>' && true",
        },
        facts={"blocks": 8, "warm_up": "20 steps", "confidence": 0.95, "order_seed": 7, "pinned": True},
    )
    return results.model_copy(update={"verdict": describe_verdict(results)})


def disturbed_results() -> Results:
    """The same, from a race beside other programs that started each entrant only twice."""
    results = sample_results()
    first = results.standings[0]
    first.num_starts = 2
    for entrant in (one for group in results.groups for one in group.entrants):
        entrant.num_runs = min(entrant.num_runs, first.num_starts)
    for placing in [*first.placings[1:], *first.limits]:
        placing.longer, placing.claim, placing.detectable = None, "too few", None
    return results.model_copy(
        update={"idleness": Idleness(mean=0.43, largest=0.81), "verdict": describe_verdict(results)}
    )


def empty_results() -> Results:
    """A result of nothing but words."""
    return Results(
        title="Sample data for tests: nothing measured",
        created_at="2026-01-02T03:04:05Z",
        verdict=["No run could be used."],
        groups=[],
        curves=[],
        seed_table=[],
        scaling=[],
        collectives=[],
        places=[],
        problems=[],
        commands={},
        facts={},
    )


def _one_rank(dice: random.Random, steps: int) -> GroupResult:
    return GroupResult(
        group=_group(1, "fp32", 32, 1, ONE_RANK),
        entrants=[
            _entrant(dice, "single", 82e-3, steps),
            _entrant(dice, "ddp", 83e-3, steps),
            _entrant(dice, "horovod", 88e-3, steps),
        ],
        comparisons=[
            _comparison("single", "ddp", 0.02, 0.03, "none"),
            _comparison("single", "horovod", 0.078, 0.02, "slower"),
        ],
        differing_settings=[],
    )


def _two_ranks(dice: random.Random, steps: int) -> GroupResult:
    ddp = _entrant(dice, "ddp", 51.0e-3, steps, communication=11e-3)
    horovod = _entrant(dice, "horovod", 65.5e-3, steps, communication=24e-3)
    accelerate = _entrant(dice, "accelerate", 48.2e-3, steps, communication=9e-3).model_copy(update={"ranked": False})
    hostile = _entrant(dice, HOSTILE, 168e-3, steps, communication=120e-3)
    tuned = _entrant(dice, "ddp #2", 51.2e-3, steps, communication=11e-3)
    ddp.settings |= {"bucket size": "25 MiB", "asked_bucket_cap_mb": 25, "imbalance": 1.02, "allocator": None}
    horovod.settings["fusion threshold"] = "128 MiB"
    horovod.settings["threads"] = "2"
    failed = Entrant(
        name="apex",
        backend="apex",
        num_runs=0,
        failures=["rank 1 ended with exit code 3: no CUDA device", HOSTILE_TEXTS[0]],
        parity=Parity(verdict="unknown", detail="no run of it came to an end", first_step=None, parameter=None),
        ranked=False,
        samples_per_second=None,
        tokens_per_second=None,
        samples_per_second_of_runs=[],
        step_seconds=[],
        median_step_seconds=None,
        p95_step_seconds=None,
        seconds_to_first_step=[],
        peak_memory_bytes=None,
        peak_cuda_memory_bytes=None,
        mfu=None,
        settings={},
    )
    return GroupResult(
        group=_group(2, "bf16", 8, 2, TWO_RANKS),
        entrants=[ddp, horovod, accelerate, hostile, failed, tuned],
        comparisons=[
            _comparison("ddp", "horovod", 0.22, 0.04, "slower"),
            _comparison("ddp", "ddp #2", 0.004, 0.009, "none"),
            _comparison("ddp", HOSTILE, 2.3, 0.2, "slower"),
            Comparison(
                first="horovod",
                second=HOSTILE,
                num_pairs=2,
                slowdown=None,
                claim="too few",
                text=f"horovod and {HOSTILE} were run side by side only twice: nothing is claimed.",
                detectable=None,
                more_repeats=6,
            ),
        ],
        differing_settings=["threads", "bucket size", "fusion threshold"],
    )


def _group(ranks: int, precision: str, micro: int, accumulation: int, key: str) -> Group:
    return Group(
        task="text-classification: bert-mini on the embedded data, adamw at 0.0005",
        device="cpu",
        num_processes=ranks,
        precision=precision,
        global_batch_size=32,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        seed=42,
        key=key,
    )


def _entrant(dice: random.Random, backend: str, step: float, steps: int, communication: float = 0.0) -> Entrant:
    runs = [[step * dice.lognormvariate(0, 0.06) for _ in range(steps)] for _ in range(8)]
    pooled = sorted(seconds for run in runs for seconds in run)
    rates = [32 * len(run) / sum(run) * dice.uniform(0.98, 1.02) for run in runs]
    rate = sum(rates) / len(rates)
    return Entrant(
        name=backend,
        backend=backend,
        num_runs=8,
        failures=[],
        parity=_PARITY[backend],
        ranked=True,
        samples_per_second=Interval(estimate=rate, low=0.985 * rate, high=1.013 * rate),
        tokens_per_second=Interval(estimate=64 * rate, low=63 * rate, high=65 * rate),
        samples_per_second_of_runs=rates,
        step_seconds=runs,
        median_step_seconds=pooled[len(pooled) // 2],
        p95_step_seconds=pooled[int(0.95 * len(pooled))],
        seconds_to_first_step=[3.4, 3.6, 3.5],
        peak_memory_bytes=612 * 2**20,
        peak_cuda_memory_bytes=None,
        mfu=None,
        settings=dict(_SETTINGS),
        breakdown=Breakdown(
            data=0.01 * step,
            forward=(step - communication) * 0.33,
            backward=(step - communication) * 0.56,
            communication=communication,
            optimizer=(step - communication) * 0.08,
            building=0.02 * step,
            unresolved={} if communication else {"communication": 0.01 * step},
            overhead=0.03,
        ),
        wire=Wire(
            interface="lo",
            bytes_per_step=17.9e6,
            gradient_bytes=17_500_000,
            ring_bound=17.5e6,
            reductions_per_step=2.0,
        )
        if communication
        else None,
    )


def _comparison(first: str, second: str, slowdown: float, half: float, claim: str) -> Comparison:
    words = f"takes {100 * slowdown:.0f} % longer" if claim == "slower" else "shows no difference in time"
    between = f"{100 * (slowdown - half):.0f} % to {100 * (slowdown + half):.0f} %"
    return Comparison(
        first=first,
        second=second,
        num_pairs=8,
        slowdown=Interval(estimate=slowdown, low=slowdown - half, high=slowdown + half),
        claim=claim,
        text=f"{second} {words} against {first} ({between}, 8 pairs).",
        detectable=0.04,
        more_repeats=None if claim == "slower" else 5,
    )


def _curve(dice: random.Random, backend: str, step: float, length: int, top: float, reached: float | None) -> Curve:
    noise = random.Random(top)
    losses: list[float | None] = [0.7 * 0.995**i + 0.05 + noise.uniform(0, 0.12) for i in range(length)]
    if reached is None:
        losses[length // 2] = None
    seconds = [step * (i + 1) * dice.uniform(0.9999, 1.0001) for i in range(length)]
    evaluated = list(range(length // 6, length + 1, length // 6))
    accuracy = [0.5 + (top - 0.5) * (1 - 0.98 ** (i / length * 200)) for i in evaluated]
    return Curve(
        group=TWO_RANKS,
        backend=backend,
        steps=list(range(1, length + 1)),
        losses=losses,
        seconds=seconds,
        evaluation_steps=evaluated,
        evaluation_seconds=[seconds[i - 1] for i in evaluated],
        metrics={"f1": [value + 0.006 for value in accuracy], "accuracy": list(accuracy)},
        target=0.85,
        seconds_to_target=reached,
        total_seconds=seconds[-1] + 9.0,
    )


def _scaling(backend: str, kind: str, rates: list[float]) -> Scaling:
    return Scaling(
        backend=backend,
        kind=kind,
        condition="bf16, 32 samples in a step" if kind == "strong" else "bf16, 8 samples a rank",
        points=[
            ScalingPoint(
                num_processes=2**i,
                samples_per_second=Interval(estimate=rate, low=0.96 * rate, high=1.03 * rate),
                efficiency=rate / (rates[0] * 2**i),
            )
            for i, rate in enumerate(rates)
        ],
    )


def _collective(backend: str, transport: str, latency: float, bandwidth: float) -> CollectiveSeries:
    points = []
    for power in range(10, 28, 2):
        seconds = latency + 2**power / bandwidth
        points.append(
            CollectivePoint(
                bytes=2**power,
                seconds=[seconds * factor for factor in (0.97, 1.0, 1.08)],
                median_seconds=seconds,
                algbw=2**power / seconds,
                busbw=2**power / seconds,
            )
        )
    return CollectiveSeries(
        backend=backend,
        transport=transport,
        operation="all_reduce",
        num_processes=2,
        device="cpu",
        points=points,
        fit=CollectiveFit(
            latency_seconds=Interval(estimate=latency, low=0.9 * latency, high=1.1 * latency),
            bytes_per_second=Interval(estimate=bandwidth, low=0.95 * bandwidth, high=1.05 * bandwidth),
        ),
    )
