"""Computes what one process computes on whole global batches, without any code of the loop or of the adapters.

The reference uses the model and the sentences of the task, and does the rest in its own way: it computes the plan
again from its description, writes out the mean negative log-likelihood, gets gradients from torch.autograd.grad, and
has SGD, AdamW, clipping and the schedule as formulas on tensors.

`simulate` is for precisions in which rounding depends on the shape of a computation. It computes the micro-batches of
all ranks one after the other, with the loss of the task, and averages them by hand.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch

from records.config import RunConfig
from tasks.interface import Batch, PackedData, Split, Task
from tasks.registry import load_task
from tasks.token_tagging import NO_TARGET, NUM_TAGS, TokenTagging, draw_sentences

Tensors = dict[str, torch.Tensor]

_HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Reference:
    """A training as it should be; the lists have one entry for each optimizer step.

    Attributes:
        batches: The numbers of the samples of each global batch.
        learning_rates: The learning rate of the step.
        losses: The mean over the targets of the global batch.
        grad_norms: The norm of the gradient before clipping.
        gradients: The gradients after clipping; None where the step must be skipped.
        weights: The weights after the step.
        evaluations: The metrics after each epoch.
    """

    batches: list[list[int]] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[Tensors | None] = field(default_factory=list)
    weights: list[Tensors] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)


def global_batches(config: RunConfig) -> list[list[list[int]]]:
    """Returns the plan by epochs: for each, a permutation by PCG64 seeded with (seed, epoch), cut in order."""
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
    """Returns the micro-batches of each rank.

    Padded: a short batch is spread evenly, with longer pieces first. Packed: each sample, from the longest to the
    shortest, goes to the piece that has the fewest tokens so far. Sorted: there are two micro-steps at least, if there
    are enough samples, and each piece has samples that follow one another in length,
    which are equal in number or in size, whichever leaves the rank with most less.
    """
    world_size = config.num_processes
    num_micro_steps = math.ceil(len(batch) / (config.micro_batch_size * world_size))
    if config.batching == "padded":
        pieces = _spread(batch, num_micro_steps * world_size)
        return [pieces[rank::world_size] for rank in range(world_size)]
    lengths = [len(tokens) for tokens, _ in _sentences("train", config.task_settings["num_train_samples"])]
    by_length = sorted(batch, key=lambda sample: -lengths[sample])
    if config.batching == "packed":
        pieces = [[] for _ in range(num_micro_steps * world_size)]
        for sample in by_length:
            min(pieces, key=lambda piece: sum(lengths[one] for one in piece)).append(sample)
        return [pieces[rank::world_size] for rank in range(world_size)]
    num_pieces = world_size * max(num_micro_steps, min(2, math.ceil(len(batch) / world_size)))
    cuts = [_spread(by_length, num_pieces)]
    if world_size > 1 and len(batch) > num_pieces:
        cuts.append(_of_equal_size(by_length, lengths, num_pieces))
    shares = [_shares_of_ranks(cut, lengths, world_size) for cut in cuts]
    return min(shares, key=lambda share: max(sum(_padded(piece, lengths) for piece in own) for own in share))


def sum_of_tokens(config: RunConfig, samples: list[int]) -> int:
    """Adds up the numbers of all tokens of some training sentences."""
    sentences = _sentences("train", config.task_settings["num_train_samples"])
    return sum(int(sentences[sample][0].sum()) for sample in samples)


@functools.cache
def _sentences(split: Split, num_samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the sentences of the token-tagging task, or of one made from it, each with its tags."""
    return [(torch.from_numpy(tokens), torch.from_numpy(tags)) for tokens, tags in draw_sentences(split, num_samples)]


def _spread(samples: list[int], num_pieces: int) -> list[list[int]]:
    """Cuts a list into pieces of equal size, as far as possible; the first ones have one more."""
    smaller, num_larger = divmod(len(samples), num_pieces)
    ends = [0]
    for piece in range(num_pieces):
        ends.append(ends[-1] + smaller + (piece < num_larger))
    return [samples[begin:end] for begin, end in pairwise(ends)]


def _padded(piece: list[int], lengths: list[int]) -> int:
    return len(piece) * max((lengths[sample] for sample in piece), default=0)


def _of_equal_size(by_length: list[int], lengths: list[int], num_pieces: int) -> list[list[int]]:
    """Cuts samples so that the largest piece, with its padding, is as small as possible, and none is empty."""
    most = lengths[by_length[0]]
    while True:
        left, pieces = list(by_length), list[list[int]]()
        for later in reversed(range(num_pieces)):
            size = min(most // lengths[left[0]], len(left) - later)
            pieces.append(left[:size])
            del left[:size]
        if not left:
            return pieces
        most += 1


def _shares_of_ranks(pieces: list[list[int]], lengths: list[int], world_size: int) -> list[list[list[int]]]:
    """In each micro-step, the rank that has had most gets the smallest piece, and so on; the lower rank is first."""
    shares: list[list[list[int]]] = [[] for _ in range(world_size)]
    while pieces:
        had = [sum(_padded(piece, lengths) for piece in own) for own in shares]
        now, pieces = sorted(pieces[:world_size], key=lambda piece: _padded(piece, lengths)), pieces[world_size:]
        for rank, piece in zip(sorted(range(world_size), key=lambda rank: -had[rank]), now, strict=True):
            shares[rank].append(piece)
    return shares


def learning_rate(config: RunConfig, num_updates: int, num_steps: int) -> float:
    """Returns the rate of a linear warm-up from 0, then constant or linear down to 0 (transformers.get_scheduler)."""
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
    training = _sentences("train", task.num_samples("train"))
    validation = _sentences("validation", task.num_samples("validation"))
    model = task.build_model().double()
    model.load_state_dict(initial, strict=False)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    update = _AdamW(config) if config.optimizer == "adamw" else _Momentum(config)
    reference = Reference()
    epochs = global_batches(config)
    num_steps = sum(len(batches) for batches in epochs)
    for batch in (batch for batches in epochs for batch in batches):
        loss, _ = _mean_loss(model, [training[index] for index in batch])
        derivatives = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        # A parameter that no sample uses has no gradient, and then neither decay nor momentum moves it.
        gradients = {name: g for name, g in zip(trained, derivatives, strict=True) if g is not None}
        norm = math.sqrt(sum(float((gradient * gradient).sum()) for gradient in gradients.values()))
        if 0 < config.max_grad_norm < norm:
            # As in torch.nn.utils.clip_grad_norm_, which keeps the quotient finite.
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
            reference.evaluations.append(_evaluate(model, validation))
    return reference


def _ends(epochs: list[list[list[int]]]) -> list[int]:
    return [sum(len(batches) for batches in epochs[: number + 1]) for number in range(len(epochs))]


def _mean_loss(
    model: torch.nn.Module, sentences: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Returns the mean loss over all targets, and for each target the right tag and the predicted one."""
    total, pairs = torch.zeros((), dtype=torch.float64), []
    for tokens, tags in sentences:
        scores = model(tokens[None])[0]
        positions = (tags != NO_TARGET).nonzero().flatten()
        log_likelihood = scores - scores.logsumexp(dim=1, keepdim=True)
        total = total - log_likelihood[positions, tags[positions]].sum()
        pairs += list(zip(tags[positions].tolist(), scores[positions].argmax(dim=1).tolist(), strict=True))
    return total / len(pairs), pairs


def _evaluate(model: torch.nn.Module, sentences: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    """Returns loss, accuracy, and F1 averaged over the tags that occur, all by counting."""
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


class Arithmetic(NamedTuple):
    """How a backend computes in its precision.

    Attributes:
        loss_scale: The loss scale.
        casts_model: Whether the precision is that of a model that is cast as a whole, returns float32, and gets new
            weights from float32 ones after every step. Otherwise it is that of torch.autocast.
        num_shares: Into how many shares each micro-batch is cut, unless it is packed; their gradients are added up.
    """

    loss_scale: float = 1.0
    casts_model: bool = False
    num_shares: int = 1


def gradients_of_ranks(weights: Tensors, config: RunConfig, batch: list[int]) -> list[Tensors]:
    """Returns what each rank contributes to a step from given weights, in float64; their mean is the exact gradient."""
    task, model = _task_and_model(config, weights)
    parameters = _trainable(model.double())
    factor = config.num_processes / max(1, task.num_targets("train", batch))
    found = []
    for share in micro_batches(config, batch):
        losses = [task.loss_sum(model, task.collate("train", piece)) * factor for piece in share if piece]
        gradients = torch.autograd.grad(torch.stack(losses).sum(), list(parameters.values())) if losses else ()
        zeros = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        found.append(zeros | dict(zip(parameters, gradients, strict=False)))
    return found


def simulate(initial: Tensors, config: RunConfig, arithmetic: Arithmetic) -> Reference:
    """Computes every rank's micro-batches in this process, in the run's own precision, and averages by hand.

    Args:
        initial: The weights to begin with.
        config: The configuration of the run.
        arithmetic: How the backend computes.

    Returns:
        The training. The sum over ranks is in the dtype of the gradients.
    """
    task, model = _task_and_model(config, initial)
    model = model.to(config.device)
    working = _cast(model, config) if arithmetic.casts_model else model
    parameters = _trainable(model)
    optimizer = _optimizer(config, parameters)
    reference = Reference()
    batches = [batch for epoch in global_batches(config) for batch in epoch]
    for step, batch in enumerate(batches):
        totals = _summed_gradients(task, working, config, batch, arithmetic)
        for name, parameter in parameters.items():
            parameter.grad = (totals[name] / config.num_processes).to(parameter.dtype) / arithmetic.loss_scale
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), config.max_grad_norm or math.inf)
        reference.grad_norms.append(float(norm))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, len(batches))
        reference.gradients.append({name: p.grad.cpu().clone() for name, p in parameters.items() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
        if arithmetic.casts_model:
            working.load_state_dict(model.state_dict())
        reference.batches.append(batch)
        reference.weights.append({name: p.detach().cpu().clone() for name, p in model.named_parameters()})
    return reference


def _task_and_model(config: RunConfig, initial: Tensors) -> tuple[Task, torch.nn.Module]:
    task_class = load_task(config.task)
    task = task_class(task_class.Settings.model_validate(config.task_settings))
    task.prepare()
    model = task.build_model()
    model.load_state_dict(initial, strict=False)
    return task, model


def _trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _cast(model: torch.nn.Module, config: RunConfig) -> torch.nn.Module:
    """Returns a copy of the model in half precision that returns float32."""
    half = copy.deepcopy(model).to(_HALF_DTYPES[config.precision])
    half.register_forward_hook(lambda module, arguments, scores: scores.float())
    return half


def _optimizer(config: RunConfig, parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Builds torch's own optimizer, for equal bits; vectors are not decayed."""
    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=1.0, fused=True)
    return torch.optim.SGD(groups, lr=1.0, momentum=config.momentum)


def _summed_gradients(
    task: Task, model: torch.nn.Module, config: RunConfig, batch: list[int], arithmetic: Arithmetic
) -> Tensors:
    """Returns the sum over ranks of the scaled gradients of one global batch, and leaves none in the model."""
    parameters = _trainable(model)
    dtype = None if arithmetic.casts_model else _HALF_DTYPES.get(config.precision)
    num_targets = max(1, task.num_targets("train", batch))
    totals = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for share in micro_batches(config, batch):
        for inputs in chain.from_iterable(_batches(task, config, samples, arithmetic.num_shares) for samples in share):
            with torch.autocast(config.device, dtype=dtype, enabled=dtype is not None):
                loss = task.loss_sum(model, inputs.to(torch.device(config.device))) * (1.0 / num_targets)
            (loss * config.num_processes * arithmetic.loss_scale).backward()  # type: ignore[no-untyped-call]
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                totals[name] += parameter.grad
                parameter.grad = None
    return totals


def _batches(task: Task, config: RunConfig, samples: list[int], num_shares: int) -> list[Batch]:
    """Makes a micro-batch: whole if it is packed, otherwise in shares as torch.chunk cuts a tensor.

    All shares but the last are equally large, and none is empty.
    """
    if config.batching == "packed":
        assert isinstance(task, PackedData)
        return [task.collate_packed("train", samples)] if samples else []
    size = max(1, math.ceil(len(samples) / num_shares))
    return [task.collate("train", samples[begin : begin + size]) for begin in range(0, len(samples), size)]
