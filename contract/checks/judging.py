"""What all checks use: access to evidence, the references that it is compared with, and tolerances."""

from __future__ import annotations

from typing import Any

import torch

from contract.case import INIT_LOSS_SCALE
from contract.check import Evidence, Violation
from contract.reference import Arithmetic, Reference, compute_reference
from contract.simulator import key_of, simulate_as_a_rank
from records.config import RunConfig

# Relative to the norm of all tensors together. Correct computations in float64 differ in the order of
# sums, by about 1e-16 per step; the smallest mistake in a formula changes the third digit.
TIGHT = 1e-12
# The same for weights and for gradients in float32. The gradient of a batch of one sample is small, so that rounding
# errors of the weights are visible in it.
ROUNDING = 1e-5
GRADIENT_ROUNDING = 10 * ROUNDING
# For trainings that are made for float64, if they run in float32: a learning rate of a half and momentum multiply what
# is rounded. With the batches for three ranks, one process is off by 3e-5 in its weights, and by 4e-5 in its losses.
IN_FLOAT32 = GRADIENT_ROUNDING

Tensors = dict[str, torch.Tensor]

# Keyed by what is computed: adapters that begin with the same weights share a reference.
_REFERENCES: dict[str, Reference] = {}


def config_of(evidence: Evidence, training: int = 0) -> RunConfig:
    """Returns the configuration of one training of the case."""
    return evidence.case.trainings[training].config(
        world_size=evidence.world_size,
        precision=evidence.case.precision,
        device=evidence.device,
        find_unused_parameters=evidence.case.find_unused_parameters,
        float64=evidence.float64,
    )


def initial_weights(evidence: Evidence, training: int = 0) -> Tensors:
    """Returns the weights with which rank 0 began the training."""
    weights: Tensors = evidence.ranks[0][training]["setup"]["weights_after"]
    return weights


def reference_of(evidence: Evidence) -> Reference:
    """Returns the float64 reference of the case's first training, from the weights with which rank 0 began."""
    if "reference" not in evidence.memory:
        overflow = evidence.case.trainings[0].overflow
        initial, config, skipped = initial_weights(evidence), config_of(evidence), (overflow.step,) if overflow else ()
        key = key_of(initial, config, {"skipped_steps": skipped})
        if key not in _REFERENCES:
            _REFERENCES[key] = compute_reference(initial, config, skipped_steps=skipped)
        evidence.memory["reference"] = _REFERENCES[key]
    reference: Reference = evidence.memory["reference"]
    return reference


def casts_model(evidence: Evidence) -> bool:
    """Whether `setup` has cast the model as a whole to another dtype."""
    before, after = (evidence.ranks[0][0]["setup"][f"weights_{when}"] for when in ("before", "after"))
    return any(after[name].dtype != before[name].dtype for name in before)


def simulation_of(evidence: Evidence) -> Reference:
    """Returns the case's first training computed by hand in its own precision, micro-batch by micro-batch."""
    if "simulation" not in evidence.memory:
        scale = INIT_LOSS_SCALE if evidence.case.precision == "fp16" else 1.0
        setup = evidence.ranks[0][0]["setup"]
        is_cast = casts_model(evidence)
        evidence.memory["simulation"] = simulate_as_a_rank(
            setup["weights_before"] if is_cast else setup["weights_after"],
            config_of(evidence),
            Arithmetic(scale, is_cast, setup["num_shares"]),
        )
    simulation: Reference = evidence.memory["simulation"]
    return simulation


def bound(evidence: Evidence, of_float64: float, of_float32: float = IN_FLOAT32) -> float:
    """Returns how far a case that runs in float64 may be from the reference: as said, or as far as float32 rounds.

    What is said may be about float32 already.
    """
    return of_float64 if evidence.float64 or of_float64 >= ROUNDING else of_float32


def distance(seen: Tensors, expected: Tensors) -> float:
    """Returns the norm of the difference over the norm of what is expected; infinite if names or shapes differ."""
    if seen.keys() != expected.keys() or any(seen[name].shape != expected[name].shape for name in expected):
        return float("inf")
    difference = torch.cat([(seen[name].double() - expected[name].double()).flatten() for name in expected])
    whole = torch.cat([expected[name].double().flatten() for name in expected])
    return float(difference.norm() / whole.norm())


def require_close(seen: Tensors, expected: Tensors, tolerance: float, *, what: str, rank: int) -> None:
    """Raises a Violation, which names the tensor that differs most, if tensors differ by more than the tolerance."""
    off = distance(seen, expected)
    if off <= tolerance:
        return
    missing = sorted(expected.keys() - seen.keys()) + sorted(seen.keys() - expected.keys())
    if missing:
        raise Violation(f"{what} of {', '.join(sorted(expected))}", f"{', '.join(missing)} on one side only", rank)
    name = max(expected, key=lambda name: _gap(seen[name], expected[name]))
    raise Violation(
        f"{what} within {tolerance:g} of the reference",
        f"a difference of {off:.2g}, most in {name}{_times(seen[name], expected[name])}",
        rank,
    )


def require_rows(seen: Tensors, expected: Tensors, tolerance: float, *, what: str, rank: int) -> None:
    """Raises a Violation, which names the first wrong row, unless each row of each tensor is right by itself.

    The norm of all tensors together, or of one, says nothing about a row that is small beside the others. A row of less
    than a thousandth of the tolerance of all tensors (1e-9 in float64) may be what is left of sums that cancel, and is
    judged as if it were that large.
    """
    least = 1e-3 * tolerance * sum(float(tensor.double().square().sum()) for tensor in expected.values()) ** 0.5
    for name, wanted in expected.items():
        if name not in seen or seen[name].shape != wanted.shape:
            raise Violation(f"{what} of {name}, {list(wanted.shape)}", "none, or another shape", rank)
        one, other = (tensor.double().reshape(len(tensor) if tensor.ndim else 1, -1) for tensor in (seen[name], wanted))
        gaps, sizes = torch.nan_to_num((one - other).norm(dim=1), nan=float("inf")), other.norm(dim=1).clamp(min=least)
        wrong = (gaps > tolerance * sizes).nonzero().flatten().tolist()
        if wrong:
            row, more = wrong[0], f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise Violation(
                f"{what}, row {row} of {name}{more}, within {tolerance:g} of the reference",
                f"a difference of {float(gaps[row] / sizes[row]):.2g}{_times(one[row], other[row])}",
                rank,
            )


def _gap(seen: torch.Tensor, expected: torch.Tensor) -> float:
    if seen.shape != expected.shape:
        return float("inf")
    return float(torch.nan_to_num((seen.double() - expected.double()).norm(), nan=float("inf")))


def _times(seen: torch.Tensor, expected: torch.Tensor) -> str:
    """Says by which factor two tensors differ if one is a multiple of the other, which identifies many mistakes."""
    if seen.shape != expected.shape or not float(expected.double().norm()):
        return ""
    ratio = float((seen.double() * expected.double()).sum() / (expected.double() ** 2).sum())
    is_multiple = float((seen.double() - ratio * expected.double()).norm()) <= 1e-6 * float(seen.double().norm())
    return f" ({ratio:.4g} times the reference there)" if is_multiple else ""


def require(holds: bool, expected: str, seen: str, rank: int | None = None) -> None:
    """Raises a Violation unless what was expected holds."""
    if not holds:
        raise Violation(expected, seen, rank)


def require_equal(seen: Any, expected: Any, *, what: str, rank: int | None = None) -> None:
    """Raises a Violation if two plain values differ."""
    if seen != expected:
        raise Violation(f"{what} {_short(expected)}", _short(seen), rank)


def require_same_bits(seen: Tensors, expected: Tensors, *, what: str, rank: int) -> None:
    """Raises a Violation if any bit of any tensor differs: 0 and -0 differ, a NaN and the same NaN do not."""
    different = [name for name in expected if name not in seen or not _has_same_bits(seen[name], expected[name])]
    if different or seen.keys() - expected.keys():
        off = distance(seen, expected)
        raise Violation(what, f"a difference of {off:.2g} in {', '.join(different) or 'names'}", rank)


def _has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def require_repeated(evidence: Evidence, seen: Tensors, expected: Tensors, *, what: str, rank: int) -> None:
    """Raises a Violation unless a second computation of the same weights has given the same bits.

    With three ranks or more, the weights need to be equal up to rounding only: the sum of three numbers depends on
    their order, and Horovod, for example, adds in the order in which gradients happen to be ready.
    """
    if evidence.world_size <= 2:
        require_same_bits(seen, expected, what=what, rank=rank)
    else:
        require_close(seen, expected, ROUNDING, what=what, rank=rank)


def _short(value: Any, limit: int = 160) -> str:
    text = str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def require_gradients(evidence: Evidence, tolerance: float) -> None:
    """Raises a Violation unless every rank stepped with the gradients of the reference, clipped as the case demands."""
    expected, tolerance = reference_of(evidence).gradients, bound(evidence, tolerance)
    for rank, step, seen in steps_of(evidence):
        gradients, wanted = seen["gradients"], expected[step - 1]
        if gradients is None or wanted is None:
            raise Violation(f"an optimizer step {step}", "the optimizer was not stepped", rank)
        require_close(gradients, wanted, tolerance, what=f"gradients in step {step}", rank=rank)


def require_weights(evidence: Evidence, tolerance: float) -> None:
    """Raises a Violation unless every rank has the weights of the reference after every step."""
    expected, tolerance = reference_of(evidence).weights, bound(evidence, tolerance)
    for rank, step, seen in steps_of(evidence):
        require_close(seen["weights"], expected[step - 1], tolerance, what=f"weights after step {step}", rank=rank)


def steps_of(evidence: Evidence) -> list[tuple[int, int, dict[str, Any]]]:
    """Returns every (rank, step, observation).

    Raises:
        Violation: The training has too many or too few steps.
    """
    num_steps = len(reference_of(evidence).batches)
    for rank, (seen, *_) in enumerate(evidence.ranks):
        require_equal(len(seen["steps"]), num_steps, what="optimizer steps:", rank=rank)
    return [
        (rank, step, seen["steps"][step - 1])
        for step in range(1, num_steps + 1)
        for rank, (seen, *_) in enumerate(evidence.ranks)
    ]
