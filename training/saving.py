"""When rank 0 saves a checkpoint, and how: beside the training, which waits only while tensors are copied."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from records.checkpoint import Checkpoint, checkpoint_path, prune, write_checkpoint
from records.config import RunConfig
from records.news import Saved, SaveFailed
from records.progress import ProgressLog


class CheckpointSaver:
    """Saves the checkpoints of a run, on rank 0.

    One checkpoint at a time is being written: the next one waits for it. Meanwhile the memory of the machine
    holds the training's state up to four times: itself, its copy, and the file, which safetensors builds in memory.
    """

    def __init__(self, config: RunConfig, directory: Path, progress: ProgressLog, *, rank: int) -> None:
        self._directory = directory
        self._progress = progress
        self._interval = config.save_interval
        self._is_rank_0 = rank == 0
        self._keep = config.keep
        self._stop_on_error = config.on_save_error == "stop"
        self._saved_at = time.monotonic()
        self._writer: threading.Thread | None = None
        self._error: OSError | None = None
        self._best_step: int | None = None
        self.failed_steps: list[int] = []

    @property
    def is_on(self) -> bool:
        """Whether this rank saves at all."""
        return self._is_rank_0 and self._interval is not None

    @property
    def goes_by_clock(self) -> bool:
        """Whether the interval is one of minutes; the same on all ranks."""
        return self._interval is not None and self._interval.steps is None

    def minutes_have_passed(self) -> bool:
        """Whether a checkpoint is due by the clock of rank 0; False on other ranks."""
        if not self._is_rank_0 or self._interval is None:
            return False
        return time.monotonic() - self._saved_at >= self._interval.seconds

    def save(self, checkpoint: Callable[[], Checkpoint], *, wait: bool = False) -> None:
        """Copies the state that `checkpoint` returns and has it written.

        Raises:
            OSError: This or the last one cannot be written, and that is to stop the run.
        """
        self.finish()
        self._saved_at = time.monotonic()
        self._writer = threading.Thread(target=self._write, args=(checkpoint(),), name="checkpoint-writer")
        self._writer.start()
        if wait:
            self.finish()

    def finish(self) -> None:
        """Waits until what was to be saved is on the disk.

        Raises:
            OSError: It cannot be written, and that is to stop the run.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._error is not None and self._stop_on_error:
            raise self._error

    def note_end_of_training(self) -> None:
        """From now on a checkpoint that cannot be saved is only noted: ending the run would lose more than that."""
        self._stop_on_error = False

    def _write(self, checkpoint: Checkpoint) -> None:
        # Only when no rank wants the core: on Linux a thread has a priority of its own, see setpriority(2).
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        step = checkpoint.state.step
        path = checkpoint_path(self._directory, step)
        began = time.perf_counter()
        try:
            write_checkpoint(path, checkpoint)
            best = checkpoint.state.best
            if best is not None and checkpoint_path(self._directory, best.step).exists():
                self._best_step = best.step  # until a better one is on the disk, this one stays
            prune(self._directory, keep=self._keep, spare=self._best_step)
        except Exception as error:  # in a thread of its own nobody else would hear of it
            self.failed_steps.append(step)
            self._error = OSError(f"the checkpoint of step {step} cannot be saved: {error}")
            self._progress.write(SaveFailed(step=step, why=str(error)))
        else:
            self._progress.write(Saved(step=step, path=str(path), seconds=time.perf_counter() - began))
