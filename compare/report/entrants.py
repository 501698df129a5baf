"""What the runs of one entrant say of it: its speed, its memory, its settings, and where its time goes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median
from typing import Literal

import numpy as np

from compare.report.breakdown import measure_breakdown
from compare.report.flops import model_flops_per_second, peak_flops_per_second
from compare.report.grouping import EntrantRuns
from compare.report.runs import Run, per_second, spent
from compare.report.statistics import mean_interval
from compare.report.traffic import excess_of, wire_of
from compare.results import ASKED, RANKED, Entrant, Setting
from compare.steps import Breakdown, HeldMemory
from parity.verdict import SAME, Parity
from records.balance import imbalance, positions_per_token
from records.record import RunRecord
from records.throughput import NUM_WARMUP_STEPS, slowest_rank


def measure_entrant(runs: EntrantRuns, parity: Parity, shares_of_long_steps: list[float]) -> Entrant:
    """Derives everything that a report shows of one entrant from its runs."""
    timed = [run.record for run in runs.timed]
    measured = [run for run in runs.timed if run.timed_steps]
    records = [run.record for run in measured]
    rates = [per_second(run, "samples") for run in measured]
    tokens = [per_second(run, "tokens") for run in measured if any(rank.tokens for rank in run.record.ranks)]
    steps = [slowest_rank(record).step_seconds[NUM_WARMUP_STEPS:] for record in records]
    pooled = [second for run in steps for second in run]
    cuda = [rank.peak_cuda_memory_bytes for record in timed for rank in record.ranks if rank.peak_cuda_memory_bytes]
    middle = median(pooled) if pooled else None
    diagnosis = runs.diagnosis.record if runs.diagnosis else None
    return Entrant(
        name=runs.name,
        backend=runs.backend,
        role=runs.role,
        own_settings=runs.own_settings,
        num_runs=len(timed),
        failures=runs.failures,
        parity=parity,
        ranked=runs.role in RANKED and bool(measured) and parity.verdict in SAME,
        samples_per_second=mean_interval(rates) if rates else None,
        tokens_per_second=mean_interval(tokens) if tokens else None,
        samples_per_second_of_runs=rates,
        # To a tenth of a microsecond: more digits would double the size of the file.
        step_seconds=[[round(second, 7) for second in run] for run in steps],
        median_step_seconds=middle,
        p95_step_seconds=float(np.percentile(pooled, 95)) if pooled else None,
        mean_step_cpu_seconds=_of_a_step(measured, "cpu_seconds"),
        mean_step_instructions=_of_a_step(measured, "instructions"),
        seconds_to_first_step=_seconds_to_first_step(runs),
        peak_memory_bytes=max((rank.peak_memory_bytes for record in timed for rank in record.ranks), default=None),
        peak_cuda_memory_bytes=max(cuda, default=None),
        mfu=_mfu(measured),
        settings=_settings(timed[0], diagnosis) if timed else {},
        breakdown=_breakdown(diagnosis, measured, middle) if diagnosis else None,
        wire=wire_of(diagnosis) if diagnosis else None,
        excess=excess_of(diagnosis) if diagnosis else None,
        shares_of_long_steps=[round(share, 4) for share in shares_of_long_steps],
        memory=_held_memory(sample) if (sample := diagnosis or next(iter(timed), None)) else None,
    )


def _breakdown(diagnosis: RunRecord, timed: Sequence[Run], step_seconds: float | None) -> Breakdown | None:
    """Divides the step of timed runs, unless their model is compiled: such a model is not diagnosed."""
    alike = all(run.record.config.torch_compile == diagnosis.config.torch_compile for run in timed)
    return measure_breakdown(diagnosis, _timed_steps(timed if alike else []), step_seconds if alike else None)


def _seconds_to_first_step(runs: EntrantRuns) -> list[float]:
    """Returns how long starting took where nothing else was started: entrants that take turns start all at once."""
    alone = [runs.diagnosis, runs.whole, *(run for run in runs.timed if run.race is None or not run.race.turns)]
    return [run.record.seconds_to_first_step for run in alone if run and run.record.seconds_to_first_step]


def _of_a_step(runs: Sequence[Run], what: Literal["cpu_seconds", "instructions"]) -> float | None:
    """Returns what a step costs on the second clock, over all ranks; None where a part of it was not counted."""
    cost = spent(runs, what)
    return None if cost is None else cost / sum(span.number for run in runs for span in run.timed_steps)


def _timed_steps(runs: Sequence[Run]) -> dict[int, float]:
    """Returns the seconds of each step that was timed, by its number, from 1: the median over the runs."""
    seconds: dict[int, list[float]] = {}
    for run in runs:
        if run.race is None or not run.race.turns:
            of_ranks = zip(*(rank.step_seconds for rank in run.record.ranks), strict=True)
            for step, of_step in enumerate(of_ranks, start=1):
                if step > NUM_WARMUP_STEPS:
                    seconds.setdefault(step, []).append(max(of_step))
            continue
        for span in run.timed_steps:
            # Several steps that were timed in one value have equal shares of it.
            each = span.seconds if len(span.seconds) == span.number else [sum(span.seconds) / span.number] * span.number
            for step, value in enumerate(each, start=span.first):
                seconds.setdefault(step, []).append(value)
    return {step: median(values) for step, values in seconds.items()}


def _mfu(runs: Sequence[Run]) -> float | None:
    """Divides by the peak in the device's data sheet or, without one, by what square products reached on it."""
    shares = []
    for run in runs:
        config, gpus = run.record.config, run.record.environment.gpus
        peak = run.race.matmul_flops_per_second if run.race else None
        if config.device == "cuda" and gpus:
            sheet = peak_flops_per_second(gpus[0], config.precision)
            num_devices = len({(rank.hostname, rank.device) for rank in run.record.ranks})
            num_devices *= int(run.record.ranks[0].effective_settings.get("num_devices", 1))  # several in one process
            peak = sheet * num_devices if sheet else None
        reached = model_flops_per_second(run.record)
        if peak and reached:
            shares.append(reached / peak)
    return sum(shares) / len(shares) if shares else None


def _settings(record: RunRecord, diagnosis: RunRecord | None) -> dict[str, Setting]:
    """Returns the settings in force, read back from the processes."""
    rank, config = record.ranks[0], record.config
    computed, uneven = positions_per_token(record.ranks), imbalance(record.ranks)
    threads = sorted({one.num_threads for one in record.ranks})
    settings = {
        "start_method": config.start_method,
        "threads_per_rank": threads[0] if len(threads) == 1 else " ".join(map(str, threads)),
        **{f"{ASKED}{name}": value for name, value in config.backend_settings.items() if value is not None},
        **rank.effective_settings,
        "batching": config.batching,
        "imbalance": None if uneven is None else round(uneven, 2),
        "allocator": " ".join(sorted({one.allocator for one in record.ranks if one.allocator}))
        or record.environment.allocator,
        "scheduling": rank.scheduling or "normal",
        "schedule_steps": rank.schedule_steps,
    }
    if computed is not None:
        settings["positions_per_token"] = round(computed, 2)
    if diagnosis:
        seen = diagnosis.ranks[0].diagnosis
        assert seen is not None
        settings["inner_dtype"] = seen.inner_dtype
        settings["reductions_per_step"] = seen.num_reductions[-1]
        settings["reduced_elements_per_step"] = sum(seen.reductions[-1].values())
        if seen.reduced_bytes:
            settings["reduced_bytes_per_step"] = sum(seen.reduced_bytes[-1].values())
    settings |= {"python": record.environment.python, **record.environment.packages}
    settings["commit"] = (record.environment.git_commit or "unknown")[:12]
    return {name: value if isinstance(value, Setting) else json.dumps(value) for name, value in settings.items()}


def _held_memory(run: RunRecord) -> HeldMemory | None:
    """Returns what the tensors of a rank hold, each part on the rank that holds most of it."""
    seen = [rank.memory for rank in run.ranks if rank.memory is not None]
    if not seen:
        return None
    activations = [one.activation_bytes for one in seen if one.activation_bytes is not None]
    return HeldMemory(
        parameters=max(one.parameter_bytes for one in seen),
        gradients=max(one.gradient_bytes or 0 for one in seen),
        optimizer=max(one.optimizer_bytes for one in seen),
        activations=max(activations, default=None),
        buffers=max(one.buffer_bytes for one in seen),
    )
