"""The interface that every backend adapter implements, and what an adapter promises.

The training loop owns the mathematics: it decides which samples make a global batch, how they are split, how the loss
is normalised, where gradients are clipped and what the learning rate is. An adapter owns the communication and the loss
scaling: it wraps the model, reduces gradients, handles overflows, and keeps the order of synchronise, unscale, clip,
step and update. An adapter never divides by the number of accumulation steps.

Each item of a list in the docstrings of this file is a promise that the contract checks; ``launch/run.sh contract
--explain ID`` shows which ones a clause is about. With any adapter, a training as a whole keeps these:

- N ranks compute the training that one process computes on whole global batches.
- In every micro-step, every rank computes the samples that the plan gives it, in the order of the plan.
- In an epoch, all ranks together train on each sample exactly once, and the next epoch has another order.
- An evaluation computes each validation sample exactly once, on one of the ranks, as far as it counts.
- Every metric of an evaluation is, on every rank, the one that a single process computes from all samples.
- The loss that is logged for a step is, on every rank, the mean over all targets of the global batch.
- The learning rate of a step depends on the number of updates before it; a skipped step is not an update.
- Between consecutive reports of the loss, ranks exchange gradients and nothing else, `sync_batchnorm` aside.
- Dropout masks differ between ranks, between steps and between micro-batches.
- A training that is repeated draws the same random numbers and ends with the same weights.
- Unless `find_unused_parameters` is set, a parameter that gets no gradient ends the training with an error
  that names the parameter.
- If a rank raises an error, exits, is killed or hangs, the whole job ends soon after the timeout at the latest:
  with exit code 1 and a message that names the rank, and without leaving a process behind.
- Environment variables, configuration files of libraries and files in the working directory change neither
  the settings nor the training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from backends.capabilities import TORCH_SIGNS, BackendSettings, Capabilities, KnownFailure, Signs, UnsupportedError
from backends.options import BackendOptions

if TYPE_CHECKING:
    import torch
    from torch import nn

    from backends.collectives import Prepare

# What the module of an adapter needs.
__all__ = [
    "Backend",
    "BackendOptions",
    "BackendSettings",
    "Capabilities",
    "KnownFailure",
    "Signs",
    "StepResult",
    "UnsupportedError",
]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        grad_norm: The gradient norm, 0-d. It stays on the device, so that a GPU waits only when the loop logs it.
        skipped: Whether the update was skipped because the averaged gradient was not finite.
    """

    grad_norm: torch.Tensor
    skipped: bool


class Backend(ABC):
    """One process's view of a data-parallel library.

    Constructing an adapter joins a group of ranks. It may serve several trainings in turn: each begins with `setup`.

    - The group consists of the ranks that the launcher has started, and each of them reaches all others.
    - Every rank has the `rank` and the `local_rank` that the launcher gave to its process.

    Attributes:
        name: The name of the backend.
        capabilities: What the backend supports.
        Settings: The options of this backend alone.
        known_failures: The clauses of the contract that are expected to fail, by id.
        signs: How the library shows that a rank waits for others, or has lost one.
        options: What the launcher asked for.
        rank: The number of this process among all processes, from 0.
        local_rank: The number of this process among those on its machine, from 0.
        world_size: The number of processes.
        device: The device on which this process computes.
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
        """Returns in one line why this machine cannot run the backend and what to install; None if it can."""
        return None

    @classmethod
    def can_pretend(cls, options: BackendOptions) -> bool:
        """Returns whether this process can be a rank of a world whose other ranks do not exist, for a dry run.

        An adapter that uses the torch.distributed group that its process already has can: it is given one that is only
        pretended. By default, an adapter cannot.

        Args:
            options: What the launcher asks for.
        """
        return False

    def __init__(self, options: BackendOptions) -> None:
        """Checks and keeps the options; a subclass calls this first and joins its group afterwards.

        - Options that `capabilities` does not declare are refused before the adapter joins a group.

        Args:
            options: What the launcher asks for.

        Raises:
            UnsupportedError: `capabilities` does not declare an option; the message names its value.
        """
        self.capabilities.check(
            name=self.name,
            device=options.device,
            precision=options.precision,
            find_unused_parameters=options.find_unused_parameters,
            grad_compression=options.grad_compression,
        )
        self.options = options

    @abstractmethod
    def setup(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Prepares a training.

        - No weight or buffer of rank 0 changes, and no hyper-parameter of the optimizer, its defaults included.
        - No optimizer state is dropped, changed or added.
        - Afterwards, all ranks have the parameters and buffers of rank 0, buffers outside the state_dict included.

        Args:
            model: The task's module, which already lies on `device`.
            optimizer: An optimizer of the parameters of `model`, with or without state.

        Returns:
            The module and the optimizer that the loop uses in place of the arguments.

        Raises:
            UnsupportedError: The library cannot train such a model; the message names a parameter and a remedy.
        """

    @abstractmethod
    def autocast(self) -> AbstractContextManager[Any]:
        """Returns a context manager for a forward pass.

        - Inside, layers compute in `options.precision`.
        """

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[Any]:
        """Returns a context manager for the forward and backward pass of every micro-batch but the last of a step.

        - Inside, no gradient is reduced.
        """

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Computes gradients, and outside `no_sync` starts to average them over ranks.

        - The gradients of several calls add up until `step`.
        - The loss is multiplied by the loss scale under fp16, and by nothing in other precisions.

        Args:
            loss: This rank's contribution to the loss, 0-d.
        """

    @abstractmethod
    def step(self, max_grad_norm: float) -> StepResult:
        """Completes an optimizer step: averages gradients over ranks, unscales, clips, updates and zeroes them.

        - The optimizer is given, on every rank, the average over ranks of the gradients that have added up.
        - Gradients are averaged in their own dtype, without compression, unless `options.grad_compression` asks for it.
        - Each element is averaged, whatever the size, the memory layout, the dtype or the range of its tensor.
        - With "fp16" or "bf16", an element of the average is within N + 1 roundings to this format, on N ranks.
        - Compressed gradients travel in the bytes of their format; with "powersgd", in less than half, after two steps.
        - With "powersgd", what the average of a step leaves out is added to the gradients of the next step.
        - Every gradient element is reduced exactly once in an optimizer step, here or in `backward`.
        - Clipping scales the averaged gradient, as one vector over all parameters, to a norm of `max_grad_norm`.
        - Under fp16, gradients are unscaled before their norm is computed and before they are clipped.
        - The norm that every rank returns is that of the averaged gradient of all parameters before clipping.
        - Nothing but the optimizer changes weights, and nothing but a rank's own forward passes changes buffers.
        - No gradient of this step is left over for the next one.
        - If the averaged gradient is not finite, every rank skips the update, reports this and keeps its weights:
          always under fp16, and in other precisions with `options.skip_nonfinite`.
        - Without `options.skip_nonfinite`, an update that is not finite is taken in other precisions than fp16.
        - The loss scale of fp16 is `options.init_loss_scale` until a step is skipped, which halves it on every rank.
        - The loss scale doubles after 2000 steps in a row that were not skipped, those before a checkpoint included.
        - With `options.find_unused_parameters`, a parameter that no rank has used keeps its bits, and the gradient
          of one that some rank has used is averaged over all ranks.

        Args:
            max_grad_norm: The largest gradient norm to step with; 0 means that gradients are not clipped.

        Returns:
            The gradient norm, and whether the update was skipped.
        """

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Returns whether a parameter has got a gradient since the last step; by default, whether it holds one.

        Args:
            parameter: One of the parameters that are trained.
        """
        return parameter.grad is not None

    def gradients_apart(self) -> Sequence[torch.Tensor]:
        """Returns what this rank holds of gradients outside of the parameters when `step` begins; by default, none."""
        return ()

    def must_skip(self, grad_norm: torch.Tensor) -> bool:
        """Returns whether `options.skip_nonfinite` forbids an update with a gradient of this norm.

        The norm is the same on every rank, and so is the answer. If the option is set, reading it makes a GPU wait.

        Args:
            grad_norm: The norm of the averaged gradient, 0-d.
        """
        return self.options.skip_nonfinite and not bool(grad_norm.isfinite())

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduces a tensor over all ranks.

        - The result is the sum, minimum or maximum over all ranks, element by element, and every rank gets it.
        - The result keeps the dtype (float32, float64, int32 or int64) and the shape of `tensor`, 0-d included.
        - The call does not change `tensor`, and a later call does not change the result.
        - The call may be made in the middle of a forward or a backward pass, under `no_sync`, too.

        Args:
            tensor: A tensor on `device`, with the same shape and dtype on every rank.
            op: "sum", "min" or "max".

        Returns:
            The reduced tensor, on `device`.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Waits for all ranks.

        - The call returns on no rank before every rank has called it.
        """

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """Returns the task's module, which is inside the wrapper.

        - The result is the very module that was passed to `setup`.

        Args:
            model: The module that `setup` returned.
        """

    @property
    def num_devices(self) -> int:
        """How many devices of its machine this process computes on; one, unless an adapter says otherwise."""
        return 1

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the whole of a tensor of which each rank holds a part; by default, ranks hold whole tensors.

        All ranks call it, and all get the tensor that a single process would have.

        Args:
            tensor: A parameter, its gradient, or a tensor of its optimizer state.
        """
        return tensor

    def shard(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Returns the part of a whole tensor that this rank holds, without communication; by default, all of it.

        Args:
            whole: A tensor of the whole shape of `like`; what is this rank's part already is returned as it is.
            like: A parameter after `setup`.
        """
        return whole

    def evaluation(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Returns a context manager for the forward passes of an evaluation, without gradients.

        If `capabilities.shards_weights` is set, all ranks make equally many; otherwise a rank may make some alone.

        Args:
            model: The task's module.
        """
        return nullcontext()

    def weights(self, model: nn.Module) -> dict[str, Any]:
        """Returns the tensors to be saved, by name; where training keeps a copy with more digits, that copy.

        - The names are those of the task's module, without a prefix.
        - A rank may call it alone: it does not communicate.

        Where ranks hold parts, the tensors are parts, and `whole` makes the rest of them.

        Args:
            model: The module that `setup` returned.
        """
        return self.unwrap(model).state_dict()

    def load_weights(self, model: nn.Module, weights: Mapping[str, Any]) -> None:
        """Restores what `weights` has returned under any backend.

        Args:
            model: The module that `setup` returned.
            weights: The tensors by name, in the same order on every rank, so that an adapter may communicate
                tensor by tensor.
        """
        module = self.unwrap(model)
        own = module.state_dict()
        module.load_state_dict({name: self.shard(whole, own.get(name, whole)) for name, whole in weights.items()})

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the loss scaler; it is empty if the adapter does not scale losses.

        - The state consists of numbers, strings, lists and dictionaries, as in JSON, and is equal on all ranks.
        - Under fp16, the state contains the loss scale in force.
        - A rank may call it alone.
        - The single-process backend loads the state, and its training continues as this one does.
        """

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state of the loss scaler; the caller has called `setup` before.

        - With the weights and the optimizer's state, it continues a training as if it had not been interrupted.
        - State that the single-process backend has saved is loaded, and the training continues as it does there.

        Args:
            state: What `state_dict` has returned, under this or another backend.
        """

    @abstractmethod
    def effective_settings(self) -> dict[str, Any]:
        """Returns the settings that the library really uses, by name: its transport, bucket sizes, and so on.

        - The settings are plain facts that JSON can hold, name the "transport" and are the same on all ranks.
        """

    def collectives(self) -> Mapping[str, Prepare]:
        """Returns the library's collectives for a benchmark; by default those of torch.distributed, if it has a group.

        Returns:
            By operation ("all_reduce", "all_gather", "gather", "broadcast"), a function that prepares a call.
        """
        from backends.collectives import collectives_of_group, only_all_reduce

        return collectives_of_group() or only_all_reduce(self.all_reduce)

    def count_traffic(self, count: Callable[[str, int, int], None]) -> AbstractContextManager[Any]:
        """Returns a context manager that counts every collective that this thread starts inside.

        By default it sees those of torch.distributed, from C++, too; an adapter of another library adds its own.

        Args:
            count: Called with the operation, the number of elements and the bytes of each collective.
        """
        from backends.traffic import count_torch_traffic

        return count_torch_traffic(count)

    def timeline(self, path: Path) -> AbstractContextManager[Any]:
        """Returns a context manager in which the library writes a timeline of its own; by default, it has none.

        It is entered and left by all ranks, between two steps, and only with `options.is_traced`. A library may write
        on some ranks only. When the context manager is left, what it has written on this rank is complete.

        Args:
            path: The file of this rank, in JSON for Chrome and Perfetto.
        """
        return nullcontext()

    @abstractmethod
    def shutdown(self) -> None:
        """Leaves the group.

        An adapter drops its wrappers before it destroys the group: one that outlives its group can abort the process.

        - The call returns on every rank, and the launcher then ends with exit code 0.
        """
