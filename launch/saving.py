"""When rank 0 saves a checkpoint, and how: beside the training, which waits only while tensors are copied."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from launch.checkpoint import Checkpoint, checkpoint_path, prune, write_checkpoint
from launch.config import RunConfig
from launch.progress import ProgressLog

_SECONDS_TO_LEAVE = 5.0


class CheckpointSaver:
    """Saves the checkpoints of a run, on rank 0; on other ranks nothing is ever due.

    One checkpoint at a time is being written: the next one waits for it. Meanwhile the memory of the machine
    holds the training's state up to four times: itself, its copy, and the file, which safetensors builds in memory.
    """

    def __init__(self, config: RunConfig, directory: Path, progress: ProgressLog, *, rank: int) -> None:
        self._directory = directory
        self._progress = progress
        self._every = config.save_interval if rank == 0 else None
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
        return self._every is not None

    def is_due(self, step: int) -> bool:
        """Whether the interval has passed with this step."""
        if self._every is None:
            return False
        if self._every.steps is not None:
            return step % self._every.steps == 0
        return time.monotonic() - self._saved_at >= self._every.seconds

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

    def leave(self) -> None:
        """Gives what is being written a moment to end, before a process that has failed does."""
        if self._writer is not None:
            self._writer.join(timeout=_SECONDS_TO_LEAVE)

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
            self._progress.write("save-failed", step=step, why=str(error))
        else:
            self._progress.write("saved", step=step, path=str(path), seconds=time.perf_counter() - began)
