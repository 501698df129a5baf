"""Whether a run computes the same as the reference: bit for bit, up to rounding, or not.

How large rounding errors are is measured, not assumed. The yardstick is another run of the reference, with its batches
split into the micro-batches of the run, and padded, sorted or packed as those are. If a run is more than thirty times
as far from the reference as the yardstick is, in any weight after any step, it computes something else.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from parity.verdict import Parity
from records.record import DiagnosisRecord, RunRecord

_FACTOR = 30.0
# A weight that did not move in the yardstick may move by this share of the distance that all weights moved together.
_SHARED = 1e-3
# A few changes of the last digit of a weight, relative to its size.
_LAST_DIGITS = {"float64": 1e-15}
_LAST_DIGITS_OF_FLOAT32 = 1e-6
# So many times as much of a norm: it depends on the order in which the squares of all elements are added up, which is
# another one where ranks hold parts of a gradient.
_SQUARES = 20.0
# With few samples, metrics jump by a whole sample, and depend on which of two equal logits comes first.
_METRIC_SLACK = 0.01
# How far losses and gradient norms of the first steps may lie apart in runs without a diagnosis, by precision.
_TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 3e-2}
_NUM_JUDGED_STEPS = 10
# How far they may lie apart where all weights are the same bits: they are sums in another order.
_SAME_BITS = 1e-4
# How far metrics may lie apart there, relative to their size or to 1, by precision: an evaluation has batches of other
# shapes on other numbers of ranks, and in half precision, logits are often equal.
_SAME_METRICS = {"fp32": 1e-4, "bf16": _METRIC_SLACK, "fp16": _METRIC_SLACK}
# How far the first loss and gradient norm of one process may lie apart if it splits its batches in two ways, by dtype.
# Half precision rounds by the shape of a micro-batch.
_SPLIT_TOLERANCE = {"float64": 1e-9}
_SPLIT_TOLERANCE_OF_FLOAT32 = 1e-4
# Losses below this are no measure of a relative difference.
_SMALL = 1e-3
# Which share of the way that training moved them weights may lie apart where rounding cannot be measured, by precision.
_MOST_APART = {"fp32": 0.02, "bf16": 0.2, "fp16": 0.2}

_Numbers = npt.NDArray[np.float64]


def diagnosed_parity(run: RunRecord, reference: RunRecord, yardstick: RunRecord | None) -> Parity:
    """Judges a diagnosed run by its weights after every step, its losses and its metrics."""
    if (settled := _settled_by_bits(run, reference)) is not None:
        return settled
    step, name = _first_difference(_diagnosis(run), _diagnosis(reference))
    if yardstick is not None and (why := _dependence_on_the_split(reference, yardstick)) is not None:
        return Parity(verdict="not comparable", detail=why, first_step=step, parameter=name)
    judged = _measured_parity(run, reference, yardstick) if yardstick else losses_parity(run, reference)
    if judged.first_step is None and judged.verdict == "rounding":
        judged = judged.model_copy(update={"first_step": step, "parameter": name})
    return judged


def _settled_by_bits(run: RunRecord, reference: RunRecord) -> Parity | None:
    """Judges a run where no rounding has to be judged: it has the bits of the reference, or begins otherwise."""
    ours, theirs = _diagnosis(run), _diagnosis(reference)
    if ours.parameters != theirs.parameters or len(run.steps) != len(reference.steps):
        detail = "it trains other parameters than the reference, or another number of steps"
        return Parity(verdict="not comparable", detail=detail)
    step, name = _first_difference(ours, theirs)
    if step is None:
        return _bitwise(run, reference)
    if step == 0:
        detail = f"it starts from other weights than the reference ({name})"
        return Parity(verdict="not comparable", detail=detail, first_step=0, parameter=name)
    return None


def _bitwise(run: RunRecord, reference: RunRecord) -> Parity:
    """Judges a run whose weights are those of the reference, bit for bit, after every step."""
    digests = _diagnosis(run).digests
    if digests[-1] == digests[0]:
        detail = "no weight moved in any step, since the learning rate was 0 or every step overflowed"
        return Parity(verdict="unknown", detail=detail, num_steps=0)
    for ours, theirs in zip(run.steps, reference.steps, strict=True):
        # Clipping hides a gradient that is wrong by a factor from the weights.
        for name in ("loss", "grad_norm"):
            mine, other = getattr(ours, name), getattr(theirs, name)
            if _relative_distance(mine, other) > _SAME_BITS:
                detail = f"its {_in_words(name)} of step {ours.step} is {_show(mine)}, the reference's {_show(other)}"
                return Parity(verdict="not comparable", detail=detail, first_step=ours.step)
    metric = _differing_metric(run, reference, share=_SAME_METRICS[reference.config.precision])
    if metric:
        detail = f"all weights are bitwise equal, but metrics differ from the reference's: {metric}"
        return Parity(verdict="not comparable", detail=detail)
    return Parity(verdict="bitwise", detail=f"all weights after each of {len(run.steps)} steps are bitwise equal")


def parity_in_equal_parts(run: RunRecord, reference: RunRecord) -> Parity:
    """Judges a run with BatchNorm, whose reference takes the same samples together.

    BatchNorm computes something else from other parts of a batch, so that no second reference can measure rounding.
    Losses and gradient norms must be those of the reference, and the weights may lie apart by a small share of the way
    that training has moved them, and metrics by the same share of their size.
    """
    if (settled := _settled_by_bits(run, reference)) is not None:
        return settled
    ours, theirs = _diagnosis(run), _diagnosis(reference)
    step, name = _first_difference(ours, theirs)
    judged = losses_parity(run, reference)
    if judged.verdict != "rounding":
        return judged
    distance = _distance(ours, theirs)
    most = _MOST_APART[run.config.precision]
    detail = f"its weights end {100 * distance:.2g} % of the way apart that training moved the reference's"
    far = distance > most
    # Metrics follow from the weights and the running statistics.
    if not far and (metric := _differing_metric(run, reference, share=most)):
        far, detail = True, f"metrics differ from the reference's: {metric}"
    return Parity(verdict="not comparable" if far else "rounding", detail=detail, first_step=step, parameter=name)


def _distance(ours: DiagnosisRecord, theirs: DiagnosisRecord) -> float:
    """Returns how far the last weights of two runs lie apart, over how far training has moved those of the second."""
    mine, other = (np.array(one.sketches, dtype=np.float64) for one in (ours, theirs))
    last = min(len(mine), len(other)) - 1
    moved = max(float(np.linalg.norm(other[last] - other[0])), np.finfo(np.float64).tiny)
    return float(np.linalg.norm(mine[last] - other[last])) / moved


def _measured_parity(run: RunRecord, reference: RunRecord, yardstick: RunRecord) -> Parity:
    # fp16: what overflows depends on the split of a batch, since losses are scaled before they are averaged.
    together = _steps_before_skips_differ(run, reference, yardstick)
    if together == 0:
        return Parity(
            verdict="unknown", detail="it skips other steps than the reference from the first one on (overflow)"
        )
    digits = _LAST_DIGITS.get(_diagnosis(reference).inner_dtype, _LAST_DIGITS_OF_FLOAT32)
    excess = _weight_excess(_diagnosis(run), _diagnosis(reference), _diagnosis(yardstick), digits)[: together + 1]
    # AdamW and clipping hide a gradient that is wrong by a factor from the weights, but not from its norm.
    digits_of = {"loss": digits, "grad_norm": digits * _SQUARES}
    curves = {
        name: _curve_excess(name, run, reference, yardstick, of_curve)[:together]
        for name, of_curve in digits_of.items()
    }
    strayed = [_stray(_diagnosis(run), excess), *(_stray_of_curve(name, curve) for name, curve in curves.items())]
    found = [parity for parity in strayed if parity is not None]
    if found:
        return min(found, key=lambda parity: parity.first_step or 0)
    metric = _differing_metric(run, reference, yardstick=yardstick) if together == len(run.steps) else None
    if metric:
        return Parity(verdict="not comparable", detail=f"metrics differ from the reference's: {metric}")
    nearness = max(float(excess.max()), *(float(curve.max()) for curve in curves.values())) * _FACTOR
    until = (
        ""
        if together == len(run.steps)
        else f", up to step {together}; after it, overflows made them skip different steps"
    )
    detail = (
        f"at most {nearness:.1f} times as far from the reference as the reference with other micro-batches is{until}"
    )
    return Parity(verdict="rounding", detail=detail, num_steps=together)


def _dependence_on_the_split(reference: RunRecord, yardstick: RunRecord) -> str | None:
    """Says by how much more than rounding a single process computes something else from the same batch in other parts.

    Such a yardstick measures no rounding, and would excuse everything. The first step is compared, before which the
    weights are the same.
    """
    first, other_first = yardstick.steps[0], reference.steps[0]
    if first.skipped or other_first.skipped:  # by an overflow, which depends on the split
        return None
    tolerance = _split_tolerance(reference)
    for name in ("loss", "grad_norm"):
        mine, other = getattr(first, name), getattr(other_first, name)
        if _relative_distance(mine, other, floor=_SMALL) > tolerance:
            sizes = yardstick.config.micro_batch_size, reference.config.micro_batch_size
            return (
                f"the result depends on how a batch is split: in step 1, one process has a {_in_words(name)} of "
                f"{_show(mine)} with micro-batches of {sizes[0]}, and of {_show(other)} with {sizes[1]}; layers "
                "such as BatchNorm normalise each micro-batch by itself"
            )
    return None


def _split_tolerance(reference: RunRecord) -> float:
    if reference.config.precision != "fp32":
        return _TOLERANCE[reference.config.precision]
    return _SPLIT_TOLERANCE.get(_diagnosis(reference).inner_dtype, _SPLIT_TOLERANCE_OF_FLOAT32)


def _in_words(name: str) -> str:
    return name.replace("_", " ").replace("grad", "gradient")


def approximate_parity(run: RunRecord, reference: RunRecord | None) -> Parity:
    """Says how far a run with compressed gradients, which computes an approximation, ends from the reference."""
    how = f"gradients travel as {run.config.grad_compression}"
    if reference is None or run.ranks[0].diagnosis is None or reference.ranks[0].diagnosis is None:
        detail = f"{how}; only diagnosis runs (--diagnose) tell how far it goes astray"
        return Parity(verdict="approximate", detail=detail)
    ours, theirs = _diagnosis(run), _diagnosis(reference)
    if ours.parameters != theirs.parameters or ours.digests[0] != theirs.digests[0]:
        detail = "it trains other parameters than the reference, or starts from other weights"
        return Parity(verdict="not comparable", detail=detail, first_step=0)
    distance = _distance(ours, theirs)
    if not np.isfinite(distance):
        return Parity(verdict="not comparable", detail=f"{how}, and its weights are not finite in the end")
    step, name = _first_difference(ours, theirs)
    off = f"its weights are off by {100 * distance:.2g} % of the way that training moved the reference's"
    detail = f"{how}; after {len(ours.digests) - 1} steps, {off}"
    return Parity(verdict="approximate", detail=detail, first_step=step, parameter=name, distance=distance)


def _steps_before_skips_differ(*records: RunRecord) -> int:
    skips = list(zip(*([step.skipped for step in record.steps] for record in records), strict=False))
    return next((index for index, skipped in enumerate(skips) if len(set(skipped)) > 1), len(skips))


def normalised_otherwise(run: RunRecord, reference: RunRecord) -> Parity | None:
    """Says that BatchNorm takes statistics of other samples in a run than in the reference; None if it does not.

    This is no rounding, however close the results may come.
    """
    ours, theirs = (_samples_of_statistics(record) for record in (run, reference))
    if ours is None or theirs is None or ours == theirs:
        return None
    layers = "1 layer" if run.num_batch_norms == 1 else f"{run.num_batch_norms} layers"
    detail = f"BatchNorm ({layers}) takes its statistics from {ours} samples, and from {theirs} in the reference"
    if run.config.num_processes > 1 and not run.config.sync_batchnorm:
        detail += ": those of each rank alone, where --sync-batchnorm takes them over all ranks"
    return Parity(verdict="not comparable", detail=detail, cause="BatchNorm")


def _samples_of_statistics(run: RunRecord) -> int | None:
    """Returns from how many samples BatchNorm takes its statistics in a full step; None without BatchNorm."""
    if not run.num_batch_norms:
        return None
    ranks = run.config.num_processes if run.config.sync_batchnorm else 1
    devices = int(run.ranks[0].effective_settings.get("num_devices", 1))  # of DataParallel, each of which has a share
    return run.config.micro_batch_size * ranks // devices


def losses_parity(run: RunRecord, reference: RunRecord) -> Parity:
    """Judges a run of which only losses and final weights are known."""
    if (
        run.ranks
        and reference.ranks
        and run.ranks[0].weights_sha256 == reference.ranks[0].weights_sha256
        and len(run.steps) == len(reference.steps)
    ):
        return Parity(verdict="bitwise", detail="the final weights are bitwise equal")
    by_sample = run.task.get("dropout_by_sample") and reference.task.get("dropout_by_sample")
    if _split(run) != _split(reference) and run.task.get("dropout", 0) != 0 and not by_sample:
        detail = "dropout masks depend on how a batch is split; only diagnosis runs (--diagnose) can tell"
        return Parity(verdict="unknown", detail=detail)
    tolerance = _TOLERANCE[run.config.precision]
    worst = 0.0
    for ours, theirs in zip(run.steps[:_NUM_JUDGED_STEPS], reference.steps, strict=False):
        for name in ("loss", "grad_norm"):
            mine, other = getattr(ours, name), getattr(theirs, name)
            apart = _relative_distance(mine, other)
            worst = max(worst, apart)
            if apart > tolerance:
                detail = f"its {_in_words(name)} of step {ours.step} is {_show(mine)}, the reference's {_show(other)}"
                return Parity(verdict="not comparable", detail=detail, first_step=ours.step)
    detail = (
        f"losses and gradient norms of the first {_NUM_JUDGED_STEPS} steps are within {worst:.1e} of the reference's; "
        "weights were compared only at the end"
    )
    return Parity(verdict="rounding", detail=detail)


def _relative_distance(mine: float | None, other: float | None, *, floor: float = 1e-12) -> float:
    if mine is None or other is None:
        return 0.0 if mine is other else float("inf")
    return abs(mine - other) / max(abs(other), floor)


def _split(run: RunRecord) -> tuple[int, int]:
    return run.config.num_processes, run.config.micro_batch_size


def _diagnosis(run: RunRecord) -> DiagnosisRecord:
    diagnosis = run.ranks[0].diagnosis
    assert diagnosis is not None
    return diagnosis


def _first_difference(ours: DiagnosisRecord, theirs: DiagnosisRecord) -> tuple[int | None, str | None]:
    for step, (mine, other) in enumerate(zip(ours.digests, theirs.digests, strict=False)):
        for name, digest, expected in zip(ours.parameters, mine, other, strict=True):
            if digest != expected:
                return step, name
    return None, None


def _weight_excess(
    ours: DiagnosisRecord, theirs: DiagnosisRecord, yardstick: DiagnosisRecord, digits: float
) -> _Numbers:
    """Returns the distance from the reference over the largest that is still rounding, for each step and weight."""
    length = min(len(diagnosis.sketches) for diagnosis in (ours, theirs, yardstick))
    # What is not finite is null in a record, and nan here.
    mine, other, third = (
        np.array(diagnosis.sketches[:length], dtype=np.float64) for diagnosis in (ours, theirs, yardstick)
    )
    # The bound never decreases: some weights happen to be exact in a step after others.
    allowed = np.maximum.accumulate(np.linalg.norm(third - other, axis=2), axis=0)
    sizes = np.linalg.norm(other, axis=2)
    # A weight that rounding happened not to move in the yardstick may move here a little.
    shared = _SHARED * np.linalg.norm(allowed, axis=1, keepdims=True)
    bound = np.fmax(np.fmax(_FACTOR * allowed, digits * sizes), shared)
    both = np.logical_and(np.isnan(mine).any(axis=2), np.isnan(other).any(axis=2))
    return _without_nan(_over(np.linalg.norm(mine - other, axis=2), bound), both)


def _curve_excess(name: str, run: RunRecord, reference: RunRecord, yardstick: RunRecord, digits: float) -> _Numbers:
    """Returns how far a number is from the reference's, over the largest that is still rounding, for each step."""
    length = min(len(record.steps) for record in (run, reference, yardstick))
    mine, other, third = (
        np.array([np.nan if (value := getattr(step, name)) is None else value for step in record.steps[:length]])
        for record in (run, reference, yardstick)
    )
    allowed = np.maximum.accumulate(np.abs(third - other))
    excess = _over(np.abs(mine - other), np.fmax(_FACTOR * allowed, digits * np.abs(other)))
    return _without_nan(excess, np.logical_and(np.isnan(mine), np.isnan(other)))


def _without_nan(excess: _Numbers, both: npt.ArrayLike) -> _Numbers:
    """Numbers that are not finite on both sides count as equal; on one side only, their distance is infinite."""
    return np.where(both, 0.0, np.where(np.isnan(excess), np.inf, excess))


def _over(distances: _Numbers, bounds: _Numbers) -> _Numbers:
    return distances / np.maximum(bounds, np.finfo(np.float64).tiny)


def _stray(ours: DiagnosisRecord, excess: _Numbers) -> Parity | None:
    beyond = np.flatnonzero(excess.max(axis=1) > 1)
    if not len(beyond):
        return None
    step = int(beyond[0])
    name = ours.parameters[int(excess[step].argmax())]
    detail = (
        f"after step {step}, {name} is {excess[step].max():.3g} times as far from the reference as rounding explains"
    )
    return Parity(verdict="not comparable", detail=detail, first_step=step, parameter=name)


def _stray_of_curve(name: str, excess: _Numbers) -> Parity | None:
    beyond = np.flatnonzero(excess > 1)
    if not len(beyond):
        return None
    step = int(beyond[0]) + 1
    times = f"{excess[beyond[0]]:.3g} times"
    detail = f"in step {step}, its {_in_words(name)} is {times} as far from the reference as rounding explains"
    return Parity(verdict="not comparable", detail=detail, first_step=step)


def _differing_metric(
    run: RunRecord, reference: RunRecord, *, yardstick: RunRecord | None = None, share: float = 0.0
) -> str | None:
    """Says which metric is not the reference's; without a yardstick, each may differ by a share of its size or of 1."""
    for name, theirs in reference.quality.items():
        ours = run.quality.get(name)
        if ours is None or theirs is None:
            if ours is not theirs:
                return f"{name} is {_show(ours)}, not {_show(theirs)}"
            continue
        if yardstick is None:
            allowed = share * max(1.0, abs(theirs))
        else:
            third = yardstick.quality.get(name)
            allowed = max(_METRIC_SLACK, _FACTOR * abs(third - theirs) if third is not None else 0.0)
        if abs(ours - theirs) > allowed:
            return f"{name} is {_show(ours)}, not {_show(theirs)}"
    return None


def _show(value: float | None) -> str:
    return "not a finite number" if value is None else f"{value:.6g}"
