"""Profiles made of the record of an ordinary run, as far as it goes."""

from __future__ import annotations

from datetime import datetime, timezone
from statistics import median

from backends.registry import BACKENDS
from forecast.measuring import halving_compressions, interval_of_median, not_in_the_model, quartile_spread, sent_share
from forecast.profile import Computing, GradientTime, Profile
from forecast.sending import sending_of
from launch.options import own_options
from records.record import DiagnosisRecord, RunRecord
from records.throughput import NUM_WARMUP_STEPS

_HOW = "train once more with --diagnose, or make a profile (launch/run.sh forecast profile)"
# Into how many gradients of about one size, at most, a record's total is divided: it does not say when each was ready.
_NUM_PARTS = 64


class LacksTimes(Exception):
    """A record has not what a forecast needs; the message says what is missing."""


def profile_of_record(record: RunRecord) -> Profile:
    """Makes a profile of a run with --diagnose, which holds what each rank computes alone, and the gradients' size.

    Raises:
        LacksTimes: The record has no such times.
    """
    diagnoses = [rank.diagnosis for rank in record.ranks if rank.diagnosis is not None]
    _require_times(record, diagnoses)
    config, micro_steps = record.config, record.gradient_accumulation_steps
    backward = _median(diagnoses, "backward")
    settings = record.ranks[0].effective_settings
    by_rank = [_steps(diagnosis) for diagnosis in diagnoses]
    computing = Computing(
        num_processes=1,
        step_seconds=interval_of_median([second for steps in by_rank for second in steps]),
        spread_seconds=quartile_spread(by_rank) if len(by_rank) > 1 else None,
    )
    return Profile(
        created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=config.launch_command,
        environment=record.environment,
        backend=config.backend,
        own_options=own_options(config.backend, config.backend_settings),
        transport=str(settings.get("transport", "unknown")),
        compressions=halving_compressions(config.backend) if config.grad_compression == "none" else [],
        sending=sending_of(settings, config.backend_settings),
        samples_per_rank=config.global_batch_size // config.num_processes,
        num_samples=_samples_of_an_epoch(record),
        num_steps=len(by_rank[0]),
        micro_steps=micro_steps,
        data_seconds=median(second for one in diagnoses for second in one.data_seconds[NUM_WARMUP_STEPS:]),
        forward_seconds=_median(diagnoses, "forward"),
        backward_seconds=backward,
        last_backward_seconds=backward / micro_steps,
        update_seconds=_median(diagnoses, "optimizer"),
        sent_share=sent_share(config.grad_compression),
        gradients=_even_gradients(diagnoses[0].gradient_bytes, backward / micro_steps),
        computing=[computing],
        overlap_slow_down=None,
        collectives=[],
        remarks=_remarks(len(by_rank)),
    )


def _require_times(record: RunRecord, diagnoses: list[DiagnosisRecord]) -> None:
    """Refuses records that lack something, or are of a training that is not in the model."""
    if not diagnoses:
        raise LacksTimes(f"the record lacks the times of forward and backward pass; {_HOW}")
    row = BACKENDS.get(record.config.backend)
    if diagnoses[0].sharded_bytes or (row is not None and row.capabilities.shards_state):
        raise LacksTimes("its ranks hold parts, and what gathers them is not in the model; choose another backend")
    if (why := not_in_the_model(record.config, record.config.backend_settings)) is not None:
        raise LacksTimes(f"{why}; choose another run")
    if len(record.steps) <= NUM_WARMUP_STEPS:
        raise LacksTimes(f"the run has no step after the {NUM_WARMUP_STEPS} of its warm-up; {_HOW}")


def _even_gradients(num_bytes: int, last_backward: float) -> list[GradientTime]:
    parts = min(_NUM_PARTS, num_bytes)
    ends = [num_bytes * k // parts for k in range(parts + 1)]
    return [
        GradientTime(name=f"part {k}", num_bytes=ends[k] - ends[k - 1], ready_seconds=last_backward * k / parts)
        for k in range(1, parts + 1)
    ]


def _remarks(num_ranks: int) -> list[str]:
    remarks = [
        "a record does not say when each gradient is ready: they are taken to become ready evenly over the last "
        "backward pass",
        "how much sending slows computing down was not measured: it is taken not to",
    ]
    if num_ranks > 1:
        remarks.append(f"computing was measured in {num_ranks} processes at once, not in one")
    return remarks


def _median(diagnoses: list[DiagnosisRecord], part: str) -> float:
    return median(second for one in diagnoses for second in one.alone_seconds[part][NUM_WARMUP_STEPS:])


def _steps(diagnosis: DiagnosisRecord) -> list[float]:
    parts = [diagnosis.data_seconds, *diagnosis.alone_seconds.values()]
    return [sum(step) for step in zip(*parts, strict=True)][NUM_WARMUP_STEPS:]


def _samples_of_an_epoch(record: RunRecord) -> int:
    counts = record.task.get("num_samples")
    if isinstance(counts, dict) and isinstance(counts.get("train"), int):
        return int(counts["train"])
    return sum(step.num_samples for step in record.steps if step.epoch == 0)
