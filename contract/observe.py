"""Observes one training from outside: stand-ins for the backend and the task pass every call on and record it.

They record what happens, not what a backend reports: the loss scale is the gradient that reaches the loss,
the weight of a micro-batch is the gradient that reaches its summed loss, and traffic is counted where it
enters a communication library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from backends.interface import Backend, StepResult
from contract.case import Overflow
from tasks.interface import Batch, PackedData, Split, Task, draws_nothing
from training.data import may_draw

Tensors = dict[str, torch.Tensor]


@dataclass
class MicroSeen:
    """What was observed of one micro-batch on one rank.

    Attributes:
        sample_ids: The samples that were collated for it.
        coefficient: The factor of its summed loss in the backward pass, loss scale included.
        scale: The factor by which the backend multiplied the loss that it was given.
        loss_dtype: The dtype of the summed loss.
        layer_dtype: The dtype of the output of a linear layer inside the model.
        mask: Which of the first hidden units dropout set to 0.
    """

    sample_ids: list[int]
    coefficient: float = float("nan")
    scale: float = float("nan")
    loss_dtype: str = ""
    layer_dtype: str = ""
    mask: list[bool] = field(default_factory=list)


@dataclass
class StepSeen:
    """What was observed of one optimizer step on one rank.

    Attributes:
        micro_batches: Its micro-batches, in order.
        learning_rates: The learning rate of each parameter group.
        gradients: What the optimizer was given, by name; None if the optimizer was not called.
        grad_norm: The norm that the backend returned.
        skipped: Whether the backend said that it skipped the update.
        weights: The weights after the step, by name.
        buffers: The buffers after the step, by name.
        traffic: For each collective, where it was called ("forward 0", "backward 0", "between", "step" or "loop"),
            its operation, its number of elements and their bytes.
    """

    micro_batches: list[MicroSeen] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    gradients: Tensors | None = None
    grad_norm: float = float("nan")
    skipped: bool = False
    weights: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    traffic: list[tuple[str, str, int, int]] = field(default_factory=list)


@dataclass
class SetupSeen:
    """The model and the optimizer before and after `setup`, on one rank.

    Attributes:
        weights_before: The whole weights before `setup`, by name.
        weights_after: The whole weights after it.
        buffers_before: The whole buffers before it.
        buffers_after: The whole buffers after it.
        groups_before: The optimizer's defaults, then the hyper-parameters of each of its groups, before `setup`.
        groups_after: The same after it.
        state_before: The optimizer's whole state of each parameter that has any, before `setup`.
        state_after: The same after it.
        is_task_module: Whether `unwrap` returns the module that was passed to `setup`.
        trainable_elements: How many elements of gradients a step has.
        padded_elements: As many, with the rows of each parameter filled up to a multiple of the world size.
        padded_weights: The elements of all weights, frozen ones included, with their rows filled up in the same way.
        held_weights: The elements of weights that this rank holds.
        updated_elements: How many elements this rank's optimizer updates, and holds the state of.
        flat_elements: `trainable_elements`, with those of each group of the optimizer filled up to a multiple of twice
            the world size.
        shards_weights: Whether each rank holds only a part of each weight.
        shards_optimizer: Whether each rank holds all weights, and a part of the optimizer state.
        num_shares: Into how many shares the backend cuts each micro-batch.
        embeddings: The names of the trainable weights of embeddings.
    """

    weights_before: Tensors
    weights_after: Tensors
    buffers_before: Tensors
    buffers_after: Tensors
    groups_before: list[dict[str, Any]]
    groups_after: list[dict[str, Any]]
    state_before: list[Tensors]
    state_after: list[Tensors]
    is_task_module: bool
    trainable_elements: int
    padded_elements: int
    padded_weights: int
    held_weights: int
    updated_elements: int
    flat_elements: int
    shards_weights: bool
    shards_optimizer: bool
    num_shares: int
    embeddings: list[str]


@dataclass
class TrainingSeen:
    """What was observed of a whole training on one rank."""

    setup: SetupSeen | None = None
    steps: list[StepSeen] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    evaluations: list[dict[str, float | None]] = field(default_factory=list)
    evaluated: list[list[int]] = field(default_factory=list)
    evaluation_dtypes: list[str] = field(default_factory=list)
    buffers: Tensors = field(default_factory=dict)
    settings: str = ""
    state: dict[str, Any] | None = None


class Watch:
    """Collects what is observed of one training on one rank."""

    def __init__(self) -> None:
        self.seen = TrainingSeen()
        self.where = "loop"
        self.step = StepSeen()
        self.waiting: list[list[int]] = []
        self.evaluated: list[int] = []

    def close_step(self, weights: Tensors, buffers: Tensors) -> None:
        """Closes the current step, which the loop has just completed and which made these weights and buffers."""
        self.step.weights, self.step.buffers = weights, buffers
        self.seen.steps.append(self.step)
        self.step = StepSeen()

    def forget_step(self) -> None:
        """Forgets the step that has just been taken, which does not count."""
        self.step, self.waiting = StepSeen(), []

    @contextmanager
    def looking(self) -> Iterator[None]:
        """What is communicated inside is the observer's doing, and not counted."""
        where, self.where = self.where, ""
        try:
            yield
        finally:
            self.where = where

    @contextmanager
    def counting(self, backend: Backend, enabled: bool) -> Iterator[None]:
        """Counts what enters the communication library of a backend."""
        with backend.count_traffic(self._count) if enabled else nullcontext():
            yield

    def _count(self, operation: str, num_elements: int, num_bytes: int) -> None:
        if self.where:
            self.step.traffic.append((self.where, operation, num_elements, num_bytes))


class ObservedTask:
    """A task that records which samples are asked for and with which weight they enter the loss."""

    def __init__(self, task: Task, watch: Watch, rank: int, overflow: Overflow | None) -> None:
        self._task, self._watch, self._rank, self._overflow = task, watch, rank, overflow
        for name in ("collate", "collate_packed"):  # whoever draws nothing is seeded as seldom as without an observer
            if not may_draw(getattr(task, name, None)):
                setattr(self, name, draws_nothing(partial(getattr(ObservedTask, name), self)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def build_model(self) -> torch.nn.Module:
        """Builds the task's model, with other weights on each rank."""
        # Ranks are seeded differently, so that only the adapter can make them equal.
        torch.manual_seed(1000 + self._rank)
        model = self._task.build_model()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.register_forward_hook(self._see_dropout)
                break
        return model

    def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        """Notes the samples that a batch is made of."""
        self._note(split, sample_ids)
        return self._task.collate(split, sample_ids)

    def collate_packed(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        """Notes the samples that a batch without padding is made of."""
        self._note(split, sample_ids)
        assert isinstance(self._task, PackedData)
        return self._task.collate_packed(split, sample_ids)

    def _note(self, split: Split, sample_ids: Sequence[int]) -> None:
        samples = [int(sample_id) for sample_id in sample_ids]
        if split == "train":
            self._watch.waiting.append(samples)
        else:
            self._watch.evaluated += samples

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Notes the gradient that reaches the loss, and multiplies the loss where the case says so."""
        watch = self._watch
        micro_step = len(watch.step.micro_batches)
        micro_batch = MicroSeen(watch.waiting.pop(0))
        watch.step.micro_batches.append(micro_batch)
        watch.where = f"forward {micro_step}"
        loss = self._task.loss_sum(model, batch)
        micro_batch.loss_dtype = str(loss.dtype)
        _on_gradient(loss, micro_batch, "coefficient")
        overflow = self._overflow
        if overflow is None or (self._rank, len(watch.seen.steps) + 1, micro_step) != overflow.place:
            return loss
        if not overflow.of_gradient:
            return loss * overflow.factor
        element = next(parameter for parameter in model.parameters() if parameter.requires_grad).flatten()[0]
        return loss + (element - element.detach()).sqrt()  # 0, with an infinite derivative

    def metrics(self, rows: torch.Tensor) -> dict[str, float | None]:
        """Notes the samples of the evaluation."""
        self._watch.seen.evaluated.append(self._watch.evaluated)
        self._watch.evaluated = []
        return self._task.metrics(rows)

    def _see_dropout(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        # Dropout keeps the dtype of its input, which is the output of a linear layer.
        dtype = str(output.dtype)
        if not module.training:
            if dtype not in self._watch.seen.evaluation_dtypes:
                self._watch.seen.evaluation_dtypes.append(dtype)
            return
        micro_batch = self._watch.step.micro_batches[-1]
        micro_batch.layer_dtype = dtype
        micro_batch.mask = (output == 0).flatten()[:12].tolist()


class ObservedBackend:
    """A backend that records the arguments and the effects of `setup`, `backward` and `step`."""

    def __init__(self, backend: Backend, watch: Watch) -> None:
        self._backend, self._watch = backend, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def setup(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        """Describes model and optimizer before and after `setup`."""
        self.model, before = model, self._describe(model, optimizer)
        buffers_before = self.named(model.named_buffers())
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        # By position in the optimizer: a backend may replace parameters by master weights.
        self.names = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        wrapped, wrapped_optimizer = self._backend.setup(model, optimizer)
        unwrapped = self._backend.unwrap(wrapped)
        after = self._describe(unwrapped, wrapped_optimizer)
        trainable = [parameter for parameter in unwrapped.parameters() if parameter.requires_grad]
        self.optimizer = wrapped_optimizer
        updated = [group["params"] for group in wrapped_optimizer.param_groups]
        self._watch.seen.setup = SetupSeen(
            weights_before=before[0],
            weights_after=after[0],
            buffers_before=buffers_before,
            buffers_after=self.named(unwrapped.named_buffers()),
            groups_before=before[1],
            groups_after=after[1],
            state_before=before[2],
            state_after=after[2],
            is_task_module=unwrapped is model,
            trainable_elements=sum(parameter.numel() for parameter in trainable),
            padded_elements=sum(_padded(parameter.shape, self._backend.world_size) for parameter in trainable),
            padded_weights=sum(_padded(weight.shape, self._backend.world_size) for weight in unwrapped.parameters()),
            held_weights=sum(_own(weight).numel() for weight in unwrapped.parameters()),
            updated_elements=sum(_own(part).numel() for group in updated for part in group),
            flat_elements=sum(
                _filled_up(sum(part.numel() for part in group), 2 * self._backend.world_size) for group in updated
            ),
            shards_weights=self._backend.capabilities.shards_weights,
            shards_optimizer=self._backend.capabilities.shards_optimizer,
            num_shares=self._backend.num_devices if self._backend.capabilities.cuts_batches else 1,
            embeddings=_embeddings(unwrapped),
        )
        return wrapped, wrapped_optimizer

    def backward(self, loss: torch.Tensor) -> None:
        """Notes the factor that the backend puts on the loss."""
        watch = self._watch
        micro_batch = watch.step.micro_batches[-1]
        _on_gradient(loss, micro_batch, "scale")
        watch.where = f"backward {len(watch.step.micro_batches) - 1}"
        self._backend.backward(loss)
        watch.where = "between"

    def step(self, max_grad_norm: float) -> StepResult:
        """Notes the learning rates, the gradients and the result of the step."""
        watch = self._watch
        watch.where = "step"
        watch.step.learning_rates = [group["lr"] for group in self.optimizer.param_groups]

        def see_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            # Horovod's optimizer calls the step of its parent class, which runs this hook again: the last call counts.
            # DeepSpeed calls the step once for each group.
            given = self.named(
                (name, parameter.grad)
                for names, group in zip(self.names, self.optimizer.param_groups, strict=True)
                for name, parameter in zip(names, group["params"], strict=True)
                if parameter.grad is not None
            )
            watch.step.gradients = (watch.step.gradients or {}) | given

        handle = register_optimizer_step_pre_hook(see_gradients)
        try:
            result = self._backend.step(max_grad_norm)
        finally:
            handle.remove()
        watch.step.grad_norm, watch.step.skipped = float(result.grad_norm), bool(result.skipped)
        watch.where = "loop"
        return result

    def no_sync(self) -> AbstractContextManager[Any]:
        """Passes the call on."""
        return self._backend.no_sync()

    def named(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
        """Returns copies of named tensors on the CPU, whole ones where this rank holds parts."""
        with self._watch.looking():
            return {name: self._backend.whole(tensor.detach()).cpu().clone() for name, tensor in tensors}

    def _describe(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Tensors, list[dict[str, Any]], list[Tensors]]:
        groups = [
            {"defaults": {name: _plain(value) for name, value in optimizer.defaults.items()}},
            *(
                {name: _plain(value) for name, value in group.items() if name != "params"}
                | {"num_parameters": len(group["params"])}
                for group in optimizer.param_groups
            ),
        ]
        states = [
            self.named(
                (name, value) for name, value in optimizer.state[parameter].items() if isinstance(value, torch.Tensor)
            )
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter in optimizer.state
        ]
        return self.named(model.named_parameters()), groups, states


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank holds of a tensor, which may be spread over ranks."""
    own: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own


def _embeddings(model: torch.nn.Module) -> list[str]:
    weights = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    return [name for name, one in model.named_parameters() if one.requires_grad and id(one) in weights]


def _padded(shape: torch.Size, world_size: int) -> int:
    """Returns the elements of a tensor whose rows are filled up to a multiple of the world size."""
    rows, elements = (shape[0] if shape else 1), shape.numel()
    return elements // max(1, rows) * _filled_up(rows, world_size)


def _filled_up(number: int, divisor: int) -> int:
    """Returns the smallest multiple of `divisor` that is not smaller than `number`."""
    return -(-number // divisor) * divisor


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _on_gradient(loss: torch.Tensor, micro_batch: MicroSeen, name: str) -> None:
    """Records the gradient that reaches a loss, which is the factor of the loss in the backward pass."""
    loss.register_hook(lambda gradient: setattr(micro_batch, name, float(gradient)))  # type: ignore[no-untyped-call]
