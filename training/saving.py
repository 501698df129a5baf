"""Saving of checkpoints by a thread of a rank, while training goes on; where ranks hold parts, all make the whole."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from records.checkpoint import Checkpoint, checkpoint_path, prune, unfinished_checkpoints, write_checkpoint
from records.config import RunConfig
from records.news import Saved, SaveFailed
from records.progress import ProgressLog
from training.writing import WriteProgress
from watch.heartbeat import Heartbeat


class CheckpointSaver:
    """Saves the checkpoints of a run on rank 0 or, where nodes may leave, on one rank of each node.

    Training waits only while the tensors are copied. One checkpoint is written at a time, and the next one waits for
    it. Until it is on the disk, the memory holds one more copy of the training's state: safetensors writes the copied
    tensors from where they are.

    Attributes:
        keeps: Whether this rank writes checkpoints.
        failed_steps: The steps whose checkpoints could not be written.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        progress: ProgressLog,
        heartbeat: Heartbeat,
        *,
        keeps: bool,
        takes_all_ranks: bool = False,
    ) -> None:
        """Makes the part of one rank.

        Args:
            config: The configuration of the run.
            directory: The directory of the run.
            progress: Is told what was saved.
            heartbeat: Tells the launcher that this rank is alive while it waits for a write that goes on.
            keeps: Whether this rank writes checkpoints.
            takes_all_ranks: Whether ranks hold parts of the weights, so that all have a part in making a checkpoint.
        """
        self._directory = directory
        self._progress = progress
        self._write_progress = WriteProgress(heartbeat)
        self._interval = config.save_interval
        self.keeps = keeps
        self._takes_all_ranks = takes_all_ranks
        self._keep = config.keep
        self._stop_on_error = config.on_save_error == "stop"
        self._saved_at = time.monotonic()
        self._writer: threading.Thread | None = None
        self._error: OSError | None = None
        self._best_step: int | None = None
        self.failed_steps: list[int] = []

    @property
    def is_on(self) -> bool:
        """Whether this rank has a part in saving checkpoints."""
        return (self.keeps or self._takes_all_ranks) and self._interval is not None

    @property
    def goes_by_clock(self) -> bool:
        """Whether the interval is given in minutes; the same on all ranks."""
        return self._interval is not None and self._interval.steps is None

    def minutes_have_passed(self) -> bool:
        """Returns whether a checkpoint is due by the clock; False on ranks that write none."""
        if not self.keeps or self._interval is None:
            return False
        return time.monotonic() - self._saved_at >= self._interval.seconds

    def save(self, checkpoint: Callable[[], Checkpoint | None], *, wait: bool = False) -> None:
        """Makes a checkpoint and has a thread write it, on a rank that keeps it.

        Args:
            checkpoint: Copies the state of the training, for a rank that keeps it.
            wait: Whether to return only when the checkpoint is on the disk.

        Raises:
            OSError: This checkpoint (with `wait`) or the last one cannot be written, and that is to stop the run.
        """
        self.finish()
        self._saved_at = time.monotonic()
        content = checkpoint()
        if content is None:
            return
        self._writer = threading.Thread(target=self._write, args=(content,), name="checkpoint-writer")
        self._writer.start()
        if wait:
            self.finish()

    def finish(self) -> None:
        """Waits until the last checkpoint is on the disk.

        Raises:
            OSError: It cannot be written, and that is to stop the run.
        """
        if self._writer is not None:
            with self._write_progress.watched(lambda: unfinished_checkpoints(self._directory)):
                self._writer.join()
            self._writer = None
        if self._error is not None and self._stop_on_error:
            raise self._error

    def note_end_of_training(self) -> None:
        """From now on, a checkpoint that cannot be written does not stop the run, which would cost the model."""
        self._stop_on_error = False

    def _write(self, checkpoint: Checkpoint) -> None:
        # The lowest priority leaves the core to the ranks. On Linux each thread has its own: setpriority(2).
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        step = checkpoint.state.step
        path = checkpoint_path(self._directory, step)
        began = time.perf_counter()
        try:
            write_checkpoint(path, checkpoint, self._write_progress.note)
            best = checkpoint.state.best
            if best is not None and checkpoint_path(self._directory, best.step).exists():
                self._best_step = best.step  # it is kept until a better one is on the disk
            prune(self._directory, keep=self._keep, spare=self._best_step)
        except Exception as error:  # an exception in a thread would go unnoticed
            self.failed_steps.append(step)
            self._error = OSError(f"the checkpoint of step {step} cannot be saved: {error}")
            self._progress.write(SaveFailed(step=step, why=str(error)))
        else:
            self._progress.write(Saved(step=step, path=str(path), seconds=time.perf_counter() - began))
