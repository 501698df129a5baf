"""What a backend declares of itself: what it supports, what it cannot keep, its own options, the signs of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict

PRECISIONS = ("fp32", "bf16", "fp16")
# In which gradients may travel instead of their own dtype.
COMPRESSIONS = ("fp16", "bf16", "powersgd")


class UnsupportedError(ValueError):
    """A backend does not support what was asked for; the message names the value and a remedy."""


class Place(NamedTuple):
    """Where ranks compute.

    Attributes:
        device: "cpu" or "cuda".
        num_nodes: On how many nodes.
    """

    device: str
    num_nodes: int


class BackendSettings(BaseModel):
    """The options of one backend alone: each field is a command-line option of the same name. Most have none."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    of_collectives: ClassVar[frozenset[str]] = frozenset()
    """The names of those options that change how the collectives of the library run, outside a training, too."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Refuses names of options that do not exist.

        Raises:
            TypeError: One does not.
        """
        if unknown := cls.of_collectives - set(cls.model_fields):
            raise TypeError(f"{cls.__name__}.of_collectives: there is no option {', '.join(sorted(unknown))}")

    @property
    def implied_precision(self) -> str | None:
        """The precision that these options imply when the user does not choose one, or None."""
        return None

    @property
    def keeps_core_busy(self) -> bool:
        """Whether a rank polls while it waits for others, so that its core is not free for them."""
        return False

    def check(self, *, precision: str, optimizer: str, grad_compression: str, place: Place) -> None:
        """Refuses options that contradict those that all backends share.

        Args:
            precision: The precision of the run, one of `PRECISIONS`.
            optimizer: The name of the optimizer.
            grad_compression: In what gradients travel, one of `COMPRESSIONS` or "none".
            place: Where ranks compute.

        Raises:
            UnsupportedError: Two options contradict each other; the message names the value and a remedy.
        """

    def check_machine(self, *, start_method: str) -> None:
        """Refuses options, and variables that the library reads, with which it cannot run on this machine.

        Args:
            start_method: The name of what starts the ranks.

        Raises:
            UnsupportedError: It cannot; the message names the value and a remedy.
        """


@dataclass(frozen=True)
class Capabilities:
    """What a backend supports.

    - A request that is not declared here is refused with a message that names the value, before any rank starts.

    Attributes:
        precisions: For each device type ("cpu", "cuda"), the precisions in which the backend really computes.
        start_methods: The starters that can start the backend's ranks, the default first.
        max_world_size: The largest number of ranks; None means that there is no limit.
        ranks_may_share_gpu: Whether several ranks may use the same GPU.
        unused_parameters: Whether the backend supports `find_unused_parameters`.
        compiled_models: Whether the backend supports models compiled with torch.compile.
        shards_weights: Whether each rank holds only a part of each weight, of its gradient and of its optimizer state,
            so that all ranks must take part where a whole tensor is needed, and in each forward pass.
        shards_optimizer: Whether each rank holds all weights, and of the optimizer state a part only. All ranks must
            then take part where whole state is needed.
        float64: Whether gradients in float64 are averaged; the contract then judges them to the last digits.
        compressions: In what gradients may travel, besides their own dtype.
        sync_batchnorm: Whether all ranks may reduce in the middle of forward and backward passes (--sync-batchnorm).
        gpus_depend_on_build: Whether the backend's library supports GPUs on one machine and not on another, by how it
            was built there.
        cuts_batches: Whether the backend itself cuts each batch into shares along its first dimension, so that samples
            must not follow one another in one row.
        reasons: The reason, which a refusal quotes: for a device type or a precision that is not supported, for
            "num_processes", or for "grad_compression" where there are no compressions.
    """

    precisions: Mapping[str, tuple[str, ...]]
    start_methods: tuple[str, ...]
    max_world_size: int | None = None
    ranks_may_share_gpu: bool = False
    unused_parameters: bool = True
    compiled_models: bool = True
    shards_weights: bool = False
    shards_optimizer: bool = False
    float64: bool = True
    compressions: tuple[str, ...] = ()
    sync_batchnorm: bool = True
    gpus_depend_on_build: bool = False
    cuts_batches: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def shards_state(self) -> bool:
        """Whether no rank alone holds the whole state of a training, so that saving it takes all of them."""
        return self.shards_weights or self.shards_optimizer

    def waits_in_forward(self, *, sync_batchnorm: bool) -> bool:
        """Returns whether ranks wait for each other in the forward pass, too.

        Args:
            sync_batchnorm: Whether layers take statistics of all ranks.
        """
        return sync_batchnorm or self.shards_weights

    def check(
        self,
        *,
        name: str,
        device: str,
        precision: str,
        world_size: int = 1,
        find_unused_parameters: bool = False,
        grad_compression: str = "none",
    ) -> None:
        """Refuses what the backend does not support.

        Args:
            name: The backend's name, for the message.
            device: The device type, "cpu" or "cuda".
            precision: The precision to compute in.
            world_size: The number of ranks.
            find_unused_parameters: Whether some parameters may get no gradient in a step.
            grad_compression: In what gradients travel, or "none".

        Raises:
            UnsupportedError: One of these is not supported; the message names it and a remedy.
        """
        if device not in self.precisions:
            raise UnsupportedError(
                f"--device {device}: {name} supports only {', '.join(self.precisions)}{self._why(device)}; "
                "choose one of these or another backend"
            )
        if precision not in self.precisions[device]:
            raise UnsupportedError(
                f"--precision {precision}: {name} cannot compute in {precision} on {device}{self._why(precision)}; "
                f"choose {' or '.join(self.precisions[device])}"
            )
        if self.max_world_size is not None and world_size > self.max_world_size:
            raise UnsupportedError(
                f"--num-processes {world_size}: {name} runs at most {self.max_world_size} process(es)"
                f"{self._why('num_processes')}; choose another backend for more"
            )
        if find_unused_parameters and not self.unused_parameters:
            raise UnsupportedError(
                f"--find-unused-parameters: {name} does not support it; "
                "freeze unused parameters or choose another backend"
            )
        if grad_compression not in ("none", *self.compressions):
            why = self._why("grad_compression")
            raise UnsupportedError(
                f"--grad-compression {grad_compression}: {name} cannot send gradients as {grad_compression}{why}; "
                f"choose {' or '.join(('none', *self.compressions))}, or another backend"
            )

    def _why(self, what: str) -> str:
        return f" ({self.reasons[what]})" if what in self.reasons else ""


@dataclass(frozen=True)
class KnownFailure:
    """A clause of the contract that an adapter cannot keep because of a bug in the library.

    Attributes:
        reason: What goes wrong, in one line.
        link: The address of a report or a description of the bug.
    """

    reason: str
    link: str


@dataclass(frozen=True)
class Signs:
    """How the launcher recognises from outside that a rank waits for other ranks, or has lost one.

    Attributes:
        waiting: Folders in site-packages, and files of the adapter, which end with ".py"; a rank whose innermost
            Python frame is in one of them waits for other ranks.
        lost_peer: Phrases of the errors that the library raises when another rank has ended or does not answer.
    """

    waiting: tuple[str, ...] = ()
    lost_peer: tuple[str, ...] = ()


# Of torch.distributed, which most adapters communicate through.
TORCH_SIGNS = Signs(
    waiting=("torch/distributed", "torch/nn/parallel"),
    lost_peer=(
        *("connectFullMesh failed", "remote process exited", "Watchdog caught collective operation timeout"),
        *("DistNetworkError", "DistStoreError", "DistBackendError"),
    ),
)
