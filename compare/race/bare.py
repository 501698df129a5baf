"""Loops written by hand as entrants: which backends have one, and what it supports."""

from __future__ import annotations

from importlib.util import find_spec

from backends.devices import count_gpus
from backends.registry import BACKENDS
from compare.race.own_entrants import OF_A_RUN
from compare.race.plan import Entrant
from launch.errors import UsageError
from launch.options import own_options
from records.config import RunConfig


def add_loops(configs: dict[Entrant, RunConfig], left_out: list[str]) -> None:
    """Adds, for each backend that takes part, the loop that was written by hand for its library.

    Args:
        configs: The configuration of each entrant, which a loop shares with the adapter.
        left_out: Receives one line for each entrant whose loop cannot take part.

    Raises:
        UsageError: There is no loop that can.
    """
    reasons = []
    for entrant, config in list(configs.items()):
        if entrant.role != "backend":
            continue
        if _has_settings_of_library(entrant):
            reasons.append(
                f"{entrant.label}: has no loop written by hand beside it: a loop takes no variables, and of an "
                f"entrant's own options only {', '.join(OF_A_RUN)}"
            )
            continue
        loop = entrant.model_copy(update={"role": "bare"})
        reason = why_no_loop(config)
        if reason is None:
            configs[loop] = config
        else:
            reasons.append(f"{loop.label}: left out, {reason}")
    if not any(entrant.role == "bare" for entrant in configs):
        raise UsageError(f"--bare: no loop written by hand can take part; {(reasons or ['no backend does'])[0]}")
    left_out += reasons


def _has_settings_of_library(entrant: Entrant) -> bool:
    """Whether an entrant differs from its backend as it comes in something that the library is told."""
    return bool(entrant.variables) or any(option.partition("=")[0] not in OF_A_RUN for option in entrant.options)


def why_no_loop(config: RunConfig) -> str | None:
    """Says in one line why the loop of a backend cannot do what a run does; None if it can."""
    backend = config.backend
    if backend not in BACKENDS or find_spec(f"compare.bare.{backend}") is None:
        return f"no loop was written by hand for {backend}"
    wanted = {
        "--optimizer adamw": config.optimizer == "adamw",
        "--lr-scheduler linear": config.lr_scheduler == "linear",
        "--on-nan stop": config.on_nan == "stop",
        "--no-torch-compile": not config.torch_compile,
        "--no-sync-batchnorm": not config.sync_batchnorm,
        "--grad-compression none": config.grad_compression == "none",
        "--no-find-unused-parameters": not config.find_unused_parameters,
        "one rank on each GPU": config.device == "cpu" or config.num_processes <= count_gpus(),
        "the library's own defaults": not own_options(backend, config.backend_settings),
    }
    missing = [name for name, is_met in wanted.items() if not is_met]
    return f"its loop supports only {', '.join(missing)}" if missing else None
