"""What one process computes on whole global batches, sharing no code with the loop or the adapters.

It knows the task's model and its sentences, and does the rest its own way: the documented plan
rewritten, the mean negative log-likelihood written out, gradients from torch.autograd.grad, and
SGD, AdamW, clipping and the schedule as formulas on a list of tensors.

`simulate` is for precisions in which the shape of a computation shows in its rounding. It computes
the same micro-batches one after the other, in the task's own words, and averages them by hand.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from records.config import RunConfig
from tasks.registry import load_task
from tasks.token_tagging import NO_TARGET, NUM_TAGS, TokenTagging

Tensors = dict[str, torch.Tensor]


@dataclass
class Reference:
    """A training as it should be; lists have one entry for each optimizer step.

    Attributes:
        batches: The sample numbers of each global batch.
        learning_rates: What the step used.
        losses: Mean over the targets of the global batch.
        grad_norms: Before clipping.
        gradients: After clipping; None where the step was to be skipped.
        weights: After the step.
        evaluations: Metrics after each epoch.
    """

    batches: list[list[int]] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[Tensors | None] = field(default_factory=list)
    weights: list[Tensors] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)


def global_batches(config: RunConfig) -> list[list[list[int]]]:
    """The documented plan, by epochs: one permutation each, by PCG64 seeded with (seed, epoch), cut in order."""
    num_samples = config.task_settings["num_train_samples"]
    epochs: list[list[list[int]]] = []
    num_steps = 0
    while not _is_complete(config, len(epochs), num_steps):
        order = np.random.Generator(np.random.PCG64([config.seed, len(epochs)])).permutation(num_samples).tolist()
        batches = []
        while order and not 0 < config.max_steps <= num_steps:
            batches.append(order[: config.global_batch_size])
            del order[: config.global_batch_size]
            num_steps += 1
        epochs.append(batches)
    return epochs


def _is_complete(config: RunConfig, num_epochs: int, num_steps: int) -> bool:
    return num_steps >= config.max_steps if config.max_steps > 0 else num_epochs == config.num_train_epochs


def micro_batches(config: RunConfig, batch: list[int]) -> list[list[list[int]]]:
    """For each rank, its micro-batches in order; a short batch is spread evenly, the first pieces one longer."""
    world_size = config.num_processes
    num_micro_steps = math.ceil(len(batch) / (config.micro_batch_size * world_size))
    smaller, num_larger = divmod(len(batch), num_micro_steps * world_size)
    shares: list[list[list[int]]] = [[] for _ in range(world_size)]
    start = 0
    for piece in range(num_micro_steps * world_size):
        end = start + smaller + (piece < num_larger)
        shares[piece % world_size].append(batch[start:end])
        start = end
    return shares


def learning_rate(config: RunConfig, num_updates: int, num_steps: int) -> float:
    """Linear warm-up from 0, then constant or linear down to 0 (transformers.get_scheduler)."""
    warmup = math.ceil(config.warmup_ratio * num_steps)
    if num_updates < warmup:
        return config.learning_rate * num_updates / warmup
    if config.lr_scheduler == "constant":
        return config.learning_rate
    return config.learning_rate * (num_steps - num_updates) / (num_steps - warmup)


def compute_reference(initial: Tensors, config: RunConfig, *, skipped_steps: tuple[int, ...] = ()) -> Reference:
    """Trains the token-tagging task, or one made from it, from the given weights in float64."""
    task = load_task(config.task)(TokenTagging.Settings.model_validate(config.task_settings))
    assert isinstance(task, TokenTagging)
    task.prepare()
    model = task.build_model().double()
    model.load_state_dict(initial, strict=False)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    update = _AdamW(config) if config.optimizer == "adamw" else _Momentum(config)
    reference = Reference()
    epochs = global_batches(config)
    num_steps = sum(len(batches) for batches in epochs)
    for batch in (batch for batches in epochs for batch in batches):
        loss, _ = _mean_loss(model, [task._samples["train"][index] for index in batch])
        derivatives = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        # A parameter that no sample uses has no gradient, and then neither decay nor momentum moves it.
        gradients = {name: g for name, g in zip(trained, derivatives, strict=True) if g is not None}
        norm = math.sqrt(sum(float((gradient * gradient).sum()) for gradient in gradients.values()))
        if 0 < config.max_grad_norm < norm:
            # torch.nn.utils.clip_grad_norm_ keeps the quotient finite in this way.
            factor = config.max_grad_norm / (norm + 1e-6)
            gradients = {name: gradient * factor for name, gradient in gradients.items()}
        reference.learning_rates.append(learning_rate(config, update.num_updates, num_steps))
        is_skipped = len(reference.batches) + 1 in skipped_steps
        if not is_skipped:
            with torch.no_grad():
                update.apply(trained, gradients, reference.learning_rates[-1])
        reference.batches.append(batch)
        reference.losses.append(float(loss.detach()))
        reference.grad_norms.append(norm)
        reference.gradients.append(None if is_skipped else gradients)
        reference.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        if len(reference.batches) in _ends(epochs):
            reference.evaluations.append(_evaluate(model, task._samples["validation"]))
    return reference


def _ends(epochs: list[list[list[int]]]) -> list[int]:
    return [sum(len(batches) for batches in epochs[: number + 1]) for number in range(len(epochs))]


def _mean_loss(
    model: torch.nn.Module, sentences: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Returns the mean loss over all targets, and of each target the tag that is right and the one predicted."""
    total, pairs = torch.zeros((), dtype=torch.float64), []
    for tokens, tags in sentences:
        scores = model(tokens[None])[0]
        positions = (tags != NO_TARGET).nonzero().flatten()
        log_likelihood = scores - scores.logsumexp(dim=1, keepdim=True)
        total = total - log_likelihood[positions, tags[positions]].sum()
        pairs += list(zip(tags[positions].tolist(), scores[positions].argmax(dim=1).tolist(), strict=True))
    return total / len(pairs), pairs


def _evaluate(model: torch.nn.Module, sentences: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    """Loss, accuracy, and F1 averaged over the tags that occur, each counted out."""
    loss, pairs = _mean_loss(model, sentences)
    scores = []
    for tag in range(NUM_TAGS):
        wanted = [predicted for right, predicted in pairs if right == tag]
        false_positives = sum(right != tag and predicted == tag for right, predicted in pairs)
        if wanted:
            hits = wanted.count(tag)
            scores.append(2 * hits / (2 * hits + false_positives + len(wanted) - hits))
    accuracy = sum(right == predicted for right, predicted in pairs) / len(pairs)
    return {"loss": float(loss.detach()), "accuracy": accuracy, "macro_f1": sum(scores) / len(scores)}


class _Momentum:
    """SGD with momentum and L2 decay (https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html)."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.num_updates = config, 0
        self.velocities: Tensors = {}

    def apply(self, weights: Mapping[str, torch.Tensor], gradients: Tensors, learning_rate: float) -> None:
        for name, gradient in gradients.items():
            weight = weights[name]
            velocity = self.velocities.setdefault(name, torch.zeros_like(weight))
            velocity.mul_(self.config.momentum).add_(gradient + _decay(self.config, weight) * weight)
            weight.sub_(learning_rate * velocity)
        self.num_updates += 1


class _AdamW:
    """Adam with decoupled decay (Loshchilov and Hutter, 2019), betas 0.9 and 0.999, epsilon 1e-8."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.num_updates = config, 0
        self.moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def apply(self, weights: Mapping[str, torch.Tensor], gradients: Tensors, learning_rate: float) -> None:
        self.num_updates += 1
        for name, gradient in gradients.items():
            weight = weights[name]
            first, second = self.moments.setdefault(name, (torch.zeros_like(weight), torch.zeros_like(weight)))
            first.mul_(0.9).add_(0.1 * gradient)
            second.mul_(0.999).add_(0.001 * gradient * gradient)
            first_unbiased = first / (1 - 0.9**self.num_updates)
            second_unbiased = second / (1 - 0.999**self.num_updates)
            weight.mul_(1 - learning_rate * _decay(self.config, weight))
            weight.sub_(learning_rate * first_unbiased / (second_unbiased.sqrt() + 1e-8))


def _decay(config: RunConfig, weight: torch.Tensor) -> float:
    return config.weight_decay if weight.ndim >= 2 else 0.0


def simulate(initial: Tensors, config: RunConfig, *, loss_scale: float = 1.0, casts_model: bool = False) -> Reference:
    """Computes every rank's micro-batches in this process, in the run's own precision, and averages by hand.

    Precision below float32 is that of torch.autocast; with `casts_model`, of a model that is cast as a
    whole, returns float32, and is given new weights from float32 ones after every step. The sum over
    ranks is in the dtype of the gradients.
    """
    device = torch.device(config.device)
    task_class = load_task(config.task)
    task = task_class(task_class.Settings.model_validate(config.task_settings))
    task.prepare()
    model = task.build_model().to(device)
    model.load_state_dict(initial, strict=False)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = (
        torch.optim.AdamW(groups, lr=1.0, fused=True)
        if config.optimizer == "adamw"
        else torch.optim.SGD(groups, lr=1.0, momentum=config.momentum)
    )
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)
    working = model
    if casts_model:
        working = copy.deepcopy(model).to(dtype)
        working.register_forward_hook(lambda module, arguments, scores: scores.float())
    working_parameters = {name: p for name, p in working.named_parameters() if p.requires_grad}
    autocasts = dtype is not None and not casts_model
    world_size = config.num_processes
    reference = Reference()
    epochs = global_batches(config)
    num_steps = sum(len(batches) for batches in epochs)
    for step, batch in enumerate(batch for batches in epochs for batch in batches):
        num_targets = task.num_targets("train", batch)
        totals = {name: torch.zeros_like(parameter) for name, parameter in working_parameters.items()}
        for share in micro_batches(config, batch):
            for piece in share:
                if piece:
                    with torch.autocast(device.type, dtype=dtype, enabled=autocasts):
                        loss = task.loss_sum(working, task.collate("train", piece).to(device)) * (1.0 / num_targets)
                    (loss * world_size * loss_scale).backward()  # type: ignore[no-untyped-call]
            for name, parameter in working_parameters.items():
                if parameter.grad is not None:
                    totals[name] += parameter.grad
                    parameter.grad = None
        for name, parameter in parameters.items():
            parameter.grad = (totals[name] / world_size).to(parameter.dtype) / loss_scale
        reference.grad_norms.append(
            float(torch.nn.utils.clip_grad_norm_(parameters.values(), config.max_grad_norm or math.inf))
        )
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, num_steps)
        reference.gradients.append({name: p.grad.cpu().clone() for name, p in parameters.items() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
        if casts_model:
            working.load_state_dict(model.state_dict())
        reference.batches.append(batch)
        reference.weights.append({name: p.detach().cpu().clone() for name, p in model.named_parameters()})
    return reference
