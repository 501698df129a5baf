"""Whether any entrant has become slower than in a baseline, an earlier race of the same kind.

The two races were made at different times, so nothing is paired between them. Each start of an entrant has one value,
the logarithm of its samples a second, and two races have two means of such values. Their difference gets the interval
of Welch (1947, https://doi.org/10.2307/2332510), for unequal variances: with variances s1 and s2 of the values of n1
and n2 starts, the squared standard error is s1/n1 + s2/n2, and the degrees of freedom are those of Satterthwaite
(scipy.stats.ttest_ind with equal_var=False). So the interval contains the differences between starts of both races.
All intervals of a gate hold together in 95 of 100 comparisons (Bonferroni).

An entrant is too slow if its whole interval lies above the share that the user allows. The interval does not contain
that the machine itself may be faster on one day than on another. Therefore each entrant is also compared relative to
one process of the same block of its own race, which such a change affects as well. This is shown, and decides nothing,
since a change of the code that slows all entrants down does not show in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from backends.registry import REFERENCE
from compare.report.baseline import Baseline, Cell, cell_of, differences_between, entrants_of, refuse_without_facts
from compare.report.statistics import CONFIDENCE, detectable_difference
from compare.results import MIN_PAIRS, Entrant, Gate, GateRow, GateStatus, Group, Interval, Results

_Found = dict[Cell, tuple[Group, Entrant]]


def judge(results: Results, baseline: Baseline) -> Results:
    """Compares a race with its baseline; returns its results with the outcome.

    Raises:
        UsageError: They cannot be compared; the text says why.
    """
    refuse_without_facts(results, "--baseline: the race that is compared with it")
    differences = differences_between(baseline, results)
    baseline.refuse(differences)
    then, now = entrants_of(baseline.results), entrants_of(results)
    level = 1 - (1 - CONFIDENCE) / max(1, len(then))
    rows = [
        _row(cell, then, now, baseline, level) if cell in now else _absent(cell, *then[cell], results) for cell in then
    ]
    rows += [_new(*now[cell]) for cell in now if cell not in then]
    failed = [row for row in rows if row.status not in ("passed", "new")]
    gate = Gate(
        baseline=baseline.description,
        fail_above=baseline.fail_above,
        passed=not failed,
        differences=differences,
        rows=rows,
    )
    return results.model_copy(update={"gate": gate})


def welch(above: Sequence[float], below: Sequence[float], level: float, margin: float) -> tuple[Interval, float]:
    """Compares the geometric means of two samples of positive values.

    Args:
        above: The sample whose mean is divided.
        below: The sample by whose mean it is divided.
        level: The confidence of the interval.
        margin: What a difference has to exceed.

    Returns:
        Their ratio minus 1, and the smallest such difference whose interval would exceed the margin in 4 cases of 5.
    """
    ours, theirs = np.log(above), np.log(below)
    parts = [float(np.var(logs, ddof=1)) / len(logs) for logs in (ours, theirs)]
    difference, variance = float(ours.mean() - theirs.mean()), sum(parts)
    if variance == 0:
        ratio = math.expm1(difference)
        return Interval(estimate=ratio, low=ratio, high=ratio), margin
    freedom = variance**2 / sum(part**2 / (len(logs) - 1) for part, logs in zip(parts, (ours, theirs), strict=True))
    error = math.sqrt(variance)
    low, high = (math.expm1(float(one)) for one in stats.t.interval(level, freedom, loc=difference, scale=error))
    return Interval(estimate=math.expm1(difference), low=low, high=high), detectable_difference(
        error, freedom, level, margin
    )


def _row(cell: Cell, then: _Found, now: _Found, baseline: Baseline, level: float) -> GateRow:
    group, old = then[cell]
    _, new = now[cell]
    name = _name(old, group)
    if (number := len(new.samples_per_second_of_runs)) < MIN_PAIRS:
        text = f"{name} cannot be judged: only {number} of its starts completed, and {MIN_PAIRS} are needed"
        return _without_change(name, "too few", text, old, new)
    # A sample takes the inverse of the samples in a second.
    margin = baseline.fail_above
    change, detectable = welch(old.samples_per_second_of_runs, new.samples_per_second_of_runs, level, margin)
    relative = _relative_change(cell, then, now, level)
    assert change.low is not None
    status: GateStatus = "slower" if change.low > margin else "passed"
    text = f"{name} {_described(change, margin)}"
    if status == "slower" and relative is not None and relative.low is not None and relative.low <= margin:
        text += f"; relative to {REFERENCE} of the same race, by {_percent(relative)}: the machine may be slower now"
    return _without_change(name, status, text, old, new).model_copy(
        update={"change": change, "relative_change": relative, "detectable": detectable}
    )


def _absent(cell: Cell, group: Group, old: Entrant, results: Results) -> GateRow:
    """Says why an entrant of the baseline is not among those that were measured and in lockstep."""
    name = _name(old, group)
    for result in results.groups:
        for entrant in result.entrants:
            if cell_of(entrant, result.group) == cell:
                if entrant.num_runs and entrant.samples_per_second is not None:
                    status: GateStatus = "not in lockstep"
                    approximates = entrant.parity.verdict == "approximate"
                    why = "is only an approximation now" if approximates else "is no longer in lockstep"
                    if entrant.parity.verdict == "unknown":
                        status, why = "lockstep not known", "could not be judged"
                    text = f"{name} {why}: {entrant.parity.detail}"
                    return _without_change(name, status, text, old, entrant)
                why = entrant.failures[0] if entrant.failures else "it has no timed run"
                return _without_change(name, "missing", f"{name} is missing: {why}", old)
    return _without_change(name, "missing", f"{name} is missing: it did not take part, or failed each time", old)


def _new(group: Group, entrant: Entrant) -> GateRow:
    name = _name(entrant, group)
    return _without_change(name, "new", f"{name} is not in the baseline", None, entrant)


def _without_change(
    name: str, status: GateStatus, text: str, old: Entrant | None, new: Entrant | None = None
) -> GateRow:
    return GateRow(
        entrant=name,
        status=status,
        text=text,
        baseline=old.samples_per_second if old else None,
        now=new.samples_per_second if new else None,
        change=None,
        relative_change=None,
        detectable=None,
    )


def _relative_change(cell: Cell, then: _Found, now: _Found, level: float) -> Interval | None:
    """Compares times relative to one process of the same block; None where there is none in one of the races."""
    samples: list[list[float]] = []
    for found in (then, now):
        alone = _one_process(cell, found)
        own = found[cell][1]
        if alone is None or alone is own:
            return None
        pairs = list(zip(own.samples_per_second_of_runs, alone.samples_per_second_of_runs, strict=False))
        if len(pairs) < max(len(own.samples_per_second_of_runs), len(alone.samples_per_second_of_runs)):
            return None  # some start failed, and which blocks the others are of is not known
        samples.append([rate / other for rate, other in pairs])
    interval, _ = welch(samples[0], samples[1], level, 0.0)
    return interval


def _one_process(cell: Cell, found: _Found) -> Entrant | None:
    wanted = cell._replace(name=REFERENCE, num_processes=1, micro_batch_size=cell.micro_batch_size * cell.num_processes)
    return found[wanted][1] if wanted in found else None


def _name(entrant: Entrant, group: Group) -> str:
    return f"{entrant.name} ({group.key})"


def _described(change: Interval, margin: float) -> str:
    """Says how much longer a sample takes than in the baseline, and whether that is too long."""
    assert change.low is not None
    assert change.high is not None
    shown = _percent(change)
    if change.low > margin:
        return f"is slower than in the baseline: its time changed by {shown}, which is more than {100 * margin:g} %"
    if change.high > margin:
        return f"may be slower than in the baseline, which is not certain: its time changed by {shown}"
    return f"is not slower than in the baseline by more than {100 * margin:g} %: its time changed by {shown}"


def _percent(interval: Interval) -> str:
    assert interval.low is not None
    assert interval.high is not None
    low, middle, high = (f"{100 * value:+.1f}" for value in (interval.low, interval.estimate, interval.high))
    return f"{middle} % [{low}, {high}]"
