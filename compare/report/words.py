"""What results say in words: sentences, headings, and descriptions of runs and machines."""

from __future__ import annotations

import math
from collections.abc import Sequence

from compare.numbers import joined, number
from compare.results import Comparison, Curve, Entrant, Group, GroupResult, Interval, Placing, SeedRow, Standing
from records.record import RunRecord
from tasks.interface import metric_title

# Entrants that differ by no more are called equally fast, with the figure beside it.
_AS_GOOD_AS_EQUAL = 0.05
# A gain of so many times is not worth a sentence of praise.
_SOME_GAIN = 1.05
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


def describe_verdict(groups: Sequence[GroupResult], standings: Sequence[Standing], num_problems: int) -> list[str]:
    """Returns the sentences at the top of a report: who is fastest, what more ranks give, and whether all agree."""
    sentences = [sentence for group in groups for sentence in _speed(group)]
    sentences += [sentence for standing in standings for sentence in _gain(standing)]
    sentences += _lockstep(groups)
    if num_problems:
        sentences.append(f"{num_problems} problem(s) are listed below.")
    return sentences


def _lockstep(groups: Sequence[GroupResult]) -> list[str]:
    entrants = [(group, entrant) for group in groups for entrant in group.entrants if entrant.num_runs]
    verdicts = [entrant.parity.verdict for _, entrant in entrants]
    judged = len(verdicts) - verdicts.count("unknown") - verdicts.count("reference")
    good = verdicts.count("bitwise") + verdicts.count("rounding")
    sentences = []
    if judged:
        same = f"{verdicts.count('bitwise')} bit for bit, {verdicts.count('rounding')} within rounding"
        sentences.append(f"In lockstep with the reference: {good} of {judged} entrants ({same}).")
    for group, entrant in entrants:
        if entrant.parity.verdict == "not comparable":
            detail = entrant.parity.detail
            sentences.append(f"NOT in lockstep, and not ranked: {entrant.name} ({group.group.key}): {detail}.")
    return sentences


def _speed(group: GroupResult) -> list[str]:
    """Says who is fastest in a group, and how the others compare with it."""
    measured = [entrant for entrant in group.entrants if entrant.ranked and entrant.samples_per_second]
    if len(measured) < 2:
        return []
    fastest = max(measured, key=_rate).name
    others = [_seen_from(fastest, one) for one in group.comparisons if fastest in (one.first, one.second)]
    equal = [one for one in others if one.claim == "none" and _largest(one) <= _AS_GOOD_AS_EQUAL]
    parts = [f"{fastest} is the fastest"]
    if equal:
        within = number(100 * max(_largest(one) for one in equal), 2)
        parts = [f"{joined([fastest, *(one.second for one in equal)])} are equally fast (within {within} %)"]
    parts += [_relation(one) for one in others if one not in equal]
    return [f"{group.group.key}: {'; '.join(parts)}."]


def _relation(comparison: Comparison) -> str:
    """Says how the second backend of a comparison compares with the first."""
    interval = comparison.slowdown
    if interval is None or interval.low is None or interval.high is None:
        return f"{comparison.second} was started too seldom to be compared"
    bounds = f"[{number(100 * interval.low, 2)}, {number(100 * interval.high, 2)}]"
    if comparison.claim == "none":
        return f"{comparison.second} may be as fast, or differ by up to {number(100 * _largest(comparison), 2)} %"
    longer = "longer" if interval.estimate > 0 else "less time"
    return f"{comparison.second} takes {number(100 * abs(interval.estimate), 3)} % {longer} {bounds}"


def _seen_from(name: str, comparison: Comparison) -> Comparison:
    """Returns a comparison whose first backend is the one that is named."""
    if comparison.first == name or comparison.slowdown is None:
        return comparison.model_copy(update={"first": name, "second": _other(name, comparison)})
    return comparison.model_copy(
        update={"first": name, "second": comparison.first, "slowdown": _inverse(comparison.slowdown)}
    )


def _other(name: str, comparison: Comparison) -> str:
    return comparison.second if comparison.first == name else comparison.first


def _inverse(interval: Interval) -> Interval:
    """Turns "the second takes so much longer" into the same of the first."""
    low, estimate, high = (
        None if x is None else math.expm1(-math.log1p(x)) for x in (interval.high, interval.estimate, interval.low)
    )
    assert estimate is not None
    return Interval(estimate=estimate, low=low, high=high)


def _largest(comparison: Comparison) -> float:
    """Returns the largest difference that the interval of a comparison contains."""
    interval = comparison.slowdown
    if interval is None or interval.low is None or interval.high is None:
        return math.inf
    return max(abs(interval.low), abs(interval.high))


def _gain(standing: Standing) -> list[str]:
    """Says what more ranks give, by the fastest entrant of each number of ranks."""
    best: dict[int, Placing] = {}
    for placing in standing.placings:
        best.setdefault(placing.num_processes, placing)
    fewest = min(best)
    sentences = []
    for count, placing in sorted(best.items()):
        if count > fewest:
            gain = placing.samples_per_second.estimate / best[fewest].samples_per_second.estimate
            what = f"{number(gain, 2)} times the speed of {best[fewest].label}"
            much = "" if gain > _SOME_GAIN else ": nothing is gained"
            sentences.append(f"{standing.conditions}: {placing.label} reaches {what}{much}.")
    return sentences


def describe_comparison(comparison: Comparison, *, target: float) -> str:
    """Says what may be claimed of two backends.

    Args:
        comparison: The comparison; its own text is not used.
        target: The difference that a race should be able to detect.
    """
    first, second, interval = comparison.first, comparison.second, comparison.slowdown
    if interval is None or interval.low is None or interval.high is None:
        pairs = f"{comparison.num_pairs} pair(s), at least {comparison.more_repeats} more needed"
        return f"there are too few runs to compare {first} and {second}: {pairs}"
    if comparison.claim == "none":
        assert comparison.detectable is not None
        text = f"no significant difference between {first} and {second} ({_detectable(comparison.detectable)})"
        if comparison.detectable <= target:
            return text
        more = comparison.more_repeats
        remedy = f"{more} more repeats would detect {100 * target:.0f} %" if more else "a quieter machine is needed"
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


def _rate(entrant: Entrant) -> float:
    assert entrant.samples_per_second is not None
    return entrant.samples_per_second.estimate
