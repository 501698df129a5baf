"""A trace of some steps on each rank: torch.profiler's, and the timeline of the backend's library beside it.

Both are in the format of Chrome's tracing, which https://ui.perfetto.dev shows
(https://docs.pytorch.org/docs/stable/profiler.html).
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from contextlib import ExitStack
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function
from typing_extensions import override

from records.files import write_atomically
from records.names import TRACES_NAME
from records.record import TraceRecord
from records.throughput import NUM_WARMUP_STEPS
from training.hooks import Hooks
from training.loop import Trainer
from training.plan import SampleIds
from watch.heartbeat import Heartbeat


class Tracer(Hooks):
    """Traces some steps of a training, with a range for each step and each phase.

    Attributes:
        error: Why a file of the trace is missing; None if none is.
    """

    def __init__(self, trainer: Trainer, directory: Path, heartbeat: Heartbeat) -> None:
        """Prepares the profiler, which loads modules for seconds.

        Args:
            trainer: The trainer, at the step that it begins after.
            directory: The directory of the run.
            heartbeat: Tells the launcher that this rank is alive while it writes.
        """
        self._state, self._backend = trainer.state, trainer.backend
        self._directory = directory
        self._heartbeat = heartbeat
        self._planned = steps_to_trace(trainer.config.trace, after=trainer.state.step, num_steps=trainer.num_steps)
        self._steps: list[int] = []
        self._files: list[str] = []
        self._is_on = False
        self._phase, self._step, self._timeline = ExitStack(), ExitStack(), ExitStack()
        self.error: str | None = None
        is_on_gpu = trainer.backend.device.type == "cuda"
        heartbeat.enter("start")
        self._profiler = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * is_on_gpu])
        self._profiler.prepare_trace()

    @override
    def on_step_begin(self, global_batch: SampleIds) -> None:
        step = self._state.step
        if self._planned and step == self._planned[0]:
            self._start()
        if self._is_on:
            self._phase.close()  # of an evaluation, or of saving
            self._steps.append(step)
            self._step.enter_context(record_function(f"step {step}"))

    @override
    def on_phase(self, phase: str, step: int) -> None:
        if self._is_on:
            self._phase.close()
            self._phase.enter_context(record_function(phase))

    @override
    def on_step_end(self, step: int) -> None:
        if self._is_on:
            self._phase.close()
            self._step.close()
            if step == self._planned[-1]:
                self.finish()

    def finish(self) -> None:
        """Ends the trace and writes it. After the last step to trace, or if the training has ended before, at its end.

        A trace that cannot be written does not end the training; `error` says why.
        """
        if not self._is_on:
            return
        self._is_on = False
        self._heartbeat.enter("saving")
        self._phase.close()
        self._step.close()
        self._profiler.stop_trace()
        self._timeline.close()
        unfinished = self._unfinished("")
        self._profiler.export_chrome_trace(str(unfinished))
        self._keep("", must_exist=True)
        self._keep(".backend", must_exist=False)

    def record(self) -> TraceRecord:
        """Returns what was traced on this rank."""
        return TraceRecord(steps=self._steps, files=self._files, error=self.error)

    def _start(self) -> None:
        with contextlib.suppress(OSError):  # it shows when the trace is to be kept; other ranks wait for this one here
            (self._directory / TRACES_NAME).mkdir(exist_ok=True)
        self._timeline.enter_context(self._backend.timeline(self._unfinished(".backend")))
        self._profiler.start_trace()
        self._is_on = True

    def _unfinished(self, kind: str) -> Path:
        return self._directory / TRACES_NAME / f".rank{self._backend.rank}{kind}.json.{os.getpid()}"

    def _keep(self, kind: str, *, must_exist: bool) -> None:
        """Puts a trace in its place, compressed, if it is complete.

        Libraries say nothing when a disk is full: the file is then missing, or is not JSON.
        """
        unfinished = self._unfinished(kind)
        target = unfinished.with_name(f"rank{self._backend.rank}{kind}.json.gz")
        try:
            if must_exist or unfinished.exists():
                content = unfinished.read_bytes()
                json.loads(content, strict=False)
                write_atomically(target, gzip.compress(content))
                self._files.append(str(target.relative_to(self._directory)))
        except (OSError, ValueError) as error:
            is_cut = isinstance(error, (FileNotFoundError, ValueError))
            why = "it was not written to its end; is the disk full?" if is_cut else str(error)
            self.error = f"the trace {target} could NOT be saved: {why}"
        finally:
            for path in (unfinished, unfinished.with_name(f"{unfinished.name}.tmp")):
                with contextlib.suppress(OSError):
                    path.unlink()


def steps_to_trace(count: int, *, after: int, num_steps: int) -> range:
    """Returns the steps to trace: those after the first ones of this process, or the last ones of a short run.

    The first steps of a process settle libraries, and no speed is computed from them.

    Args:
        count: How many, if the run has so many.
        after: The step after which this process begins, 0 for a new run.
        num_steps: The steps of the whole training.
    """
    first = min(after + NUM_WARMUP_STEPS, max(after, num_steps - count)) + 1
    return range(first, min(first + count, num_steps + 1))
