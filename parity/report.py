"""What came of a trial, in words and as facts for a file."""

from __future__ import annotations

from typing import Any

from parity.trial import Outcome, Trial
from records.environment import describe_environment


def describe(trial: Trial, outcome: Outcome, causes: list[str]) -> list[str]:
    """Returns lines for people, the most important first.

    Args:
        trial: What was tried.
        outcome: What came of it.
        causes: What in the model explains a difference, a sentence each.
    """
    lines = [_verdict(trial, outcome), outcome.parity.detail, *(f"a likely cause: {cause}" for cause in causes)]
    if outcome.parity.verdict == "unknown" and trial.config.precision == "fp16":
        lines.append(
            "what overflows depends on how a batch is split; give a smaller --init-loss-scale than "
            f"{trial.config.init_loss_scale:g}, such as 1024"
        )
    return lines


def _verdict(trial: Trial, outcome: Outcome) -> str:
    config, parity = trial.config, outcome.parity
    ranks = "1 rank" if config.num_processes == 1 else f"{config.num_processes} ranks"
    who = f"{config.backend} on {ranks}"
    if outcome.is_same:
        how = "bit for bit" if parity.verdict == "bitwise" else "up to rounding"
        return f"SAME: {who} trains what one process trains, {how}, in each of {trial.num_steps} steps"
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
    shown = ("backend", "num_processes", "precision", "global_batch_size", "micro_batch_size", "batching", "task")
    return {
        "schema_version": 1,
        **config.model_dump(mode="json", include=set(shown)),
        "num_steps": trial.num_steps,
        "left_out": trial.left_out,
        **outcome.parity.model_dump(),
        "causes": causes,
        "warnings": outcome.warnings,
        "environment": describe_environment(with_torch=False).model_dump(mode="json"),
    }
