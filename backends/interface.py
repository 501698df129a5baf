"""The interface every backend adapter implements.

The training loop owns the mathematics: which samples make a global batch, how they are split,
how the loss is normalised, the clipping threshold, the learning rate. An adapter owns the
communication and the loss scaling: wrapping, when gradients move, what an overflow does, and the
order of synchronise, unscale, clip, step and update. It never divides by accumulation steps and
never changes a hyper-parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import torch
    from torch import nn

    from backends.collectives import Prepare

PRECISIONS = ("fp32", "bf16", "fp16")


class BackendSettings(BaseModel):
    """A backend's own options; each field is a command-line option of the same name. Most have none."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @property
    def implied_precision(self) -> str | None:
        """The precision these options ask for by themselves, where the user names none."""
        return None

    def check(self, *, precision: str, optimizer: str) -> None:
        """Refuses what does not go together with the options all backends share.

        Raises:
            UnsupportedError: The text names the value and a remedy.
        """


class UnsupportedError(ValueError):
    """A request that a backend declares it cannot serve; the text names the value and a remedy."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do, declared so that everything else is refused before any work starts.

    Attributes:
        precisions: For each device type ("cpu", "cuda"), the precisions it really computes in.
        start_methods: What can start its ranks, the default first.
        max_world_size: The largest number of ranks, None when unlimited.
        ranks_may_share_gpu: Whether there may be more ranks than GPUs.
        unused_parameters: Whether `find_unused_parameters` is possible.
        compiled_models: Whether the model may have been compiled with torch.compile.
        reasons: Why some precision is left out, for the refusal.
    """

    precisions: Mapping[str, tuple[str, ...]]
    start_methods: tuple[str, ...]
    max_world_size: int | None = None
    ranks_may_share_gpu: bool = False
    unused_parameters: bool = True
    compiled_models: bool = True
    reasons: Mapping[str, str] = field(default_factory=dict)

    def check(
        self, *, name: str, device: str, precision: str, world_size: int = 1, find_unused_parameters: bool = False
    ) -> None:
        """Refuses what is not declared.

        Raises:
            UnsupportedError: The backend `name` cannot run with these settings.
        """
        if device not in self.precisions:
            raise UnsupportedError(
                f"{name} does not run on {device} (it runs on {', '.join(self.precisions)}); choose another backend"
            )
        if precision not in self.precisions[device]:
            why = f" ({self.reasons[precision]})" if precision in self.reasons else ""
            raise UnsupportedError(
                f"--precision {precision}: {name} cannot compute in {precision} on {device}{why}; "
                f"choose {' or '.join(self.precisions[device])}"
            )
        if self.max_world_size is not None and world_size > self.max_world_size:
            raise UnsupportedError(
                f"--num-processes {world_size}: {name} runs at most {self.max_world_size} process(es); "
                "choose another backend for more"
            )
        if find_unused_parameters and not self.unused_parameters:
            raise UnsupportedError(f"--find-unused-parameters: {name} cannot; freeze the parameters that are not used")


@dataclass(frozen=True)
class Signs:
    """How a library shows, to whoever watches its ranks from outside, that one of them waits or has been left.

    Attributes:
        waiting: Folders below site-packages: a rank whose innermost Python frame lies in one waits for other ranks.
        lost_peer: Phrases of the errors that the library raises where another rank has ended or does not answer.
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


@dataclass(frozen=True)
class BackendOptions:
    """What the launcher tells an adapter; the same for all of them.

    Attributes:
        precision: "fp32" (no autocast: parameters keep their own dtype), "bf16" or "fp16" autocast.
        device: "cpu" or "cuda".
        timeout_seconds: After how long a collective that some rank never enters becomes an error.
        init_loss_scale: First loss scale under fp16.
        find_unused_parameters: Whether some parameters may get no gradient in a step.
        skip_nonfinite: Whether a step whose averaged gradient is not finite leaves everything as it was,
            in every precision; under fp16 the loss scaler sees to that anyway.
        settings: The backend's own.
    """

    precision: str = "fp32"
    device: str = "cpu"
    timeout_seconds: float = 300.0
    init_loss_scale: float = 65536.0
    find_unused_parameters: bool = False
    skip_nonfinite: bool = False
    settings: BackendSettings = field(default_factory=BackendSettings)


@dataclass(frozen=True)
class KnownFailure:
    """A clause of the contract that a backend is known not to keep, through no fault of its adapter.

    Attributes:
        reason: What goes wrong, in one line.
        link: Where it is reported or described.
    """

    reason: str
    link: str


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        grad_norm: Global 2-norm of the averaged, unscaled gradient before clipping, 0-d, on the
            device: reading it is left to the logging interval.
        skipped: Whether all ranks skipped the update because the averaged gradient was not finite.
    """

    grad_norm: torch.Tensor
    skipped: bool


class Backend(ABC):
    """One process's view of a data-parallel library.

    Constructing an adapter joins the group of ranks that its launcher started. One adapter may
    serve several trainings in turn: each begins with `setup`.

    Attributes:
        Settings: The backend's own options.
        known_failures: Checks of the contract that are expected to fail, by id.
        signs: How the library shows that a rank waits for others, or has lost one.
        rank: This process's number among all processes, from 0.
        local_rank: This process's number among those on its machine.
        world_size: The number of processes.
        device: Where this process computes.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    Settings: ClassVar[type[BackendSettings]] = BackendSettings
    known_failures: ClassVar[Mapping[str, KnownFailure]] = {}
    signs: ClassVar[Signs] = TORCH_SIGNS

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Says in one line why this machine cannot run the backend and what to install, or None."""
        return None

    def __init__(self, options: BackendOptions) -> None:
        """Keeps the options, refusing what the backend does not declare; subclasses then join their group.

        Raises:
            UnsupportedError: The options ask for something that is not among `capabilities`.
        """
        self.capabilities.check(
            name=self.name,
            device=options.device,
            precision=options.precision,
            find_unused_parameters=options.find_unused_parameters,
        )
        self.options = options

    @abstractmethod
    def setup(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Prepares training and returns what the loop is to call instead of its arguments.

        `model` already lies on `device` (an optimizer must be built on the parameters it will
        update). Afterwards all parameters and buffers equal those of rank 0; no weight of rank 0,
        no hyper-parameter and no optimizer state has changed.
        """

    @abstractmethod
    def autocast(self) -> AbstractContextManager[Any]:
        """Computes a forward pass in the chosen precision."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[Any]:
        """Keeps the gradients of the forward and backward inside local; for all but the last micro-batch."""

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagates `loss`, scaled for the precision; gradients add up until `step`."""

    @abstractmethod
    def step(self, max_grad_norm: float) -> StepResult:
        """Finishes the averaging over ranks, clips to `max_grad_norm` (0: not at all), updates, zeroes gradients."""

    def must_skip(self, grad_norm: torch.Tensor) -> bool:
        """Whether the options forbid an update with a gradient of this norm.

        The norm of averaged gradients is the same on every rank, and so is the answer. It costs a
        GPU a synchronisation, where it was asked for.
        """
        return self.options.skip_nonfinite and not bool(grad_norm.isfinite())

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduces `tensor` over all ranks with "sum", "min" or "max" and returns the result to each."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns once every rank has called it."""

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """Returns the task's own module behind what `setup` returned."""

    def weights(self, model: nn.Module) -> dict[str, Any]:
        """Returns the state of the task's module, each weight with all digits that training has of it."""
        return self.unwrap(model).state_dict()

    def load_weights(self, model: nn.Module, weights: Mapping[str, Any]) -> None:
        """Restores what `weights` returned, under whatever backend.

        The mapping has the same order on every rank, so an adapter may communicate tensor by tensor.
        """
        self.unwrap(model).load_state_dict(weights)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the adapter's own state, which is that of its loss scaler."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; to be called after `setup`."""

    @abstractmethod
    def effective_settings(self) -> dict[str, Any]:
        """Reads back from the library what is in force: versions, transport, bucket sizes."""

    def collectives(self) -> Mapping[str, Prepare]:
        """Returns the library's own collectives, for a benchmark: those of torch.distributed where it has a group.

        Returns:
            By operation ("all_reduce", "all_gather", "gather", "broadcast"), what prepares a call.
        """
        from backends.collectives import collectives_of_group, only_all_reduce

        return collectives_of_group() or only_all_reduce(self.all_reduce)

    def count_traffic(self, count: Callable[[str, int], None]) -> AbstractContextManager[Any]:
        """Calls `count(operation, num_elements)` for every collective that this thread starts inside.

        Those of torch.distributed are seen, from C++ too; an adapter of another library adds its own.
        """
        from backends.traffic import count_torch_traffic

        return count_torch_traffic(count)

    @abstractmethod
    def shutdown(self) -> None:
        """Leaves the group: drops wrappers, waits for all ranks, destroys, in that order."""
