"""What in a model makes several ranks compute something else than one process, whichever the backend."""

from __future__ import annotations

from torch import nn


def likely_causes(model: nn.Module) -> list[str]:
    """Names the layers whose result depends on how a batch is split, a sentence for each kind.

    Args:
        model: A model as its task builds it.
    """
    found = []
    norms = [name for name, module in model.named_modules() if _has_batch_statistics(module)]
    if norms:
        found.append(
            f"{_counted(norms, 'layer')} {_verb(norms, 'normalises', 'normalise')} each micro-batch by its own "
            f"statistics ({_listed(norms)}), so that the result depends on how a batch is split; use GroupNorm or "
            "LayerNorm, or statistics that all ranks compute together"
        )
    dropouts = [name for name, module in model.named_modules() if _drops(module)]
    if dropouts:
        found.append(
            f"{_counted(dropouts, 'layer')} {_verb(dropouts, 'drops', 'drop')} elements at random "
            f"({_listed(dropouts)}), on each rank others; give the task an option called dropout, which a trial can "
            "set to 0"
        )
    return found


def _has_batch_statistics(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm)


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0


def _counted(names: list[str], noun: str) -> str:
    return f"{len(names)} {noun}{'s' * (len(names) > 1)}"


def _verb(names: list[str], one: str, several: str) -> str:
    return one if len(names) == 1 else several


def _listed(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
