"""What checks share: reading evidence, the references it is compared with, and tolerances."""

from __future__ import annotations

from typing import Any

import torch

from contract.cases import INIT_LOSS_SCALE
from contract.check import Evidence, Violation
from contract.reference import Reference, compute_reference
from contract.simulator import key_of, simulate_as_a_rank
from records.config import RunConfig

# Relative to the norm of all tensors together. Correct paths in float64 differ in the order of
# sums, about 1e-16 a step; the smallest mistake in a formula shows in the third digit.
TIGHT = 1e-12
# The same for float32.
ROUNDING = 1e-5

Tensors = dict[str, torch.Tensor]

# By what was asked: adapters that begin with the same weights share one reference.
_REFERENCES: dict[str, Reference] = {}


def config_of(evidence: Evidence, training: int = 0) -> RunConfig:
    """The configuration of one training of the case."""
    return evidence.case.trainings[training].config(
        world_size=evidence.world_size,
        precision=evidence.case.precision,
        device=evidence.device,
        find_unused_parameters=evidence.case.find_unused_parameters,
    )


def initial_weights(evidence: Evidence, training: int = 0) -> Tensors:
    """What rank 0 started the training with."""
    weights: Tensors = evidence.ranks[0][training]["setup"]["weights_after"]
    return weights


def reference_of(evidence: Evidence) -> Reference:
    """The float64 reference of the case's first training, from the weights that rank 0 started with."""
    if "reference" not in evidence.memory:
        overflow = evidence.case.trainings[0].overflow
        initial, config, skipped = initial_weights(evidence), config_of(evidence), (overflow.step,) if overflow else ()
        key = key_of(initial, config, {"skipped_steps": skipped})
        if key not in _REFERENCES:
            _REFERENCES[key] = compute_reference(initial, config, skipped_steps=skipped)
        evidence.memory["reference"] = _REFERENCES[key]
    reference: Reference = evidence.memory["reference"]
    return reference


def simulation_of(evidence: Evidence) -> Reference:
    """The case's first training computed by hand in its own precision, micro-batch by micro-batch."""
    if "simulation" not in evidence.memory:
        scale = INIT_LOSS_SCALE if evidence.case.precision == "fp16" else 1.0
        given, prepared = (evidence.ranks[0][0]["setup"][f"weights_{when}"] for when in ("before", "after"))
        casts_model = any(prepared[name].dtype != given[name].dtype for name in given)
        evidence.memory["simulation"] = simulate_as_a_rank(
            given if casts_model else prepared, config_of(evidence), loss_scale=scale, casts_model=casts_model
        )
    simulation: Reference = evidence.memory["simulation"]
    return simulation


def distance(seen: Tensors, expected: Tensors) -> float:
    """The norm of the difference relative to the norm of what was expected; infinite if names or shapes differ."""
    if seen.keys() != expected.keys() or any(seen[name].shape != expected[name].shape for name in expected):
        return float("inf")
    difference = torch.cat([(seen[name].double() - expected[name].double()).flatten() for name in expected])
    whole = torch.cat([expected[name].double().flatten() for name in expected])
    return float(difference.norm() / whole.norm())


def require_close(seen: Tensors, expected: Tensors, tolerance: float, *, what: str, rank: int) -> None:
    """Raises Violation when two sets of tensors differ by more than the tolerance, naming the worst of them."""
    off = distance(seen, expected)
    if off <= tolerance:
        return
    missing = sorted(expected.keys() - seen.keys()) + sorted(seen.keys() - expected.keys())
    if missing:
        raise Violation(f"{what} of {', '.join(sorted(expected))}", f"only one of both has {', '.join(missing)}", rank)
    name = max(expected, key=lambda name: _gap(seen[name], expected[name]))
    ratio = _ratio(seen[name], expected[name])
    raise Violation(
        f"{what} within {tolerance:g} of the reference",
        f"{off:.2g} off, most in {name}" + (f" ({ratio:.4g} times the reference there)" if ratio is not None else ""),
        rank,
    )


def _gap(seen: torch.Tensor, expected: torch.Tensor) -> float:
    if seen.shape != expected.shape:
        return float("inf")
    return float(torch.nan_to_num((seen.double() - expected.double()).norm(), nan=float("inf")))


def _ratio(seen: torch.Tensor, expected: torch.Tensor) -> float | None:
    """The factor between two tensors that are multiples of each other, which names many a mistake; else None."""
    if seen.shape != expected.shape or not float(expected.double().norm()):
        return None
    ratio = float((seen.double() * expected.double()).sum() / (expected.double() ** 2).sum())
    is_multiple = float((seen.double() - ratio * expected.double()).norm()) <= 1e-6 * float(seen.double().norm())
    return ratio if is_multiple else None


def require_equal(seen: Any, expected: Any, *, what: str, rank: int | None = None) -> None:
    """Raises Violation when two plain values differ."""
    if seen != expected:
        raise Violation(f"{what} {_short(expected)}", _short(seen), rank)


def require_same_bits(seen: Tensors, expected: Tensors, *, what: str, rank: int) -> None:
    """Raises Violation when any bit of any tensor differs: 0 and -0 do, NaN and the same NaN do not."""
    different = [name for name in expected if name not in seen or not _has_same_bits(seen[name], expected[name])]
    if different or seen.keys() - expected.keys():
        off = distance(seen, expected)
        raise Violation(what, f"a difference of {off:.2g} in {', '.join(different) or 'names'}", rank)


def _has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def require_repeated(evidence: Evidence, seen: Tensors, expected: Tensors, *, what: str, rank: int) -> None:
    """Raises Violation unless a second computation of the same weights has given the same bits.

    From three ranks on, only unless it has given the same weights to rounding: the sum of three numbers depends on
    their order, and Horovod, for one, adds in the order in which gradients happen to be ready.
    """
    if evidence.world_size <= 2:
        require_same_bits(seen, expected, what=what, rank=rank)
    else:
        require_close(seen, expected, ROUNDING, what=what, rank=rank)


def _short(value: Any, limit: int = 160) -> str:
    text = str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def require_gradients(evidence: Evidence, tolerance: float) -> None:
    """Raises Violation unless every rank stepped with the reference's gradients, clipped as they are to be."""
    expected = reference_of(evidence).gradients
    for rank, step, seen in steps_of(evidence):
        gradients, wanted = seen["gradients"], expected[step - 1]
        if gradients is None or wanted is None:
            raise Violation(f"an optimizer step {step}", "the optimizer was not stepped", rank)
        require_close(gradients, wanted, tolerance, what=f"in step {step} gradients", rank=rank)


def require_weights(evidence: Evidence, tolerance: float) -> None:
    """Raises Violation unless every rank has the reference's weights after every step."""
    expected = reference_of(evidence).weights
    for rank, step, seen in steps_of(evidence):
        require_close(seen["weights"], expected[step - 1], tolerance, what=f"after step {step} weights", rank=rank)


def steps_of(evidence: Evidence) -> list[tuple[int, int, dict[str, Any]]]:
    """Every (rank, step, observation), refusing a training with too many or too few steps."""
    num_steps = len(reference_of(evidence).batches)
    for rank, (seen, *_) in enumerate(evidence.ranks):
        require_equal(len(seen["steps"]), num_steps, what="optimizer steps:", rank=rank)
    return [
        (rank, step, seen["steps"][step - 1])
        for step in range(1, num_steps + 1)
        for rank, (seen, *_) in enumerate(evidence.ranks)
    ]
