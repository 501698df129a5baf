"""The training loop that every rank runs, whatever the backend and the task.

The loop owns the mathematics. With N targets in a global batch over W ranks, a micro-batch contributes
sum(loss) * W / N to the gradient of its rank. Backends average over ranks, so the result is the gradient of the mean
loss over the N targets, however they are spread over ranks and micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext

import torch

from backends.interface import Backend
from records.config import RunConfig
from records.record import EvaluationRecord
from tasks.interface import Task
from training.batch_norm import StatisticsOfRanks, batch_norms
from training.data import Loaded, Loader
from training.decisions import Decisions
from training.evaluation import Evaluator
from training.hooks import Hooks, Observers
from training.losses import OpenStep, OpenSteps
from training.optimizer import build_optimizer, learning_rate_factor
from training.plan import Plan, SampleIds
from training.receiving import IncomingCheckpoint
from training.seeds import WEIGHTS, random_seed, seed_all
from training.state import TrainingState, Trajectory


class Trainer:
    """Trains one task on one backend.

    Attributes:
        plan: Which samples make which global batch.
        num_steps: How many steps the whole training has.
        state: Model, optimizer, and how far the training is.
        loader: What loads the micro-batches of this rank.
        num_batch_norms: How many layers of BatchNorm take statistics from the samples of a micro-batch.
        decisions: What all ranks decide together between two steps.
    """

    def __init__(self, config: RunConfig, task: Task, backend: Backend, decisions: Decisions | None = None) -> None:
        """Builds model and optimizer, and has the backend set them up.

        Args:
            config: The resolved configuration of the run.
            task: The task, prepared.
            backend: The backend, which has joined its group.
            decisions: What ends or interrupts the training; by default, nothing does before its last step.
        """
        self.config = config
        self.task = task
        self.backend = backend
        self.decisions = decisions or Decisions(config, backend)
        self.plan = Plan.of(config, task, world_size=backend.world_size)
        self.num_steps = config.num_steps(self.plan.steps_per_epoch)
        self._num_warmup_steps = config.num_warmup_steps(self.num_steps)
        torch.manual_seed(random_seed(config.seed, WEIGHTS))
        model = task.build_model().to(backend.device)
        layers = batch_norms(model.train())
        self.num_batch_norms = len(layers)
        self._statistics = StatisticsOfRanks(backend)
        if config.sync_batchnorm and backend.world_size > 1:
            self._statistics.attach(layers)
        if config.torch_compile:
            # In place: no name of a weight changes, and DDP, which calls the module, still gets a graph that is
            # cut at its buckets (https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design).
            model.compile()
        self.state = TrainingState(config, task, backend, *backend.setup(model, build_optimizer(config, model)))
        # Looked through in each step: to collect them takes ten times as long.
        self._parameters = dict(self.state.module.named_parameters())
        self._observers = Observers()
        self.loader = Loader(config, task, self.plan, self.state, self._observers)
        self._evaluator = Evaluator(config, task, backend, self._observers)
        self._open_steps = OpenSteps(backend, self.plan, config.logging_steps)
        self._is_first_step = True  # of this process; a resumed run has one, too

    def observe(self, observer: Hooks) -> None:
        """Calls the methods of `observer` from now on, after those of earlier observers."""
        self._observers.add(observer)

    def train(self) -> Trajectory:
        """Trains to the last step, with an evaluation after each epoch and at the end; all ranks may stop before.

        Returns:
            The steps and evaluations, those from before a resumption included.
        """
        state, decisions = self.state, self.decisions
        decisions.begin(state.module)
        if self._evaluation_is_due:  # a run that goes on from a checkpoint may have stopped before it
            self._require_agreement(may_be_last=False)
            self.evaluate((state.step - 1) // self.plan.steps_per_epoch)
        while not (self.is_over or decisions.stop):
            self.train_epoch(*divmod(state.step, self.plan.steps_per_epoch))
        self._observers.on_phase("saving", state.step)
        decisions.finish()
        return state.trajectory

    def train_epoch(self, epoch: int, first: int) -> None:
        """Trains from the global batch numbered `first` to the end of the epoch or of the training, or to a stop."""
        state, decisions, observers = self.state, self.decisions, self._observers
        state.model.train()
        global_batches = self.plan.epoch(epoch)[first : first + self.num_steps - state.step]
        batches = self.loader.load(global_batches)
        observers.on_epoch_begin()
        for number, global_batch in enumerate(global_batches, start=1):
            state.step += 1
            observers.on_step_begin(global_batch)
            began = time.perf_counter()
            taken = self.train_step(epoch, global_batch, batches)
            self._open_steps.add(taken, time.perf_counter() - began)
            observers.on_update()
            decisions.after_step(state.step, is_last=self._is_last_step)
            if self._reads_losses(ends_epoch=number == len(global_batches)):
                self._read_losses()
            if self._is_first_step:
                decisions.note_first_step(state.module)
                self._is_first_step = False
            observers.on_step_end(state.step)
            evaluates = self._evaluation_is_due and not decisions.stop_before_evaluation(is_last=self._is_last_step)
            ends_unevaluated = self._is_last_step and not self.config.evaluate
            if evaluates or ends_unevaluated or decisions.save_is_due(state.step, is_over=self.is_over):
                self._require_agreement(may_be_last=ends_unevaluated or (evaluates and self._may_be_over))
            self._save_if_due(is_best=evaluates and self.evaluate(epoch))
            if decisions.stop:
                return

    def train_step(self, epoch: int, global_batch: SampleIds, batches: Iterator[Loaded]) -> OpenStep:
        """Takes one optimizer step on this rank's share of a global batch.

        Args:
            epoch: The epoch, for the record of the step.
            global_batch: The samples of all ranks.
            batches: This rank's micro-batches from this step on.

        Returns:
            The step, whose loss is still to be summed over ranks.
        """
        config, task, backend, state, observers = self.config, self.task, self.backend, self.state, self._observers
        learning_rate = self.set_learning_rate()
        num_micro_steps = self.plan.num_micro_steps(global_batch)
        num_targets = max(1, task.num_targets("train", global_batch.tolist()))  # the loss of none is zero
        losses = []
        for micro_step in range(num_micro_steps):
            micro_batch, batch, forward_seed = next(batches)
            observers.on_micro_batch(micro_batch, batch)
            batch = batch.to(backend.device)
            observers.on_phase("forward", state.step)
            self._statistics.counts = micro_batch.weight > 0
            seed_all(forward_seed)
            with nullcontext() if micro_step == num_micro_steps - 1 else backend.no_sync():
                with backend.autocast():
                    loss = task.loss_sum(state.model, batch) * (micro_batch.weight / num_targets)
                observers.on_phase("backward", state.step)
                backend.backward(loss * self._world_size_or_nan(loss))
            losses.append(loss.detach())
        if not config.find_unused_parameters:
            require_gradients(backend, self._parameters)
        observers.on_phase("update", state.step)
        result = backend.step(config.max_grad_norm)
        state.num_updates += not result.skipped
        return OpenStep(
            step=state.step,
            epoch=epoch,
            num_samples=len(global_batch),
            learning_rate=learning_rate,
            skipped=result.skipped,
            losses=losses,
            grad_norm=result.grad_norm,
        )

    def set_learning_rate(self) -> float:
        """Sets the learning rate, which follows from the number of updates taken; a skipped step does not count."""
        learning_rate = self.config.learning_rate * learning_rate_factor(
            self.config.lr_scheduler,
            step=self.state.num_updates,
            num_steps=self.num_steps,
            num_warmup_steps=self._num_warmup_steps,
        )
        for group in self.state.optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate

    def finished_model(self) -> torch.nn.Module:
        """Returns the task's own module after the training, without what the training has put into it."""
        self._statistics.detach()
        return self.state.module

    def _world_size_or_nan(self, loss: torch.Tensor) -> torch.Tensor | int:
        """Returns the world size, by which backends divide when they average.

        With --on-nan skip it is NaN for a loss that is not finite, since the gradient of such a loss may be finite.
        The averaged gradient then tells all ranks to skip the update, without further communication.
        """
        if self.config.on_nan != "skip":
            return self.backend.world_size
        return torch.where(loss.detach().isfinite(), self.backend.world_size, math.nan)

    def evaluate(self, epoch: int) -> bool:
        """Evaluates the whole validation split after the current step, on all ranks together.

        Returns:
            Whether this evaluation is the best so far, by the metric that was chosen; False if none was.
        """
        state, metric = self.state, self.config.metric_for_best_model
        began = time.perf_counter()
        self._observers.on_evaluation_begin(state.step)
        found = self._evaluator.evaluate(state.module, state.step)
        seconds = time.perf_counter() - began
        evaluation = EvaluationRecord(step=state.step, epoch=epoch, seconds=seconds, **found._asdict())
        state.add_evaluation(evaluation)
        self._observers.on_evaluation_end(evaluation)
        return metric is not None and state.judge(self._evaluator.value_of_rank_0(found.metrics, metric))

    def load_checkpoint(self, checkpoint: IncomingCheckpoint) -> None:
        """Restores what `TrainingState.checkpoint` returned, on every rank.

        Raises:
            ValueError: It does not fit this training.
        """
        step = checkpoint.state.step
        history = checkpoint.facts.get("history")
        if step > self.num_steps or history is None or history.shape[:1] != (step,):
            raise ValueError(f"the checkpoint is of step {step}, which does not fit a run of {self.num_steps}")
        self.state.require_fitting_optimizer(checkpoint)
        self.rehearse()
        self.state.load_checkpoint(checkpoint)

    def rehearse(self) -> None:
        """Takes a step that is overwritten afterwards, so that libraries have settled what their first step settles.

        DDP rebuilds its buckets after the first backward pass, and at more than two ranks the place of a gradient in
        a bucket decides in which order it is summed. The unbroken run had done so long before.
        """
        first = self.plan.epoch(0)[0]
        self.state.model.train()
        self.train_step(0, first, self.loader.load([first]))

    def _read_losses(self) -> None:
        """Sums the losses of the last steps over all ranks and counts the votes that travel with them.

        Raises:
            FloatingPointError: A loss or a gradient is not finite, and that is to end the run.
        """
        records, votes = self._open_steps.read(self.decisions.votes())
        self.decisions.count(votes, is_last=self._is_last_step)
        self.state.add_steps(records)
        self._observers.on_losses_read(records)
        if self.config.on_nan == "stop":
            self._open_steps.require_finite(records)
        self._open_steps.clear()

    def _reads_losses(self, *, ends_epoch: bool) -> bool:
        """Whether the losses are read after this step, the same on all ranks. A checkpoint needs them."""
        step, decisions = self.state.step, self.decisions
        is_logged = self._open_steps.are_due(step) or self._is_first_step or ends_epoch
        return is_logged or decisions.stop or decisions.saves_after(step)

    def _require_agreement(self, *, may_be_last: bool) -> None:
        """Makes sure that what is about to be evaluated or saved is the same on all ranks."""
        self._observers.on_phase("evaluation", self.state.step)
        self.decisions.require_agreement(self.state.module, self.state.step, may_be_last=may_be_last)

    def _save_if_due(self, *, is_best: bool) -> None:
        """Has rank 0 save, which takes no other rank where all have the same weights and the same optimizer state."""
        decisions, step = self.decisions, self.state.step
        if decisions.saves_here(is_over=self.is_over) and (
            is_best or decisions.save_is_due(step, is_over=self.is_over)
        ):
            self._observers.on_phase("saving", step)
            decisions.save(self.state)

    @property
    def is_over(self) -> bool:
        """Whether the last step was taken, or the patience of early stopping has ended."""
        return self._is_last_step or self._patience_ends(self.state.evaluations_since_best)

    @property
    def _may_be_over(self) -> bool:
        """Whether the evaluation that is due may be the last one."""
        return self._is_last_step or self._patience_ends(self.state.evaluations_since_best + 1)

    def _patience_ends(self, evaluations_since_best: int) -> bool:
        patience = self.config.early_stopping_patience
        return patience is not None and evaluations_since_best >= patience

    @property
    def _is_last_step(self) -> bool:
        return self.state.step == self.num_steps

    @property
    def _evaluation_is_due(self) -> bool:
        if not self.config.evaluate:
            return False
        ends_epoch = self.state.step % self.plan.steps_per_epoch == 0
        return self.state.evaluated_step < self.state.step and (ends_epoch or self._is_last_step)


def require_gradients(backend: Backend, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Makes sure that every trainable parameter got a gradient, since backends treat one without differently.

    Args:
        backend: The backend that computed the gradients.
        parameters: The parameters by name.

    Raises:
        ValueError: It names the parameters that got none.
    """
    missing = [name for name, one in parameters.items() if one.requires_grad and not backend.has_gradient(one)]
    if missing:
        raise ValueError(
            f"{len(missing)} parameter(s) got no gradient: {', '.join(missing[:5])}; backends treat such "
            "parameters differently, so freeze them or pass --find-unused-parameters"
        )
