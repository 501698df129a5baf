"""The table of peers: what each is, what it can do, and in which variants it takes part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from pydantic import Field

from backends.capabilities import PRECISIONS, BackendSettings, Capabilities
from backends.registry import BackendRow
from launch.errors import UsageError
from launch.starters.torchrun import Torchrun
from records.config import RunConfig
from tasks.interface import HuggingFaceData, Task

# The program of each rank of a peer. Only where it runs does a name mean a peer, since a backend may have the same.
PEER_PROGRAM = "compare.race.peers.rank"


class TrainerSettings(BackendSettings):
    """The options of transformers.Trainer in which its variants differ."""

    train_sampling_strategy: Literal["random", "group_by_length"] = Field(
        "random", description="which samples make a batch: any, or those of about the same length"
    )


@dataclass(frozen=True)
class Peer:
    """One trainer of another library.

    Attributes:
        row: What would be known of it if it were a backend; its adapter is the function that trains.
        variants: The options of each variant, by what a report calls it; the first is the library as it comes.
    """

    row: BackendRow
    variants: Mapping[str, tuple[str, ...]]


def _capabilities() -> Capabilities:
    return Capabilities(
        {"cpu": ("fp32", "bf16"), "cuda": PRECISIONS},
        start_methods=(Torchrun.name,),
        reasons={"fp16": "it scales no losses there"},
    )


def _missing(module: str, requirement: str) -> str | None:
    return None if find_spec(module) else f"{module} is not installed; pip install '{requirement}'"


PEERS = {
    "trainer": Peer(
        BackendRow(
            "compare.race.peers.trainer:train",
            "transformers.Trainer under torchrun",
            _capabilities,
            lambda: _missing("transformers", "transformers>=5.20") or _missing("accelerate", "accelerate>=1.15,<2"),
            settings=TrainerSettings,
            packages=("transformers", "accelerate"),
        ),
        {
            "transformers.Trainer": (),
            "transformers.Trainer grouped by length": ("--train-sampling-strategy=group_by_length",),
        },
    ),
    "fabric": Peer(
        BackendRow(
            "compare.race.peers.fabric:train",
            "Lightning Fabric under torchrun",
            _capabilities,
            lambda: _missing("lightning_fabric", "lightning-fabric>=2.6,<3"),
            packages=("lightning-fabric",),
        ),
        {"Lightning Fabric": ()},
    ),
}


def find_peer(name: str) -> Peer:
    """Looks up a peer that can run here.

    Raises:
        UsageError: There is no such peer, or its library is not installed.
    """
    if name not in PEERS:
        raise UsageError(f"--peers {name}: there is no such peer; choose {', '.join(PEERS)}")
    reason = PEERS[name].row.unavailable_reason()
    if reason is not None:
        raise UsageError(f"--peers {name}: cannot run here: {reason}")
    return PEERS[name]


def check_peer(name: str, task: Task, config: RunConfig) -> None:
    """Refuses a training that a peer cannot do.

    Raises:
        UsageError: The task does not have its samples in the form that the peer takes.
    """
    if not isinstance(task, HuggingFaceData):
        methods = ("hugging_face_dataset", "hugging_face_model", "hugging_face_tokenizer")
        wanted = [method for method in methods if not hasattr(task, method)]
        raise UsageError(
            f"--peers {name}: the task {config.task} has no {' and no '.join(wanted)}, which a peer takes its samples "
            "from (see tasks/interface.py); leave --peers out, or choose another task"
        )
