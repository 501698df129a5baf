"""What in a model makes several ranks compute something else than one process, whichever the backend."""

from __future__ import annotations

from torch import nn

from parity.trial import Outcome, Trial
from parity.verdict import Parity
from tasks.interface import Task
from training.batch_norm import batch_norms


def causes_of(trial: Trial, task: Task) -> list[str]:
    """Names the layers of a trial's model whose result depends on how a batch is split, a sentence for each kind.

    Args:
        trial: The trial.
        task: Its task, prepared.
    """
    own = type(task)(type(task).Settings.model_validate(dict(trial.task_settings)))
    own.prepare()
    config, model = trial.config, own.build_model()
    found = []
    if config.num_processes > 1 and not config.sync_batchnorm:
        found += normalising(model)
    if not task.describe().get("dropout_by_sample"):
        found += dropping(model)
    return found


def in_view_of(outcome: Outcome, causes: list[str]) -> Outcome:
    """Calls nothing the same, up to rounding, that depends on chance: a second reference then measures no rounding."""
    if outcome.parity.verdict != "rounding" or not causes:
        return outcome
    detail = f"the results agree ({outcome.parity.detail}), but only as far as chance allows"
    return outcome._replace(parity=Parity(verdict="unknown", detail=detail))


def normalising(model: nn.Module) -> list[str]:
    """Says which layers normalise by statistics of a micro-batch, in at most one sentence."""
    names = list(batch_norms(model.train()))
    if not names:
        return []
    return [
        f"{_counted(names)} {_verb(names, 'normalises', 'normalise')} each micro-batch by its own statistics "
        f"({_listed(names)}), so that the result depends on how a batch is split; give --sync-batchnorm, or use "
        "GroupNorm or LayerNorm"
    ]


def dropping(model: nn.Module) -> list[str]:
    """Says which layers drop elements at random, in at most one sentence."""
    names = [name for name, module in model.named_modules() if _drops(module)]
    if not names:
        return []
    return [
        f"{_counted(names)} {_verb(names, 'drops', 'drop')} elements at random ({_listed(names)}), on each rank "
        "others; give the task an option called dropout, which a trial can set to 0"
    ]


def _drops(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and module.dropout > 0


def _counted(names: list[str]) -> str:
    return f"{len(names)} layer{'s' * (len(names) > 1)}"


def _verb(names: list[str], one: str, several: str) -> str:
    return one if len(names) == 1 else several


def _listed(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
