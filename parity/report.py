"""What came of a trial, in words and as facts for a file."""

from __future__ import annotations

from typing import Any

from parity.trial import Outcome, Trial


def describe(trial: Trial, outcome: Outcome, causes: list[str]) -> list[str]:
    """Returns lines for people, the most important first.

    Args:
        trial: What was tried.
        outcome: What came of it.
        causes: What in the model explains a difference, a sentence each.
    """
    return [_verdict(trial, outcome), outcome.parity.detail, *(f"a likely cause: {cause}" for cause in causes)]


def _verdict(trial: Trial, outcome: Outcome) -> str:
    config, parity = trial.config, outcome.parity
    ranks = "1 rank" if config.num_processes == 1 else f"{config.num_processes} ranks"
    who = f"{config.backend} on {ranks}"
    if outcome.is_same:
        steps = trial.num_steps if parity.num_steps is None else parity.num_steps
        how = "bit for bit" if parity.verdict == "bitwise" else "up to rounding"
        return f"SAME: {who} trains what one process trains, {how}, in each of {steps} steps"
    if parity.verdict == "approximate":
        return f"APPROXIMATE: {who} does not train what one process trains, since its gradients are compressed"
    if parity.verdict == "unknown":
        return f"UNKNOWN: it cannot be told whether {who} trains what one process trains"
    where = "" if parity.first_step is None else f", from step {parity.first_step} on"
    which = "" if parity.parameter is None else f", first in {parity.parameter}"
    return f"DIFFERENT: {who} does not train what one process trains{where}{which}"


def as_facts(trial: Trial, outcome: Outcome, causes: list[str]) -> dict[str, Any]:
    """Returns the same as plain facts, which can be written as JSON."""
    config = trial.config
    shown = (
        "backend",
        "num_processes",
        "device",
        "precision",
        "global_batch_size",
        "micro_batch_size",
        "batching",
        "task",
    )
    return {
        **config.model_dump(mode="json", include=set(shown)),
        "num_steps": trial.num_steps if outcome.parity.num_steps is None else outcome.parity.num_steps,
        "left_out": trial.left_out,
        **outcome.parity.model_dump(exclude={"num_steps"}),
        "causes": causes,
        "warnings": outcome.warnings,
    }
