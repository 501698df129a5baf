"""What results say in words: sentences, headings, and descriptions of runs and machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from compare.results import Claim, Comparison, Curve, Group, Interval, SeedRow
from records.record import RunRecord
from tasks.interface import metric_title

# A race that can only detect that one backend takes twice as long as another is of no use.
_ANY_DIFFERENCE = 1.0


def ranks(number: int) -> str:
    """Returns the number of ranks in words."""
    return "1 rank" if number == 1 else f"{number} ranks"


def on_machine(group: Group) -> str:
    """Returns on which machine the runs of a group took place, as an ending; nothing if all took place on one."""
    return f"; {group.machine}" if group.machine else ""


def describe_batch(record: RunRecord) -> str:
    """Says how a global batch is split: ranks x micro-batch x accumulation steps."""
    config = record.config
    split = f"{config.num_processes} x {config.micro_batch_size} x {record.gradient_accumulation_steps}"
    return f"{config.global_batch_size} = {split}"


def describe_task(record: RunRecord) -> str:
    """Says in a line what is computed."""
    config, task = record.config, record.task
    what = f"{config.task}: {task['model']} on {task['data']}" if "model" in task else config.task
    length = f"{config.max_steps} steps" if config.max_steps > 0 else f"{config.num_train_epochs} epoch(s)"
    compiled = ", compiled" if config.torch_compile else ""
    return f"{what}, {config.optimizer} at {config.learning_rate:g}, {length}, seed {config.seed}{compiled}"


def metric_heading(name: str, rows: Sequence[Curve | SeedRow], *, shown: str | None = None) -> str:
    """Returns the name of a metric for the head of these rows, with the class that it is about if all have the same."""
    labels = {row.positive_label for row in rows}
    title = metric_title(name, labels.pop() if len(labels) == 1 else None)
    return title if shown is None else shown + title.removeprefix(name)


def machine_of(record: RunRecord) -> str:
    """Returns the GPUs or CPUs of a run in words."""
    environment = record.environment
    return ", ".join(environment.gpus) or f"{environment.num_cpus} x {environment.cpu}"


def software_of(record: RunRecord) -> str:
    """Returns the versions of the software of a run, and the commit, in words."""
    environment = record.environment
    packages = ", ".join(f"{name} {version}" for name, version in environment.packages.items())
    dirty = " with changes" if environment.git_dirty else ""
    commit = (environment.git_commit or "unknown")[:12]
    return f"Python {environment.python}; {packages}; commit {commit}{dirty}; {environment.platform}"


def seen_from(name: str, comparison: Comparison) -> Comparison:
    """Returns a comparison whose first backend is the one that is named."""
    if comparison.first == name:
        return comparison
    turned: dict[Claim, Claim] = {"slower": "faster", "faster": "slower"}
    return comparison.model_copy(
        update={
            "first": name,
            "second": comparison.first,
            "slowdown": None if comparison.slowdown is None else inverse(comparison.slowdown),
            "claim": turned.get(comparison.claim, comparison.claim),
        }
    )


def inverse(interval: Interval) -> Interval:
    """Turns "the second takes so much longer" into the same of the first."""
    low, estimate, high = (
        None if x is None else math.expm1(-math.log1p(x)) for x in (interval.high, interval.estimate, interval.low)
    )
    assert estimate is not None
    return Interval(estimate=estimate, low=low, high=high)


def largest(interval: Interval | None) -> float:
    """Returns the largest difference that an interval contains."""
    if interval is None or interval.low is None or interval.high is None:
        return math.inf
    return max(abs(interval.low), abs(interval.high))


def side_of_zero(interval: Interval | None) -> Literal[-1, 0, 1]:
    """Returns -1 or 1 if an interval lies wholly below or above zero, and 0 if it contains zero or is not known."""
    if interval is None or interval.low is None or interval.high is None:
        return 0
    return 1 if interval.low > 0 else -1 if interval.high < 0 else 0


def describe_comparison(comparison: Comparison, *, target: float) -> str:
    """Says what may be claimed of two backends.

    Args:
        comparison: The comparison; its own text is not used.
        target: The difference that a race should be able to detect.
    """
    first, second, interval = comparison.first, comparison.second, comparison.slowdown
    if interval is None or interval.low is None or interval.high is None:
        starts = f"{comparison.num_pairs} together, {comparison.more_repeats} more needed at least"
        return f"there are too few starts to compare {first} and {second}: {starts}"
    if comparison.claim == "none":
        assert comparison.detectable is not None
        text = f"no difference between {first} and {second} is claimed ({_detectable(comparison.detectable)})"
        if comparison.detectable <= target:
            return text
        more = comparison.more_repeats
        remedy = f"{more} more starts would detect {100 * target:.0f} %" if more else "a quieter machine is needed"
        return f"{text}; {remedy}"
    estimate, low, high = interval.estimate, interval.low, interval.high
    if comparison.claim == "faster":
        # Every claim says who takes longer: 10 % longer and 10 % less are not the same ratio.
        first, second = second, first
        estimate, low, high = (math.expm1(-math.log1p(x)) for x in (estimate, high, low))
    return f"{second} takes {100 * estimate:.1f} % longer than {first} [{100 * low:.1f}, {100 * high:.1f}]"


def _detectable(difference: float) -> str:
    if difference >= _ANY_DIFFERENCE:
        return "too noisy to detect any"
    return f"smallest detectable: {100 * difference:.1f} %"
