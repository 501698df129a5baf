"""The training loop that every rank runs, whatever the backend and the task.

The loop owns the mathematics. With N targets in a global batch over W ranks, a micro-batch
contributes sum(loss) * W / N: backends average over ranks, so the gradient is that of the mean
loss over the N targets, however they are spread over ranks and micro-steps.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from backends.interface import Backend
from records.checkpoint import (
    BestModel,
    Checkpoint,
    CheckpointState,
    flatten_optimizer,
    unflatten_optimizer,
    with_prefix,
    without_prefix,
)
from records.config import RunConfig
from records.progress import ProgressLog
from records.record import EvaluationRecord, StepRecord, metric_sign
from tasks.interface import Batch, Task
from training.agreement import Agreement
from training.plan import MicroBatch, Plan, SampleIds, evaluation_batches, random_seed
from training.saving import CheckpointSaver
from training.schedule import learning_rate_factor
from training.stopping import StopRequest
from watch.failures import FailureKind, PeerStopped
from watch.heartbeat import Heartbeat

# What a random stream is for, so that no two share a seed.
_WEIGHTS, _DATA, _DROPOUT, _EVALUATION = range(4)


@dataclass
class Trajectory:
    """What a run went through: `steps` and `evaluations` are equal on all ranks, the rest is this rank's."""

    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    own_seconds: list[float] = field(default_factory=list)
    first_step_at: float | None = None


@dataclass
class _OpenStep:
    """A step whose loss and gradient norm still lie on the device, the loss not yet summed over ranks."""

    record: StepRecord
    loss_shares: list[torch.Tensor]
    grad_norm: torch.Tensor

    @property
    def loss_share(self) -> torch.Tensor:
        """What this rank contributes to the loss, 0-d."""
        # Converted by hand: functions that Apex O1 replaces refuse to mix dtypes.
        return torch.stack([share.double() for share in self.loss_shares]).sum()


class Trainer:
    """Trains one task on one backend."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        backend: Backend,
        progress: ProgressLog,
        *,
        heartbeat: Heartbeat | None = None,
        saver: CheckpointSaver | None = None,
        stop_request: StopRequest | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        self.config = config
        self.task = task
        self.backend = backend
        self.progress = progress
        self.heartbeat = heartbeat or Heartbeat()
        self.saver = saver
        self.stop_request = stop_request
        self.agreement = agreement
        self.plan = Plan(
            num_samples=task.num_samples("train"),
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            world_size=config.num_processes,
            seed=config.seed,
        )
        epochs_steps = config.num_train_epochs * self.plan.steps_per_epoch
        self.num_steps = config.max_steps if config.max_steps > 0 else epochs_steps
        self.num_warmup_steps = math.ceil(config.warmup_ratio * self.num_steps)
        torch.manual_seed(random_seed(config.seed, _WEIGHTS))
        model = task.build_model().to(backend.device)
        if config.torch_compile:
            # In place: no name of a weight changes, and DDP, which calls the module, still gets a graph
            # cut at its buckets (https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design).
            model.compile()
        self.model, self.optimizer = backend.setup(model, build_optimizer(config, model))
        self.trajectory = Trajectory()
        self.step = 0
        self.num_updates = 0
        self.evaluated_step = 0
        self.best: BestModel | None = None
        self.evaluations_since_best = 0
        self.was_stopped = False
        self._is_save_agreed = False
        self._open_steps: list[_OpenStep] = []
        self._history = [_as_matrix([])]

    def train(self) -> Trajectory:
        """Trains to the last step, evaluating after every epoch and at the end, unless asked to stop before."""
        if self.agreement is not None:
            self.agreement.begin(self.backend.unwrap(self.model))
        if self._evaluation_is_due:  # the run to go on from was stopped before it
            self._require_agreement()
            self.evaluate((self.step - 1) // self.plan.steps_per_epoch)
        while not (self._is_over or self.was_stopped):
            self._train_epoch(*divmod(self.step, self.plan.steps_per_epoch))
        if self.saver is not None:
            self.heartbeat.enter("saving")
            self.saver.finish()
        return self.trajectory

    def _train_epoch(self, epoch: int, first: int) -> None:
        """Trains from the global batch numbered `first` to the end of the epoch, or of the run."""
        self.model.train()
        global_batches = self.plan.epoch(epoch)[first : first + self.num_steps - self.step]
        step_began = time.perf_counter()
        batches = self._load(global_batches)
        for global_batch in global_batches:
            self.step += 1
            own_before = self.heartbeat.own_seconds
            self.train_step(epoch, global_batch, batches)
            self._stop_if_asked()
            if self._must_close(is_last=global_batch is global_batches[-1]):
                self._close_steps()
            if self._is_first_step:
                self.trajectory.first_step_at = time.time()
                if self.agreement is not None:
                    self.agreement.warn_of_changed_buffers(self.backend.unwrap(self.model))
            self.trajectory.own_seconds.append(self.heartbeat.own_seconds - own_before)
            step_ended = time.perf_counter()
            self.trajectory.step_seconds.append(step_ended - step_began)
            step_began = step_ended
            self.progress.beat(step=self.step, num_steps=self.num_steps, loss=self.trajectory.steps[-1].loss)
            evaluates = self._evaluation_is_due and not self._stops_before_evaluation()
            if evaluates or self._save_is_due:
                self._require_agreement(may_be_last=evaluates and self._may_be_over)
            self._save_if_due(is_best=evaluates and self.evaluate(epoch))
            if self.was_stopped:
                return

    @property
    def _is_over(self) -> bool:
        patience = self.config.early_stopping_patience
        return self.step == self.num_steps or (patience is not None and self.evaluations_since_best >= patience)

    @property
    def _may_be_over(self) -> bool:
        """Whether the evaluation that is due may be the last."""
        patience = self.config.early_stopping_patience
        return self.step == self.num_steps or (patience is not None and self.evaluations_since_best + 1 >= patience)

    def _require_agreement(self, *, may_be_last: bool = False) -> None:
        """Makes sure that what is about to be evaluated or saved is the same on all ranks."""
        if self.agreement is not None:
            self.heartbeat.enter("evaluation")
            self.agreement.check(self.backend.unwrap(self.model), self.step, may_be_last=may_be_last)

    @property
    def _evaluation_is_due(self) -> bool:
        ends_epoch = self.step % self.plan.steps_per_epoch == 0
        return self.evaluated_step < self.step and (ends_epoch or self.step == self.num_steps)

    def _must_close(self, *, is_last: bool) -> bool:
        """Whether the loss is to be read after this step, the same on all ranks: what is saved has no open steps."""
        interval = self.config.save_interval
        return (
            self.step % self.config.logging_steps == 0
            or self._is_first_step
            or is_last
            or self.was_stopped
            or (interval is not None and interval.steps is not None and self.step % interval.steps == 0)
        )

    def _stop_if_asked(self) -> None:
        """Finds out whether all ranks stop after this step; or leaves that to `_close_steps`."""
        stop = self.stop_request
        # After the last step, what is left takes no longer than to save and start again.
        if stop is not None and not stop.travels_with_loss and self.step < self.num_steps:
            self.was_stopped = stop.is_agreed(self.step)

    def _stops_before_evaluation(self) -> bool:
        """Agrees with all ranks whether to leave the evaluation, which may take long, to the run that goes on."""
        stop = self.stop_request
        if stop is not None and not (self.was_stopped or stop.travels_with_loss) and self.step < self.num_steps:
            asked = torch.tensor(float(stop.is_asked()), device=self.backend.device)
            self.was_stopped = bool(self.backend.all_reduce(asked, "max") > 0)
        return self.was_stopped

    @property
    def _save_is_due(self) -> bool:
        """Whether a checkpoint is due after this step; all ranks know, since they compare their weights before it."""
        interval = self.config.save_interval
        if self.saver is None or interval is None:
            return False
        by_steps = interval.steps is not None and self.step % interval.steps == 0
        is_due = not (self._open_steps or self._is_over) and (by_steps or self._is_save_agreed)
        return is_due or self.was_stopped

    def _save_if_due(self, *, is_best: bool) -> None:
        """Has rank 0 save, which needs no other rank: all have the same weights and the same optimizer state."""
        if self.saver is not None and self._is_over:
            self.saver.note_end_of_training()
        if self.agreement is not None and self.agreement.disagreement is not None:
            if not self._is_over:
                self.agreement.end_run()
            return
        if self.saver is not None and self.saver.is_on and (is_best or self._save_is_due):
            self.heartbeat.enter("saving")
            self.saver.save(self.checkpoint, wait=self.was_stopped)

    def checkpoint(self) -> Checkpoint:
        """Copies what another run, on whatever backend and world size, needs to go on after this step."""
        state = self.state_dict()
        tensors, scalars, groups = flatten_optimizer(state["optimizer"])
        tensors = with_prefix("model", state["model"]) | with_prefix("optimizer", tensors)
        self._history = [torch.cat(self._history)]
        tensors["history"] = self._history[0]
        tensors |= with_prefix("buffer", self._hidden_buffers(state["model"]))
        return Checkpoint(
            CheckpointState(
                config=self.config,
                data=self.task.describe(),
                step=self.step,
                num_updates=self.num_updates,
                evaluated_step=self.evaluated_step,
                best=self.best,
                evaluations_since_best=self.evaluations_since_best,
                evaluations=self.trajectory.evaluations,
                backend=state["backend"],
                optimizer_groups=groups,
                optimizer_scalars=scalars,
            ),
            # Contiguous, which is what a file can hold; a copy, since training goes on.
            {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()},
        )

    def _hidden_buffers(self, weights: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The buffers that are in no state_dict."""
        return {name: buffer for name, buffer in self.backend.unwrap(self.model).named_buffers() if name not in weights}

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Restores what `checkpoint` returned, on every rank.

        Raises:
            ValueError: It was saved of another model.
        """
        state, tensors = checkpoint.state, checkpoint.tensors
        if state.step > self.num_steps or len(tensors.get("history", ())) != state.step:
            raise ValueError(f"the checkpoint is of step {state.step}, which does not fit a run of {self.num_steps}")
        optimizer_tensors = without_prefix("optimizer", tensors)
        self._check_optimizer(optimizer_tensors, state.optimizer_groups)
        # The hyper-parameters are those of the configuration, which has been checked.
        groups = self.optimizer.state_dict()["param_groups"]
        optimizer = unflatten_optimizer(optimizer_tensors, state.optimizer_scalars, groups)
        self._rehearse()
        try:
            self.load_state_dict(
                {
                    "model": without_prefix("model", tensors),
                    "optimizer": optimizer,
                    "backend": state.backend,
                    "step": state.step,
                    "num_updates": state.num_updates,
                }
            )
            buffers = dict(self.backend.unwrap(self.model).named_buffers())
            for name, content in without_prefix("buffer", tensors).items():
                # One that is in no state_dict may come and go, or grow, in training: a cache, filled as it is needed.
                if name in buffers and buffers[name].shape == content.shape:
                    buffers[name].copy_(content)
        except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"the checkpoint is of another model ({' '.join(str(error).split())[:300]})") from error
        self.evaluated_step = state.evaluated_step
        self.best = state.best
        self.evaluations_since_best = state.evaluations_since_best
        self._history = [tensors["history"]]
        self.trajectory.steps = _from_matrix(tensors["history"])
        self.trajectory.evaluations = list(state.evaluations)

    def _check_optimizer(self, tensors: dict[str, torch.Tensor], groups: list[dict[str, Any]]) -> None:
        """Refuses state that does not fit the parameters: fused kernels would read and write past its end.

        Raises:
            ValueError: It says what does not fit.
        """
        own = self.optimizer.state_dict()["param_groups"]
        if [group.get("params") for group in groups] != [group["params"] for group in own]:
            raise ValueError("the checkpoint is of another model (its optimizer has other parameters)")
        shapes = [parameter.shape for group in self.optimizer.param_groups for parameter in group["params"]]
        for name, tensor in tensors.items():
            number, _, what = name.partition(".")
            fits = number.isdecimal() and int(number) < len(shapes) and tensor.is_floating_point()
            if not fits or tensor.shape != (torch.Size([]) if what == "step" else shapes[int(number)]):
                raise ValueError(f"the checkpoint is of another model (its optimizer state {name} does not fit)")

    def _rehearse(self) -> None:
        """Takes a step whose effects are then overwritten, so that what libraries settle in the first one is settled.

        DDP lays its buckets out anew after the first backward pass, and at more than two ranks the place
        in a bucket decides in which order a gradient is summed: the unbroken run had done so long before.
        """
        first = self.plan.epoch(0)[0]
        self.model.train()
        self.train_step(0, first, self._load([first]))
        self._open_steps.clear()
        self.trajectory = Trajectory()

    def state_dict(self) -> dict[str, Any]:
        """Returns what training itself needs to go on after this optimizer step.

        The weights are those of the task's own module, the optimizer's state is in torch's format,
        `step` is the position in the plan and `num_updates` that in the schedule.
        """
        return {
            "model": self.backend.weights(self.model),
            "optimizer": self.optimizer.state_dict(),
            "backend": self.backend.state_dict(),
            "step": self.step,
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned, on every rank."""
        self.backend.load_weights(self.model, state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.backend.load_state_dict(state["backend"])
        self.step = state["step"]
        self.num_updates = state["num_updates"]

    @property
    def _is_first_step(self) -> bool:
        """Whether this process has not yet completed a step; a resumed run, too, has a first one."""
        return self.trajectory.first_step_at is None

    def train_step(self, epoch: int, global_batch: SampleIds, batches: Iterator[Batch]) -> None:
        """Takes one optimizer step on this rank's share of a global batch."""
        config, backend = self.config, self.backend
        learning_rate = self._set_learning_rate()
        micro_batches = self.plan.micro_batches(global_batch, backend.rank)
        num_targets = self.task.num_targets("train", global_batch.tolist())
        loss_shares = []
        samples = tokens = positions = 0
        for micro_step, micro_batch in enumerate(micro_batches):
            batch = next(batches).to(backend.device)
            self.heartbeat.enter("forward")
            _seed_all(config.seed, _DROPOUT, backend.rank, self.step, micro_step)
            is_last = micro_step == len(micro_batches) - 1
            with nullcontext() if is_last else backend.no_sync():
                with backend.autocast():
                    loss = self.task.loss_sum(self.model, batch) * (micro_batch.weight / num_targets)
                self.heartbeat.enter("backward")
                backend.backward(loss * self._backward_factor(loss))
            loss_shares.append(loss.detach())
            if micro_batch.weight:
                samples += len(micro_batch.sample_ids)
                tokens += batch.num_tokens
                positions += batch.num_positions
        if not config.find_unused_parameters:
            _require_gradients(backend.unwrap(self.model))

        self.heartbeat.enter("update")
        result = backend.step(config.max_grad_norm)
        self.num_updates += not result.skipped

        record = StepRecord(
            step=self.step,
            epoch=epoch,
            num_samples=len(global_batch),
            loss=None,
            grad_norm=None,
            learning_rate=learning_rate,
            skipped=result.skipped,
        )
        self._open_steps.append(_OpenStep(record, loss_shares, result.grad_norm))
        self.trajectory.samples.append(samples)
        self.trajectory.tokens.append(tokens)
        self.trajectory.positions.append(positions)

    def _backward_factor(self, loss: torch.Tensor) -> torch.Tensor | int:
        """What undoes the division by the world size in the average over ranks.

        Where updates are to be left out: not a number for a loss that is none, whose gradient may be finite
        all the same. The reduction then tells all ranks, at no cost in communication.
        """
        if self.config.on_nan != "skip":
            return self.backend.world_size
        return torch.where(loss.detach().isfinite(), self.backend.world_size, math.nan)

    def evaluate(self, epoch: int) -> bool:
        """Evaluates the whole validation split, each sample once, on all ranks together.

        Every rank fills its own rows of a zero matrix; the sum over ranks is the single-process
        result, from which all ranks compute the same metrics.

        Returns:
            Whether it is the best so far, by the metric that was chosen.
        """
        began = time.perf_counter()
        self.progress.write("evaluating", step=self.step, num_steps=self.num_steps)
        task, backend = self.task, self.backend
        num_samples = task.num_samples("validation")
        rows = torch.zeros(num_samples, task.num_evaluation_columns, dtype=torch.float64, device=backend.device)
        # Not the wrapper, whose forward may communicate: ranks have unequal numbers of batches.
        model = backend.unwrap(self.model)
        model.eval()
        batches = evaluation_batches(
            num_samples,
            batch_size=self.config.eval_batch_size,
            rank=backend.rank,
            world_size=backend.world_size,
        )
        with torch.no_grad(), self._uncompiled():
            for sample_ids in batches:
                self.heartbeat.enter("data", self.step)
                _seed_all(self.config.seed, _EVALUATION, sample_ids.start)
                batch = task.collate("validation", sample_ids).to(backend.device)
                self.heartbeat.enter("evaluation")
                with backend.autocast():
                    rows[sample_ids.start : sample_ids.stop] = task.evaluation_rows(model, batch)
        metrics = task.metrics(backend.all_reduce(rows).cpu())
        metrics = {name: _finite(value) for name, value in metrics.items()}
        evaluation = EvaluationRecord(step=self.step, epoch=epoch, seconds=time.perf_counter() - began, metrics=metrics)
        self.trajectory.evaluations.append(evaluation)
        self.evaluated_step = self.step
        self.progress.write("evaluation", evaluation=evaluation.model_dump())
        return self._judge(metrics)

    def _judge(self, metrics: dict[str, float | None]) -> bool:
        """Compares an evaluation with the best so far; all ranks come to the same result."""
        name = self.config.metric_for_best_model
        if name is None:
            return False
        if name not in metrics:
            raise ValueError(f"--metric-for-best-model {name}: the task computes {', '.join(metrics)}; choose one")
        # Rank 0 decides: on another processor the last digit may differ.
        of_rank_0 = torch.zeros(1, dtype=torch.float64, device=self.backend.device)
        seen = metrics[name]
        if self.backend.rank == 0:
            of_rank_0[0] = math.nan if seen is None else seen
        value = _finite(self.backend.all_reduce(of_rank_0).item())
        sign = metric_sign(name)
        is_best = value is not None and (self.best is None or sign * value > sign * self.best.value)
        if is_best:
            assert value is not None
            self.best = BestModel(step=self.step, value=value)
        self.evaluations_since_best = 0 if is_best else self.evaluations_since_best + 1
        return is_best

    def _uncompiled(self) -> AbstractContextManager[Any]:
        """Compiling once more, for the shapes of the validation split, would take longer than it saves."""
        return torch.compiler.set_stance("force_eager") if self.config.torch_compile else nullcontext()

    def _load(self, global_batches: list[SampleIds]) -> Iterator[Batch]:
        config = self.config
        dataset = _MicroBatches(self.task, self.plan, global_batches, self.backend.rank, self.step, config.seed)
        batches = DataLoader(
            dataset,
            batch_size=None,
            num_workers=config.dataloader_num_workers,
            pin_memory=self.backend.device.type == "cuda",
            # Forking a process that communicates in background threads may deadlock.
            multiprocessing_context="forkserver" if config.dataloader_num_workers else None,
        )
        # Workers begin by loading torch, which may take long and is no hang.
        self.heartbeat.enter("start" if config.dataloader_num_workers else "data", self.step)
        for batch in batches:
            yield batch
            self.heartbeat.enter("data", self.step)

    def _set_learning_rate(self) -> float:
        """Sets the rate that follows from the number of updates taken; a skipped step does not count."""
        learning_rate = self.config.learning_rate * learning_rate_factor(
            self.config.lr_scheduler,
            step=self.num_updates,
            num_steps=self.num_steps,
            num_warmup_steps=self.num_warmup_steps,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate

    def _close_steps(self) -> None:
        """Completes the records of the steps since the last call with one reduction for all of them.

        Raises:
            FloatingPointError: A loss is not finite, and that is to end the run.
        """
        shares = torch.stack([step.loss_share for step in self._open_steps])
        stop, saver = self.stop_request, self.saver
        if stop is not None and stop.travels_with_loss:
            shares = torch.cat([shares, shares.new_tensor([stop.is_asked()])])
        # Only rank 0 knows when minutes have passed.
        if saver is not None and saver.goes_by_clock:
            shares = torch.cat([shares, shares.new_tensor([saver.minutes_have_passed()])])
        losses = self.backend.all_reduce(shares).tolist()
        self._is_save_agreed = saver is not None and saver.goes_by_clock and losses.pop() > 0
        if stop is not None and stop.travels_with_loss:
            self.was_stopped = losses.pop() > 0 and self.step < self.num_steps
        norms = torch.stack([step.grad_norm.double() for step in self._open_steps])
        closed = [
            open_step.record.model_copy(update={"loss": _finite(loss), "grad_norm": _finite(norm)})
            for open_step, loss, norm in zip(self._open_steps, losses, norms.tolist(), strict=True)
        ]
        self.trajectory.steps += closed
        self._history.append(_as_matrix(closed))
        self.progress.write("closed", steps=[step.model_dump() for step in closed])
        if self.config.on_nan == "stop":
            for open_step, record in zip(self._open_steps, closed, strict=True):
                # The scaler skips gradients that overflow; a loss that is not finite no smaller scale would heal.
                if record.loss is None or (record.grad_norm is None and not record.skipped):
                    self._explain_nonfinite(open_step, record)
        self._open_steps.clear()

    def _explain_nonfinite(self, open_step: _OpenStep, record: StepRecord) -> NoReturn:
        """Ends the run on all ranks, each telling whether it was the one."""
        global_batch = self.plan.epoch(record.epoch)[(record.step - 1) % self.plan.steps_per_epoch]
        micro_batches = self.plan.micro_batches(global_batch, self.backend.rank)
        for micro_step, (micro_batch, share) in enumerate(zip(micro_batches, open_step.loss_shares, strict=True)):
            if not share.isfinite():
                samples = ", ".join(map(str, micro_batch.sample_ids[:16].tolist()))
                more = " ..." if len(micro_batch.sample_ids) > 16 else ""
                raise FloatingPointError(
                    f"the loss of step {record.step} is {share.item()} in micro-step {micro_step + 1}, "
                    f"training samples {samples}{more}; lower the learning rate, look at these samples, "
                    "or pass --on-nan skip"
                )
        if record.loss is not None:
            raise FloatingPointError(
                f"the gradient of step {record.step} is not finite, though its loss is; "
                "lower the learning rate, or pass --on-nan skip"
            )
        raise PeerStopped(f"its loss of step {record.step} is not finite", FailureKind.NONFINITE)


class _MicroBatches(Dataset[Batch]):
    """This rank's micro-batches of consecutive global batches, in order."""

    def __init__(
        self, task: Task, plan: Plan, global_batches: list[SampleIds], rank: int, steps_before: int, seed: int
    ) -> None:
        self._task = task
        self._items: list[tuple[MicroBatch, tuple[int, ...]]] = [
            (micro_batch, (seed, _DATA, rank, steps_before + index + 1, micro_step))
            for index, global_batch in enumerate(global_batches)
            for micro_step, micro_batch in enumerate(plan.micro_batches(global_batch, rank))
        ]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Batch:
        # A task that augments its samples at random gets the same ones in any worker.
        micro_batch, key = self._items[index]
        _seed_all(*key)
        return self._task.collate("train", micro_batch.sample_ids.tolist())


def _seed_all(*key: int) -> None:
    """Begins the random streams of torch, numpy and Python anew: none of them carries a state from step to step."""
    seed = random_seed(*key)
    # torch.manual_seed asks for more devices than there are, which takes milliseconds where there is no GPU.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _as_matrix(steps: list[StepRecord]) -> torch.Tensor:
    """The records of steps as one float64 matrix, a column for each of their fields; what is None is NaN."""
    rows = [[math.nan if value is None else float(value) for _, value in step] for step in steps]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, len(StepRecord.model_fields))


def _from_matrix(matrix: torch.Tensor) -> list[StepRecord]:
    rows = [[_finite(value) for value in row] for row in matrix.tolist()]
    return [StepRecord.model_validate(dict(zip(StepRecord.model_fields, row, strict=True))) for row in rows]


def build_optimizer(config: RunConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Builds the optimizer; vectors, which are biases and LayerNorm weights, are not decayed."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
    # The fused step is several times faster on CPU. Under fp16 it would take over the skipping
    # from the loss scaler, and then not every library notices that a step was skipped.
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=config.precision != "fp16")


def _require_gradients(model: torch.nn.Module) -> None:
    missing = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    if missing:
        raise ValueError(
            f"{len(missing)} parameter(s) got no gradient: {', '.join(missing[:5])}; backends treat such "
            "parameters differently, so freeze them or pass --find-unused-parameters"
        )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
