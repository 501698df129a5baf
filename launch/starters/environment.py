"""The environment that ranks are started in: the user's, without variables that would change a run unnoticed."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from launch.nodes import interface
from launch.starters.interface import PROJECT_DIRECTORY, Ranks, Starter
from launch.starters.registry import STARTERS
from records.config import STARTED_AT_VARIABLE

# fp32 must mean fp32: NVIDIA's images turn on TF32, whose mantissa has ten bits.
EXACT_FLOAT32 = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0", "NVIDIA_TF32_OVERRIDE": "0"}

# Variables of Python that would change a rank unnoticed.
_PYTHON_VARIABLES = ("PYTHONWARNINGS", "PYTHONSTARTUP", "PYTHONINSPECT")

# What DeepSpeed computes on, whatever the run says; Accelerate imports it where it is installed.
_DEEPSPEED_VARIABLES = ("DS_ACCELERATOR",)

# Variables that have a value of their own in every job, and where ranks are to find no GPU.
_OF_EVERY_JOB = (
    *EXACT_FLOAT32,
    *("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "GLOO_SOCKET_IFNAME"),
    *("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "HF_HUB_DISABLE_TELEMETRY"),
)
_OF_GPUS = "CUDA_VISIBLE_DEVICES"


def starter_environment(starter: Starter, ranks: Ranks) -> dict[str, str]:
    """Returns the environment for a starter's command."""
    environment = {name: value for name, value in os.environ.items() if not is_settled(name, ranks.device)}
    environment["PYTHONPATH"] = _python_path()
    # Those of _OF_EVERY_JOB, and no others.
    environment |= {
        **EXACT_FLOAT32,
        "OMP_NUM_THREADS": str(ranks.num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        # A file in the working directory cannot take the place of a library.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        # The ranks of one node meet on the loopback interface, whatever address its host name has; those of several
        # nodes meet on the interface that leads to node 0.
        "GLOO_SOCKET_IFNAME": interface(ranks.nodes),
        # Rank 0 may still save after another rank is lost; torchrun would end it after half a minute.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(30, round(ranks.timeout_seconds))),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    if ranks.device == "cpu":
        environment[_OF_GPUS] = ""
    if ranks.preload is not None:
        # Before what the user's own names: ld.so(8).
        environment["LD_PRELOAD"] = " ".join([ranks.preload, *environment.get("LD_PRELOAD", "").split()])
    return environment | starter.environment(ranks)


def is_settled(name: str, device: str) -> bool:
    """Whether the ranks of a job do not get an environment variable as the user has set it.

    Args:
        name: The variable.
        device: "cpu" or "cuda", which the ranks compute on.
    """
    return (
        describes_ranks(name)
        or name in _PYTHON_VARIABLES
        or name in _DEEPSPEED_VARIABLES
        or name in _OF_EVERY_JOB
        or (name == _OF_GPUS and device == "cpu")
    )


def describes_ranks(name: str) -> bool:
    """Whether an environment variable of this name is one by which some starter describes its ranks."""
    variables = [variable for starter in STARTERS.values() for variable in starter.variables]
    return name in variables or name.startswith(tuple(variable for variable in variables if variable.endswith("_")))


def rank_of_process() -> int:
    """Returns the rank that a starter has given this process, 0 if none has: for tasks that act on one rank only."""
    variables = [starter.rank_variable for starter in STARTERS.values() if starter.rank_variable is not None]
    return next((int(os.environ[name]) for name in variables if name in os.environ), 0)


def command_environment() -> dict[str, str]:
    """Returns the environment for Lockstep's own command line in another process."""
    # With PYTHONSAFEPATH no file in the user's directory is imported in place of a module.
    environment = {**os.environ, "PYTHONPATH": _python_path(), "PYTHONSAFEPATH": "1"}
    environment.pop(STARTED_AT_VARIABLE, None)  # the time of a run begins with its own command
    return environment


def _python_path() -> str:
    """Returns PYTHONPATH for processes that may run in another directory: the user's paths, made absolute.

    The project comes first, so that no module of the user's, such as a training.py, takes the place of one of ours.
    """
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    is_editable = str(PROJECT_DIRECTORY) != sysconfig.get_path("purelib")
    return os.pathsep.join(
        [*([str(PROJECT_DIRECTORY)] if is_editable else []), *(str(Path(path).absolute()) for path in paths)]
    )
