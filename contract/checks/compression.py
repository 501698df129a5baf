"""Gradients that travel in fewer bytes: how precise their average is, what travels, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from backends.compression import POWERSGD_EXACT_STEPS, POWERSGD_RANK
from contract.cases import COMPRESSED_HALF, POWERSGD
from contract.check import SEVERAL, Evidence, NotSeen, Violation, check
from contract.checks.judging import (
    TIGHT,
    Tensors,
    bound,
    config_of,
    initial_weights,
    require,
    require_close,
    require_equal,
    require_same_bits,
)
from contract.reference import global_batches, gradients_of_ranks

# The largest relative error of a rounding, and the smallest absolute one, half of the smallest number above zero:
# IEEE 754 binary16 has 11 significant bits, bfloat16 has 8 and the exponents of float32.
_ROUNDING = {"fp16": (2.0**-11, 2.0**-25), "bf16": (2.0**-8, 2.0**-134)}
_BYTES = {"fp16": 2, "bf16": 2}
# Of singular values in float64, relative to the largest.
_NO_DIRECTION = 1e-9


class _Step(NamedTuple):
    """A step of a training with compressed gradients.

    Attributes:
        number: Its number, from 1.
        rank: The rank that has observed it.
        seen: The observation.
        own: The gradients of each rank, in float64.
    """

    number: int
    rank: int
    seen: dict[str, Any]
    own: list[Tensors]

    @property
    def exact(self) -> Tensors:
        """The average over ranks."""
        return {name: torch.stack([one[name] for one in self.own]).mean(dim=0) for name in self.own[0]}


def _steps(evidence: Evidence) -> Iterator[_Step]:
    """Every step on every rank. What is exact is computed from the weights that the steps before have really made."""
    config, weights = config_of(evidence), initial_weights(evidence)
    batches = [batch for epoch in global_batches(config) for batch in epoch]
    for number, batch in enumerate(batches, start=1):
        own = gradients_of_ranks(weights, config, batch)
        for rank, (training,) in enumerate(evidence.ranks):
            require_equal(len(training["steps"]), len(batches), what="optimizer steps:", rank=rank)
            seen = training["steps"][number - 1]
            if seen["gradients"] is None:
                raise Violation(f"an optimizer step {number}", "the optimizer was not stepped", rank)
            yield _Step(number, rank, seen, own)
        weights = evidence.ranks[0][0]["steps"][number - 1]["weights"]


@check(
    "C51",
    COMPRESSED_HALF,
    traps="B1",
    world_sizes=SEVERAL,
    promises=['Backend.step: With "fp16" or "bf16", an element'],
)
def compressed_gradients_are_as_precise_as_their_format(evidence: Evidence) -> None:
    """Each element of an average that travels as fp16 or bf16 is within the roundings of this format of the exact one.

    With N ranks, that is N + 1 roundings of at most 2**-11 (bf16: 2**-8) of the mean magnitude of the ranks' terms: one
    of each term, N - 1 of their sum and one of its division. The average is compared with the exact one at the
    weights that the step began with, so that errors of earlier steps do not count. All ranks have the same bits of
    gradients and weights, and the norm that `step` returns is that of the average that they step with.
    """
    compression = evidence.case.grad_compression
    relative, absolute = _ROUNDING[compression]
    roundings = evidence.world_size + 1
    for step in _steps(evidence):
        _require_equal_ranks(evidence, step)
        exact, gradients = step.exact, step.seen["gradients"]
        require_equal(sorted(gradients), sorted(exact), what="gradients of", rank=step.rank)
        for name, gradient in gradients.items():
            size = torch.stack([one[name].abs() for one in step.own]).mean(dim=0)
            allowed = roundings * (relative * size + absolute) * (1 + roundings * relative)
            excess = ((gradient.double() - exact[name]).abs() / (allowed + torch.finfo(torch.float64).tiny)).max()
            if not excess <= 1:
                raise Violation(
                    f"an average within {roundings} roundings to {compression} in step {step.number}",
                    f"{float(excess):.3g} times as much in {name}",
                    step.rank,
                )


@check(
    "C52",
    [*COMPRESSED_HALF, POWERSGD],
    traps="B1",
    world_sizes=SEVERAL,
    promises=["Backend.step: Compressed gradients travel in the bytes"],
)
def compressed_gradients_travel_in_fewer_bytes(evidence: Evidence) -> None:
    """A step sends 2 bytes for each element of a gradient as fp16 or bf16, and less than half of its bytes as PowerSGD.

    Bytes are those of the tensors that enter the communication library. PowerSGD sends whole gradients in its first two
    steps, in which DDP arranges its buckets, and those of vectors and small matrices in all steps.
    """
    for rank, (training,) in enumerate(evidence.ranks):
        elements = training["setup"]["trainable_elements"]
        whole = elements * next(iter(training["setup"]["weights_after"].values())).element_size()
        for number, step in enumerate(training["steps"], start=1):
            sent = sum(
                num_bytes
                for where, operation, _, num_bytes in step["traffic"]
                if where.startswith("backward") or where == "step"
            )
            if not sent:
                raise NotSeen("this adapter's gradients do not enter torch.distributed or Horovod in this thread")
            if evidence.case is not POWERSGD:
                expected = elements * _BYTES[evidence.case.grad_compression]
                if sent != expected:
                    raise Violation(f"{expected} bytes to be sent in step {number}", str(sent), rank)
            elif number > POWERSGD_EXACT_STEPS and not 2 * sent < whole:
                raise Violation(f"less than half of {whole} bytes to be sent in step {number}", str(sent), rank)


@check(
    "C53",
    [POWERSGD],
    traps="B3",
    world_sizes=SEVERAL,
    promises=['Backend.step: With "powersgd", what the average of a step leaves out'],
)
def what_powersgd_leaves_out_comes_later(evidence: Evidence) -> None:
    """With PowerSGD, what the average of one step leaves out is added to the next, so that it is late and not lost.

    The check adds up what the exact averages have and the optimizer was not given. The gradient of a matrix must be
    that of the step and this remainder together, projected onto at most four directions, to 1e-6 in float64: it has
    rank 4, and no part of the sum in its directions is missing. Vectors and small matrices are exact, and so are the
    first two steps. All ranks have the same bits of gradients and weights.
    """
    left_out: Tensors = {}
    compressed: set[str] = set()
    for step in _steps(evidence):
        _require_equal_ranks(evidence, step)
        if step.rank > 0:
            continue
        exact = step.exact
        gradients = {name: gradient.double() for name, gradient in step.seen["gradients"].items()}
        for name, gradient in gradients.items():
            due = exact[name] + left_out.get(name, 0)
            left_out[name] = due - gradient
            if step.number <= POWERSGD_EXACT_STEPS or min(gradient.shape) <= POWERSGD_RANK or gradient.ndim < 2:
                what = f"the exact gradient of {name} in step {step.number}"
                require_close({name: gradient}, {name: exact[name]}, bound(evidence, TIGHT), what=what, rank=step.rank)
                continue
            what = f"the gradient of {name} and what was left out before it, projected, in step {step.number}"
            projected = {name: _projected(due, gradient)}
            require_close({name: gradient}, projected, bound(evidence, 1e-6, 1e-4), what=what, rank=step.rank)
            if float((gradient - due).norm()) > TIGHT * float(due.norm()):
                compressed.add(name)
                directions = int(torch.linalg.matrix_rank(gradient, rtol=_NO_DIRECTION))
                what = f"at most {POWERSGD_RANK} directions of {name} in step {step.number}"
                require(directions <= POWERSGD_RANK, what, str(directions), step.rank)
    if not compressed:
        raise Violation("a matrix that is compressed", "the exact gradient of each")


def _projected(due: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Projects what is due onto the columns' space of the gradient; one that is compressed has few directions."""
    directions, sizes, _ = torch.linalg.svd(gradient, full_matrices=False)
    kept = directions[:, sizes > _NO_DIRECTION * sizes[0]]
    projected: torch.Tensor = kept @ kept.T @ due
    return projected


def _require_equal_ranks(evidence: Evidence, step: _Step) -> None:
    first = evidence.ranks[0][0]["steps"][step.number - 1]
    for kind in ("gradients", "weights"):
        what = f"the bits of the {kind} of rank 0 in step {step.number}"
        require_same_bits(step.seen[kind], first[kind], what=what, rank=step.rank)
    norm = torch.cat([gradient.double().flatten() for gradient in step.seen["gradients"].values()]).norm()
    if not abs(step.seen["grad_norm"] - norm) <= 1e-5 * norm:
        seen = f"{step.seen['grad_norm']:.6g}"
        raise Violation(f"a norm of {float(norm):.6g} in step {step.number}", seen, step.rank)
