"""State that is saved under one backend and loaded under the same or another."""

from __future__ import annotations

from typing import Any

import torch

from contract.alone import continue_alone
from contract.cases import INIT_LOSS_SCALE, STATE, STATE_FP16
from contract.check import Evidence, Violation, check
from contract.checks.judging import require_close, require_equal, require_repeated, require_same_bits

_STATES = (STATE, STATE_FP16)
# fp16 rounds by the shape of a micro-batch, which differs between one process and two.
_TOLERANCES = {"fp32": 1e-9, "fp16": 5e-3}


def _saved_after(evidence: Evidence) -> int:
    step = evidence.case.trainings[0].save_after
    assert step is not None
    return step


@check("C39", _STATES, traps="G13 R4 K1 K2 K5 K7 K14")
def state_resumes_where_it_was(evidence: Evidence) -> None:
    """State saved after step 3 and loaded into a fresh training gives, bit for bit, the rest of the unbroken one.

    Model, optimizer, loss scaler, position in plan and schedule. Under fp16 an overflow comes
    before the save, so that the scale and its counter are no longer what they began as. From three
    ranks on weights are the same to 1e-5 only: sums over ranks may then have another order.
    """
    saved_after = _saved_after(evidence)
    for rank, (whole, resumed, _) in enumerate(evidence.ranks):
        rest = whole["steps"][saved_after:]
        require_equal(len(resumed["steps"]), len(rest), what="steps left after resuming:", rank=rank)
        for number, (one, other) in enumerate(zip(rest, resumed["steps"], strict=True), start=saved_after + 1):
            for name in ("learning_rates", "skipped"):
                require_equal(other[name], one[name], what=f"in step {number} {name.replace('_', ' ')}", rank=rank)
            scales = [[micro_batch["scale"] for micro_batch in step["micro_batches"]] for step in (one, other)]
            require_equal(scales[1], scales[0], what=f"in step {number} loss scales", rank=rank)
            what = f"after step {number} the weights of the unbroken run"
            require_repeated(evidence, other["weights"], one["weights"], what=what, rank=rank)


@check("C40", _STATES, traps="K5 K10")
def state_of_one_process_is_understood(evidence: Evidence) -> None:
    """State saved by the single-process backend is loaded, and training goes on as there."""
    saved_after = _saved_after(evidence)
    alone: dict[str, Any] = evidence.memory["single"]
    rest = alone["steps"][saved_after:]
    for rank, (_, _, resumed) in enumerate(evidence.ranks):
        require_equal(len(resumed["steps"]), len(rest), what="steps left after resuming:", rank=rank)
        for number, (one, other) in enumerate(zip(rest, resumed["steps"], strict=True), start=saved_after + 1):
            require_equal(
                other["micro_batches"][0]["scale"],
                one["micro_batches"][0]["scale"],
                what=f"in step {number} a loss scale of",
                rank=rank,
            )
            tolerance = _TOLERANCES[evidence.case.precision]
            require_close(other["weights"], one["weights"], tolerance, what=f"after step {number} weights", rank=rank)


@check("C41", _STATES, traps="K5 K10")
def state_is_understood_by_one_process(evidence: Evidence) -> None:
    """State saved under this backend is loaded by the single-process backend, and training goes on as here."""
    saved_after = _saved_after(evidence)
    whole = evidence.ranks[0][0]
    try:
        resumed = continue_alone(evidence.case, evidence.world_size, whole["state"], device=evidence.device)
    except (RuntimeError, KeyError, ValueError) as error:
        raise Violation("state that the single-process backend can load", " ".join(str(error).split())[:200]) from error
    rest = whole["steps"][saved_after:]
    require_equal(len(resumed["steps"]), len(rest), what="steps left after resuming:")
    for number, (one, other) in enumerate(zip(rest, resumed["steps"], strict=True), start=saved_after + 1):
        tolerance = _TOLERANCES[evidence.case.precision]
        require_close(other["weights"], one["weights"], tolerance, what=f"after step {number} weights", rank=0)
        scales = [step["micro_batches"][0]["scale"] for step in (one, other)]
        require_equal(scales[1], scales[0], what=f"in step {number} a loss scale of")


@check("C42", _STATES, traps="K8 K9")
def state_is_plain_data(evidence: Evidence) -> None:
    """State consists of tensors, numbers, strings, lists and dictionaries, equal on all ranks: loading it runs no code.

    It is read back with torch.load's weights_only, which refuses everything else. Under fp16 it
    holds the loss scale that is in force.
    """
    for rank, (whole, *_) in enumerate(evidence.ranks):
        state = whole["state"]
        _require_plain(state, "state", rank)
        first = evidence.ranks[0][0]["state"]
        require_same_bits(state["model"], first["model"], what="the saved weights of rank 0", rank=rank)
        require_equal(state["backend"], first["backend"], what="the saved scaler of rank 0,", rank=rank)
    if evidence.case.precision == "fp16":
        numbers = [float(value) for value in _numbers(evidence.ranks[0][0]["state"]["backend"])]
        if INIT_LOSS_SCALE / 2 not in numbers:
            raise Violation(f"the loss scale {INIT_LOSS_SCALE / 2:g} in the saved state", str(numbers)[:200])


def _require_plain(value: Any, path: str, rank: int) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _require_plain(item, f"{path}[{key!r}]", rank)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _require_plain(item, f"{path}[{index}]", rank)
    elif not isinstance(value, (torch.Tensor, bool, int, float, str, type(None))):
        raise Violation("plain data", f"{type(value).__name__} at {path}", rank)


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in _numbers(item)]
    if isinstance(value, torch.Tensor):
        return [float(value)] if value.numel() == 1 else []
    return [value] if isinstance(value, (int, float)) else []
