"""From run records to results: what grouped runs say, measured, compared and judged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from itertools import combinations
from statistics import median
from typing import Any, Literal

import numpy as np

from compare.report.flops import model_flops_per_second, peak_flops_per_second
from compare.report.grouping import (
    EntrantRuns,
    condition,
    group_runs,
    is_usable,
    purpose,
    unsplit,
    version,
    why_unusable,
)
from compare.report.parity import diagnosed_parity, losses_parity
from compare.report.results import (
    Breakdown,
    CollectiveSeries,
    Comparison,
    Curve,
    Entrant,
    Group,
    GroupResult,
    Interval,
    Parity,
    Place,
    Results,
    Scaling,
    ScalingPoint,
    SeedRow,
    Wire,
)
from compare.report.statistics import CONFIDENCE, SMALLEST_CLAIM, compare_pairs, mean_interval
from compare.report.words import describe_batch, describe_task, describe_verdict, machine_of, ranks, software_of
from records.record import RankRecord, RunRecord
from records.throughput import NUM_WARMUP_STEPS, samples_per_second, slowest_rank, training_seconds

DEFAULT_TARGET = 0.9
_WATCHED = ("whole", "data", "forward", "backward", "optimizer")
_IN_LOCKSTEP = ("reference", "bitwise", "rounding")


class NothingToReport(ValueError):
    """No run that could be reported."""


def analyse(
    records: Sequence[tuple[str, RunRecord]],
    *,
    title: str,
    collectives: Sequence[CollectiveSeries] = (),
    problems: Sequence[str] = (),
    commands: dict[str, str] | None = None,
    facts: dict[str, Any] | None = None,
    target: float = DEFAULT_TARGET,
) -> Results:
    """Compares runs.

    Args:
        records: Each with a name for messages.
        title: Of the report.
        collectives: What a benchmark of collectives measured.
        problems: What could not be read or run, one line each.
        commands: What reproduces the parts of the report.
        facts: How the race was run.
        target: The accuracy whose time is reported.

    Raises:
        NothingToReport: Not one timed run completed.
    """
    grouped = sorted(group_runs(records), key=_order)
    if not grouped:
        raise NothingToReport("not one timed run completed, so there is nothing to report")
    completed = [record for _, record in records if is_usable(record)]
    keys = _keys(grouped)
    groups = [_group_result(key, runs, completed) for key, runs in zip(keys, grouped, strict=True)]
    failures = [
        f"{record.config['backend']} {'is left out' if record.status == 'completed' else 'failed'}: "
        f"{why_unusable(record)} ({name})"
        for name, record in records
        if not is_usable(record)
    ]
    found = [*problems, *failures, *_mixtures(completed)]
    return Results(
        title=title,
        created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        verdict=describe_verdict(groups, len(found)),
        groups=groups,
        curves=_curves(keys, grouped, target),
        seed_table=_seed_table(groups, grouped),
        scaling=_scaling(groups, grouped),
        collectives=list(collectives),
        places=_places(completed),
        problems=found,
        commands=commands or {},
        facts={
            **(facts or {}),
            "warm-up steps left out of every run": NUM_WARMUP_STEPS,
            "confidence of all intervals of differences of one group together": CONFIDENCE,
            "differences never claimed, up to": SMALLEST_CLAIM,
        },
    )


def _order(runs: list[EntrantRuns]) -> tuple[Any, ...]:
    sample = _sample(runs)
    config = sample.config
    return (-config["num_processes"], config["precision"] != "fp32", sample.gradient_accumulation_steps,
            config["global_batch_size"], config["precision"], float(config["started_at"]))  # fmt: skip


def _sample(runs: list[EntrantRuns]) -> RunRecord:
    """A run to read the group's conditions from."""
    return next(entrant.timed[0] for entrant in runs if entrant.timed)


def _keys(grouped: Sequence[list[EntrantRuns]]) -> list[str]:
    """Names groups; where two would have one name, by what else differs."""
    samples = [_sample(runs) for runs in grouped]
    keys = [_key(sample) for sample in samples]
    for key in {key for key in keys if keys.count(key) > 1}:
        places = [index for index, other in enumerate(keys) if other == key]
        conditions = [condition(samples[index]) for index in places]
        names = [name for name in conditions[0] if len({repr(one.get(name)) for one in conditions}) > 1]
        for index, one in zip(places, conditions, strict=True):
            keys[index] = f"{key}; " + ", ".join(
                f"{name.replace('_', ' ')} {str(one.get(name))[:60]}" for name in names
            )
    return keys


def _key(sample: RunRecord) -> str:
    config = sample.config
    batch = describe_batch(config, sample.gradient_accumulation_steps)
    device = "" if config["device"] == "cpu" else f" on {config['device']}"
    return f"{ranks(config['num_processes'])}{device}, {config['precision']}, batch {batch}"


def _group_result(key: str, runs: list[EntrantRuns], completed: Sequence[RunRecord]) -> GroupResult:
    entrants = [_entrant(entrant, _parity(entrant, runs, completed)) for entrant in runs]
    sample = _sample(runs)
    config = sample.config
    group = Group(
        task=describe_task(sample),
        device=config["device"],
        num_processes=config["num_processes"],
        precision=config["precision"],
        global_batch_size=config["global_batch_size"],
        micro_batch_size=config["micro_batch_size"],
        gradient_accumulation_steps=sample.gradient_accumulation_steps,
        seed=config["seed"],
        key=key,
    )
    ranked = [runs[index] for index, entrant in enumerate(entrants) if entrant.ranked]
    pairs = list(combinations(ranked, 2))
    comparisons = [_comparison(first, second, num_comparisons=len(pairs)) for first, second in pairs]
    names = {name: None for entrant in entrants for name in entrant.settings}
    measured = [entrant for entrant in entrants if entrant.num_runs]
    differing = [name for name in names if len({entrant.settings.get(name) for entrant in measured}) > 1]
    return GroupResult(group=group, entrants=entrants, comparisons=comparisons, differing_settings=differing)


def _parity(entrant: EntrantRuns, group: list[EntrantRuns], completed: Sequence[RunRecord]) -> Parity:
    if not entrant.timed:
        return Parity(verdict="unknown", detail="no run of it completed")
    own = entrant.diagnosis or entrant.timed[0]
    singles = [
        record
        for record in completed
        if record.config["backend"] == "single" and purpose(record) == purpose(own) and unsplit(record) == unsplit(own)
    ]
    singles.sort(key=lambda record: record.gradient_accumulation_steps)
    reference = singles[0] if singles else None
    if reference is None and purpose(own) == "timed":  # then the first of the group is what the others are held to
        reference = _sample(group)
    if reference is None:
        return Parity(verdict="unknown", detail="no diagnosis run of the reference completed")
    # Best with the same micro-batches, whose sizes decide how much is rounded where.
    others = [one for one in singles if one.config["micro_batch_size"] != reference.config["micro_batch_size"]]
    others.sort(key=lambda one: one.config["micro_batch_size"] != own.config["micro_batch_size"])
    yardstick = next(iter(others), None)
    if own is reference:
        parity = Parity(verdict="reference", detail="what the others are held to")
    elif own.ranks[0].diagnosis and reference.ranks[0].diagnosis:
        parity = diagnosed_parity(own, reference, yardstick)
    else:
        parity = losses_parity(own, reference)
    ends = {record.ranks[0].weights_sha256 for record in entrant.timed}
    repeated = f"; its {len(entrant.timed)} timed runs ended with {len(ends)} different sets of weights"
    extra = repeated if len(ends) > 1 else _same_bits(entrant, group)
    return parity.model_copy(update={"detail": parity.detail + extra})


def _same_bits(entrant: EntrantRuns, group: list[EntrantRuns]) -> str:
    end = entrant.timed[0].ranks[0].weights_sha256
    others = [
        other.name
        for other in group
        if other is not entrant and any(record.ranks[0].weights_sha256 == end for record in other.timed)
    ]
    return f"; timed runs end with the same bits as {', '.join(others)}" if others else ""


def _entrant(runs: EntrantRuns, parity: Parity) -> Entrant:
    timed = runs.timed
    measured = [record for record in timed if training_seconds(record) > 0]
    rates = [rate for record in measured if (rate := samples_per_second(record))]
    tokens = [_tokens(record) / training_seconds(record) for record in measured]
    steps = [slowest_rank(record).step_seconds[NUM_WARMUP_STEPS:] for record in measured]
    pooled = [second for run in steps for second in run]
    cuda = [rank.peak_cuda_memory_bytes for record in timed for rank in record.ranks if rank.peak_cuda_memory_bytes]
    middle = median(pooled) if pooled else None
    return Entrant(
        backend=runs.name,
        num_runs=len(timed),
        failures=runs.failures,
        parity=parity,
        ranked=bool(measured) and parity.verdict in _IN_LOCKSTEP,
        samples_per_second=mean_interval(rates) if rates else None,
        tokens_per_second=mean_interval(tokens) if tokens else None,
        samples_per_second_of_runs=rates,
        step_seconds=steps,
        median_step_seconds=middle,
        p95_step_seconds=float(np.percentile(pooled, 95)) if pooled else None,
        seconds_to_first_step=[record.seconds_to_first_step for record in timed if record.seconds_to_first_step],
        peak_memory_bytes=max((rank.peak_memory_bytes for record in timed for rank in record.ranks), default=None),
        peak_cuda_memory_bytes=max(cuda, default=None),
        mfu=_mfu(measured),
        settings=_settings(timed[0], runs.diagnosis) if timed else {},
        breakdown=_breakdown(runs.diagnosis, middle) if runs.diagnosis else None,
        wire=_wire(runs.diagnosis) if runs.diagnosis else None,
    )


def _tokens(record: RunRecord) -> int:
    return sum(sum(rank.tokens[NUM_WARMUP_STEPS:]) for rank in record.ranks)


def _mfu(records: Sequence[RunRecord]) -> float | None:
    """By the device's data sheet, or else by what square products reached on the same machine."""
    shares = []
    for record in records:
        config, gpus = record.config, record.environment.gpus
        peak = (config.get("race") or {}).get("matmul_flops_per_second")
        if config["device"] == "cuda" and gpus:
            sheet = peak_flops_per_second(gpus[0], config["precision"])
            peak = sheet * len({(rank.hostname, rank.device) for rank in record.ranks}) if sheet else None
        reached = model_flops_per_second(record)
        if peak and reached:
            shares.append(reached / peak)
    return sum(shares) / len(shares) if shares else None


def _settings(record: RunRecord, diagnosis: RunRecord | None) -> dict[str, str]:
    """What was in force, read back from the processes."""
    rank, config = record.ranks[0], record.config
    real, computed = (sum(sum(getattr(one, name)) for one in record.ranks) for name in ("tokens", "positions"))
    settings = {
        "started by": config["start_method"],
        "threads per rank": " ".join(sorted({str(one.num_threads) for one in record.ranks})),
        **{f"asked: {name}": value for name, value in config["backend_settings"].items()},
        **rank.effective_settings,
        "tokens of a run, real / padded": f"{real} / {computed}",
        "schedule steps of a run": rank.schedule_steps,
    }
    if diagnosis:
        seen = diagnosis.ranks[0].diagnosis
        assert seen is not None
        settings["dtype of an inner layer"] = seen.inner_dtype
        settings["calls into the communication library per step"] = seen.num_reductions[-1]
        settings["elements communicated per step"] = sum(seen.reductions[-1].values())
    settings |= {"Python": record.environment.python, **record.environment.packages}
    settings["commit"] = (record.environment.git_commit or "unknown")[:12]
    return {name: str(value) for name, value in settings.items()}


def _breakdown(run: RunRecord, timed_median: float | None) -> Breakdown | None:
    """Medians over steps and ranks: one rank's steps alone are few, and disturbed by what the others do."""
    if len(run.steps) <= NUM_WARMUP_STEPS:
        return None
    parts = {name: [second for rank in run.ranks for second in _watched(rank, name)] for name in _WATCHED}
    alone = [parts[name] for name in ("data", "forward", "backward", "optimizer")]
    beyond = [whole - sum(rest) for whole, *rest in zip(parts["whole"], *alone, strict=True)]
    return Breakdown(
        data=median(parts["data"]),
        forward=median(parts["forward"]),
        backward=median(parts["backward"]),
        communication=median(beyond),
        optimizer=median(parts["optimizer"]),
        overhead=median(parts["whole"]) / timed_median - 1 if timed_median else None,
    )


def _watched(rank: RankRecord, name: str) -> list[float]:
    seen = rank.diagnosis
    assert seen is not None
    seconds = {"whole": seen.whole_seconds, "data": seen.data_seconds, **seen.alone_seconds}[name]
    return seconds[max(NUM_WARMUP_STEPS, len(seen.num_reductions)) :]


def _wire(run: RunRecord) -> Wire | None:
    """From the interface's counters; only gloo's traffic all goes through an interface that is known."""
    num_ranks = len(run.ranks)
    machines = [rank.diagnosis for rank in run.ranks if rank.diagnosis and rank.diagnosis.sent_bytes]
    if num_ranks == 1 or not machines or run.ranks[0].effective_settings.get("transport") != "gloo":
        return None
    first = machines[0]
    warmup = len(first.num_reductions)  # steps that were counted otherwise, and slowly
    num_steps = len(run.steps) - warmup
    if num_steps < 1:
        return None
    sent = sum(sum(seen.sent_bytes[warmup:]) for seen in machines if seen.sent_bytes)
    return Wire(
        interface=first.interface,
        bytes_per_step=sent / num_ranks / num_steps,
        gradient_bytes=first.gradient_bytes,
        ring_bound=2 * (num_ranks - 1) / num_ranks * first.gradient_bytes,
        reductions_per_step=float(first.num_reductions[-1]),
    )


def _comparison(first: EntrantRuns, second: EntrantRuns, *, num_comparisons: int) -> Comparison:
    """Pairs runs of the same block; those made outside a race, in the order in which they were made."""
    ours, theirs = _by_block(first.timed), _by_block(second.timed)
    shared = [block for block in ours if block in theirs]
    seconds = [(ours[block], theirs[block]) for block in shared]
    comparison = compare_pairs(first.name, second.name, seconds, num_comparisons=num_comparisons)
    if any(not race for race, _ in shared):
        return comparison.model_copy(update={"text": f"{comparison.text} (runs were not made in blocks)"})
    return comparison


def _by_block(records: Sequence[RunRecord]) -> dict[tuple[str, int], float]:
    found = {}
    for number, record in enumerate(records):
        race = record.config.get("race") or {"race": "", "block": number}
        seconds = training_seconds(record)
        if seconds > 0:
            found[str(race["race"]), int(race["block"])] = seconds / (len(record.steps) - NUM_WARMUP_STEPS)
    return found


def _curves(keys: Sequence[str], grouped: Sequence[list[EntrantRuns]], target: float) -> list[Curve]:
    curves = []
    for key, runs in zip(keys, grouped, strict=True):
        for entrant in runs:
            longest = max([*entrant.timed[:1], *([entrant.whole] if entrant.whole else [])],
                          key=lambda record: len(record.steps), default=None)  # fmt: skip
            if longest is not None and (entrant.whole or len(longest.evaluations) > 1):
                curves.append(_curve(key, entrant.name, longest, target))
    return curves


def _curve(key: str, name: str, record: RunRecord, target: float) -> Curve:
    seconds = np.cumsum(slowest_rank(record).step_seconds).tolist()
    evaluations = record.evaluations
    metrics = {metric: [one.metrics[metric] for one in evaluations] for metric in evaluations[0].metrics}
    at_evaluations = [seconds[one.step - 1] for one in evaluations]
    reached = [
        second
        for second, accuracy in zip(at_evaluations, metrics.get("accuracy", []), strict=False)
        if accuracy is not None and accuracy >= target
    ]
    return Curve(
        group=key,
        backend=name,
        steps=[step.step for step in record.steps],
        losses=[step.loss for step in record.steps],
        seconds=seconds,
        evaluation_steps=[one.step for one in evaluations],
        evaluation_seconds=at_evaluations,
        metrics=metrics,
        target=target if "accuracy" in metrics else None,
        seconds_to_target=reached[0] if reached else None,
        total_seconds=record.seconds,
        positive_label=record.task.get("positive_label"),
    )


def _seed_table(groups: Sequence[GroupResult], grouped: Sequence[list[EntrantRuns]]) -> list[SeedRow]:
    ranked = {(result.group.key, entrant.backend) for result in groups for entrant in result.entrants if entrant.ranked}
    rows = []
    for key, runs in zip(_keys(grouped), grouped, strict=True):
        for entrant in runs:
            if entrant.whole is None:
                continue
            record = entrant.whole
            standing = "" if (key, entrant.name) in ranked else " (out of lockstep)"
            world = f"{ranks(record.config['num_processes'])}, {record.config['precision']}"
            rows.append(
                SeedRow(
                    hardware=machine_of(record),
                    backend=f"{entrant.name}, {world}{standing}",
                    train_seconds=sum(slowest_rank(record).step_seconds),
                    f1=record.quality.get("f1"),
                    macro_f1=record.quality.get("macro_f1"),
                    roc_auc=record.quality.get("roc_auc"),
                    accuracy=record.quality.get("accuracy"),
                    batch_size=describe_batch(record.config, record.gradient_accumulation_steps),
                    positive_label=record.task.get("positive_label"),
                )
            )
    return rows


def _scaling(groups: Sequence[GroupResult], grouped: Sequence[list[EntrantRuns]]) -> list[Scaling]:
    """Throughput over ranks, where groups differ in the number of ranks and in what must follow from it."""
    lines: dict[tuple[str, Literal["strong", "weak"], str, str], list[tuple[int, Interval]]] = defaultdict(list)
    for result, runs in zip(groups, grouped, strict=True):
        for entrant, own in zip(result.entrants, runs, strict=True):
            if entrant.ranked and entrant.samples_per_second:
                for kind, words, fixed in _fixed(own.timed[0], result.group):
                    point = (result.group.num_processes, entrant.samples_per_second)
                    lines[str(own.timed[0].config["backend"]), kind, words, fixed].append(point)
    return [
        Scaling(backend=name, kind=kind, condition=words, points=_scaling_points(points))
        for (name, kind, words, _), points in sorted(lines.items())
        if len({number for number, _ in points}) > 1
    ]


def _scaling_points(points: list[tuple[int, Interval]]) -> list[ScalingPoint]:
    base_number, base = min(points, key=lambda point: point[0])
    return [
        ScalingPoint(
            num_processes=number,
            samples_per_second=rate,
            efficiency=rate.estimate / base.estimate * base_number / number,
        )
        for number, rate in sorted(points, key=lambda point: point[0])
    ]


def _fixed(record: RunRecord, group: Group) -> Iterable[tuple[Literal["strong", "weak"], str, str]]:
    """What stays the same along a line of each kind, in words and in full."""
    rest = condition(record) | version(record)
    for name in ("num_processes", "micro_batch_size", "global_batch_size"):
        del rest[name]
    where = f"{group.precision}, {group.gradient_accumulation_steps} accumulation step(s)"
    yield "strong", f"{where}, global batch {group.global_batch_size}", repr(rest)
    yield "weak", f"{where}, {group.global_batch_size // group.num_processes} samples a rank", repr(rest)


def _places(completed: Sequence[RunRecord]) -> list[Place]:
    places: dict[tuple[str, str], list[RunRecord]] = defaultdict(list)
    for record in completed:
        places[machine_of(record), software_of(record)].append(record)
    return [
        Place(machine=machine, software=software, num_runs=len(runs), idleness=_idleness(runs))
        for (machine, software), runs in places.items()
    ]


def _idleness(records: Sequence[RunRecord]) -> str | None:
    races = [record.config["race"] for record in records if record.config.get("race")]
    if not races:
        return None
    shares = [float(race["busy_share"]) for race in races]
    others = sum(race["gpu_processes"] > 0 for race in races)
    gpu = f"; before {others} runs others computed on a GPU" if others else ""
    foreign = [float(race["foreign_share"]) for race in races if race.get("foreign_share") is not None]
    during = f"; during them others took {median(foreign):.0%} (median), at most {max(foreign):.0%}" if foreign else ""
    return f"before runs, cores were busy to {median(shares):.0%} (median), at most {max(shares):.0%}{during}{gpu}"


def _mixtures(completed: Sequence[RunRecord]) -> list[str]:
    """Names what kept runs apart, where a reader may have meant them to be compared."""
    lines = []
    for name, what in (("task", "tasks"), ("seed", "seeds")):
        values = sorted({str(record.config[name]) for record in completed})
        if len(values) > 1:
            lines.append(
                f"records of {len(values)} different {what} ({', '.join(values)}): never compared with each other"
            )
    data = {str(record.task.get("data")) for record in completed if record.task}
    if len(data) > 1:
        lines.append(f"records of different data ({', '.join(sorted(data))}): never compared with each other")
    machines = sorted({machine_of(record) for record in completed})
    if len(machines) > 1:
        lines.append(f"records of different machines ({'; '.join(machines)}): never compared with each other")
    return lines
