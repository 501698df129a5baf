"""State that is saved under one backend and loaded under the same backend or another one."""

from __future__ import annotations

import json
from typing import Any

import torch

from contract.alone import continue_alone
from contract.case import INIT_LOSS_SCALE
from contract.cases import STATE, STATE_BF16, STATE_FP16, STATE_VARIED, WEIGHTS_OF_RANK_0
from contract.check import SEVERAL, Evidence, Violation, check
from contract.checks.judging import bound, require, require_close, require_equal, require_repeated, require_same_bits

_STATES = (STATE, STATE_VARIED, STATE_FP16)
# fp16 rounds by the shape of a micro-batch, which differs between one process and two.
_TOLERANCES = {"fp32": 1e-9, "fp16": 5e-3}


def _saved_after(evidence: Evidence) -> int:
    step = evidence.case.trainings[0].save_after
    assert step is not None
    return step


@check(
    "C39",
    (*_STATES, STATE_BF16),
    traps="G13 R4 K1 K2 K5 K7 K14",
    promises=["Backend.load_state_dict: With the weights and the optimizer's state"],
)
def training_resumes_where_it_was_saved(evidence: Evidence) -> None:
    """A training that loads the state saved after step 3 continues, bit for bit, like one that was not interrupted.

    The state consists of model, optimizer, loss scaler, and the position in the plan and in the schedule. Under fp16, a
    step overflows before the state is saved, so that the loss scale and its counter have changed. Batches are packed in
    two cases, of which the one in bf16 has dropout: its masks must be those of the training that was not interrupted.
    With three ranks or more, weights need to agree to 1e-5 only, since ranks may be summed in another order.
    """
    saved_after = _saved_after(evidence)
    for rank, (whole, resumed, *_) in enumerate(evidence.ranks):
        rest = whole["steps"][saved_after:]
        require_equal(len(resumed["steps"]), len(rest), what="steps left after resuming:", rank=rank)
        for number, (one, other) in enumerate(zip(rest, resumed["steps"], strict=True), start=saved_after + 1):
            for name in ("learning_rates", "skipped"):
                require_equal(other[name], one[name], what=f"{name.replace('_', ' ')} in step {number}:", rank=rank)
            scales = [[micro_batch["scale"] for micro_batch in step["micro_batches"]] for step in (one, other)]
            require_equal(scales[1], scales[0], what=f"loss scales in step {number}:", rank=rank)
            what = f"the weights after step {number} of the training that was not interrupted"
            require_repeated(evidence, other["weights"], one["weights"], what=what, rank=rank)
            what = f"the buffers after step {number} of the training that was not interrupted"
            require_same_bits(other["buffers"], one["buffers"], what=what, rank=rank)


@check(
    "C40",
    _STATES,
    traps="K5 K10",
    promises=["Backend.load_state_dict: State that the single-process backend has saved"],
)
def state_of_one_process_is_loaded(evidence: Evidence) -> None:
    """The adapter loads state that the single-process backend has saved, and training continues as it does there."""
    saved_after = _saved_after(evidence)
    alone: dict[str, Any] = evidence.memory["alone"]
    rest = alone["steps"][saved_after:]
    for rank, (_, _, resumed) in enumerate(evidence.ranks):
        require_equal(len(resumed["steps"]), len(rest), what="steps left after resuming:", rank=rank)
        for number, (one, other) in enumerate(zip(rest, resumed["steps"], strict=True), start=saved_after + 1):
            require_equal(
                other["micro_batches"][0]["scale"],
                one["micro_batches"][0]["scale"],
                what=f"a loss scale in step {number} of",
                rank=rank,
            )
            tolerance = bound(evidence, _TOLERANCES[evidence.case.precision])
            require_close(other["weights"], one["weights"], tolerance, what=f"weights after step {number}", rank=rank)


@check(
    "C41",
    _STATES,
    traps="K5 K10",
    promises=["Backend.weights: The names are those", "Backend.state_dict: The single-process backend loads the state"],
)
def state_is_loaded_by_one_process(evidence: Evidence) -> None:
    """The single-process backend loads state that the adapter has saved, and training continues as it does here.

    The state of the loss scaler is the one that the single-process backend has saved in the same training, its count of
    steps without an overflow included.
    """
    saved_after = _saved_after(evidence)
    whole = evidence.ranks[0][0]
    scaler = evidence.memory["alone"]["state"]["backend"]
    saved = {name: whole["state"]["backend"].get(name) for name in scaler}
    require_equal(saved, scaler, what="the loss scaler as the single-process backend saves it:")
    try:
        resumed = continue_alone(
            evidence.case, evidence.world_size, whole["state"], device=evidence.device, float64=evidence.float64
        )
    except (RuntimeError, KeyError, ValueError) as error:
        raise Violation("state that the single-process backend can load", " ".join(str(error).split())[:200]) from error
    rest = whole["steps"][saved_after:]
    require_equal(len(resumed["steps"]), len(rest), what="steps left after resuming:")
    for number, (one, other) in enumerate(zip(rest, resumed["steps"], strict=True), start=saved_after + 1):
        tolerance = bound(evidence, _TOLERANCES[evidence.case.precision])
        require_close(other["weights"], one["weights"], tolerance, what=f"weights after step {number}", rank=0)
        scales = [step["micro_batches"][0]["scale"] for step in (one, other)]
        require_equal(scales[1], scales[0], what=f"a loss scale in step {number} of")


@check(
    "C42",
    # Each rank has buffers of its own in the other one.
    (STATE, STATE_FP16),
    traps="K8 K9",
    promises=["Backend.state_dict: The state consists of", "Backend.state_dict: Under fp16, the state contains"],
)
def state_is_plain_data(evidence: Evidence) -> None:
    """Saved state consists of plain data and of the tensors of the model, and is equal on all ranks.

    Loading it runs no code: torch.load reads it with weights_only, which refuses everything else. What `state_dict` of
    the adapter returns is the same after it was written as JSON and read again, since a checkpoint holds it so: it has
    no tensors, no numbers as keys, and nothing that is not finite. Under fp16, it contains the loss scale in force.
    """
    for rank, (whole, *_) in enumerate(evidence.ranks):
        state = whole["state"]
        _require_plain(state, "state", rank)
        _require_json(state["backend"], rank)
        first = evidence.ranks[0][0]["state"]
        require_same_bits(state["model"], first["model"], what="the saved weights of rank 0", rank=rank)
        require_equal(state["backend"], first["backend"], what="the saved loss scaler of rank 0:", rank=rank)
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


def _require_json(state: Any, rank: int) -> None:
    """Demands of the adapter's state that a checkpoint can hold it."""
    try:
        read = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise Violation("a loss scaler that JSON can hold", " ".join(str(error).split())[:200], rank) from error
    require_equal(read, state, what="the saved loss scaler, written as JSON and read again:", rank=rank)


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in _numbers(item)]
    return [value] if isinstance(value, (int, float)) else []


@check(
    "C47",
    WEIGHTS_OF_RANK_0,
    traps="K12",
    world_sizes=SEVERAL,
    promises=["Backend.weights: A rank may call it alone", "Backend.state_dict: A rank may call it alone"],
)
def rank_0_saves_alone(evidence: Evidence) -> None:
    """`weights` and `state_dict` return on rank 0 although no other rank calls them.

    In a training, rank 0 alone saves while the others go on. An adapter that gathers or compares something there passes
    as long as all ranks call it, and waits for ever in a training. The other ranks look for three seconds, on an idle
    machine, whether rank 0 has returned.
    """
    is_alone = all(seen["is_alone"] for seen in evidence.ranks)
    require(is_alone, "`weights` and `state_dict` to return on rank 0 alone", "that it waits for the other ranks", 0)
