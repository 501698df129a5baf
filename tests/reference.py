"""A single-process reference for the token-tagging task that shares no code with the loop or the adapters.

It knows the task's model and data, and computes the rest its own way: whole global batches in one
forward, the mean negative log-likelihood written out, gradients by torch.autograd.grad, and plain
stochastic gradient descent on a list of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tasks.token_tagging import NO_TARGET, Tagger, TokenTagging, TokenTaggingSettings


@dataclass
class ReferenceRun:
    batches: list[list[int]]
    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    final: dict[str, torch.Tensor]
    validation_loss: float
    validation_accuracy: float


def global_batches(num_samples: int, global_batch_size: int, *, seed: int, num_epochs: int) -> list[list[int]]:
    """The documented plan: one permutation an epoch, by PCG64 seeded with (seed, epoch), cut in order."""
    batches = []
    for epoch in range(num_epochs):
        order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_samples).tolist()
        while order:
            batches.append(order[:global_batch_size])
            del order[:global_batch_size]
    return batches


def mean_loss(model: Tagger, sentences: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, int, int]:
    """Returns the mean loss over all targets, the hits among them and their number."""
    total, hits, count = torch.zeros((), dtype=torch.float64), 0, 0
    for tokens, tags in sentences:
        scores = model(tokens[None])[0]
        log_likelihood = scores - scores.logsumexp(dim=1, keepdim=True)
        for position in range(len(tags)):
            tag = int(tags[position])
            if tag != NO_TARGET:
                total = total - log_likelihood[position, tag]
                hits += int(scores[position].argmax()) == tag
                count += 1
    return total / count, hits, count


def train_reference(
    initial: dict[str, torch.Tensor],
    settings: TokenTaggingSettings,
    *,
    global_batch_size: int,
    seed: int,
    num_epochs: int,
    learning_rate: float,
    weight_decay: float,
) -> ReferenceRun:
    """Trains from the given weights by SGD without clipping at a constant rate."""
    task = TokenTagging(settings)
    task.prepare()
    model = Tagger()
    model.load_state_dict(initial)
    names = [name for name, _ in model.named_parameters()]
    parameters = [parameter for _, parameter in model.named_parameters()]
    batches = global_batches(settings.num_train_samples, global_batch_size, seed=seed, num_epochs=num_epochs)
    losses, gradients = [], []
    for batch in batches:
        loss, _, _ = mean_loss(model, [task._samples["train"][index] for index in batch])
        derivatives = torch.autograd.grad(loss, parameters)
        losses.append(float(loss.detach()))
        gradients.append(dict(zip(names, derivatives, strict=True)))
        with torch.no_grad():
            for parameter, derivative in zip(parameters, derivatives, strict=True):
                decay = weight_decay if parameter.ndim >= 2 else 0.0
                parameter.sub_(learning_rate * (derivative + decay * parameter))
    validation_loss, hits, count = mean_loss(model, task._samples["validation"])
    return ReferenceRun(batches, losses, gradients, model.state_dict(), float(validation_loss.detach()), hits / count)
