"""What one rank of a run takes: ``python -m training.sizes DIRECTORY`` measures it, for a dry run.

The directory holds the configuration, and receives the sizes. This process is rank 0 of a world whose other ranks do
not exist, so that buckets and parts of weights are those of the run, whatever its number of ranks. Where an adapter
cannot be given such a world, the steps are those of one process.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from typing_extensions import override

from backends.interface import Backend
from backends.pretended_group import PretendedGroup, pretend_group
from backends.registry import find_backend, load_backend, reference_backend
from records.config import RunConfig
from records.names import CONFIG_NAME
from records.resident import peak_resident_bytes
from records.sizes import SIZES_NAME, RankSizes
from tasks.interface import Batch
from tasks.registry import load_task
from training.data import Loader
from training.hooks import Hooks
from training.loop import Trainer
from training.memory import MemoryMeter, sizes_of_storages
from training.plan import MicroBatch, Plan, SampleIds, heaviest_share
from training.room import checkpoint_bytes, model_bytes

# DDP arranges its buckets anew in the second step, and PowerSGD begins with the third.
NUM_STEPS = 3


class _HeaviestShare(Plan):
    """A plan whose every step has the micro-batch with most to compute, for any rank."""

    share: list[MicroBatch]

    @override
    def micro_batches(self, global_batch: SampleIds, rank: int) -> list[MicroBatch]:
        return self.share

    @override
    def num_micro_steps(self, global_batch: SampleIds) -> int:
        return len(self.share)


class _GradientPlaces(Hooks):
    """Notes where the gradients of the last step lie: their sizes by address."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.sizes: dict[int, int] = {}

    @override
    def on_phase(self, phase: str, step: int) -> None:
        if phase == "update":
            parameters = self._trainer.state.module.parameters()
            self.sizes = sizes_of_storages(one.grad for one in parameters if one.grad is not None)


class _FirstMicroStep(Hooks):
    """Notes what has entered the communication library when the second micro-step of a step begins."""

    def __init__(self, group: PretendedGroup | None) -> None:
        self._group = group
        self._num_begun = 0
        self.entered: dict[str, int] = {}

    @override
    def on_micro_batch(self, micro_batch: MicroBatch, batch: Batch) -> None:
        self._num_begun += 1
        if self._num_begun == 2 and self._group is not None:
            self.entered = dict(self._group.entered)


def measure(config: RunConfig, directory: Path) -> RankSizes:
    """Takes a few steps as rank 0 of a run, on the micro-batch with most to compute, and returns what that took.

    Args:
        config: The configuration of the run. Its device must be one of this machine.
        directory: Where to write what the profiler leaves.
    """
    # With the activations, and with a loss scale under which no step is skipped.
    changes = {"diagnose": True, "init_loss_scale": 1.0, "torch_compile": False, "dataloader_num_workers": 0}
    config = config.model_copy(update=changes)
    task_class, row = load_task(config.task), find_backend(config.backend)
    task = task_class(task_class.Settings.model_validate(config.task_settings))
    task.prepare()
    options, group = config.backend_options(row.settings), None
    # Steps of a run on GPUs may be taken on a CPU, on which a backend may not compute, or not in this precision.
    precisions = row.capabilities.precisions.get(config.device, ())
    is_here = row.unavailable_reason() is None and config.precision in precisions
    if is_here and (adapter := load_backend(config.backend)).can_pretend(options):
        group = join_pretended(config.num_processes)
        backend: Backend = adapter(options)
    else:
        backend = reference_backend(options)
    trainer = Trainer(config, task, backend)
    trainer.observe(meter := MemoryMeter(trainer))
    of_run = Plan.of(config, task)
    num_micro_steps = of_run.num_micro_steps(of_run.epoch(0)[0])
    steps = _steps(trainer, has_several=num_micro_steps > 1)
    for _ in range(NUM_STEPS - 1):
        next(steps)
    resident_bytes = peak_resident_bytes()  # before the profiler is loaded
    trainer.observe(first := _FirstMicroStep(group))
    peak_bytes, entered = _last_step(trainer, group, lambda: next(steps), directory / "trace.json")
    trainable = [parameter for parameter in trainer.state.module.parameters() if parameter.requires_grad]
    return RankSizes(
        memory=meter.record(),
        peak_bytes=peak_bytes,
        resident_bytes=resident_bytes,
        entered=entered and in_all_micro_steps(entered, first.entered, num_micro_steps),
        gradient_bytes=sum(one.numel() * one.element_size() for one in trainable),
        gradient_elements=sum(one.numel() for one in trainable),
        model_bytes=model_bytes(trainer.state.module),
        checkpoint_bytes=checkpoint_bytes(config, trainer.state.module),
    )


def in_all_micro_steps(entered: Mapping[str, int], in_first: Mapping[str, int], num_micro_steps: int) -> dict[str, int]:
    """Returns the bytes that enter in a step of so many micro-steps, of which at most two were taken.

    All micro-steps but the last are like the first: where each gathers weights that ranks hold parts of, they count.

    Args:
        entered: The bytes by operation that entered in the step that was taken.
        in_first: Those of its first micro-step, if there was a second.
        num_micro_steps: The number of micro-steps.
    """
    more = max(0, num_micro_steps - 2)
    return {operation: num_bytes + more * in_first.get(operation, 0) for operation, num_bytes in entered.items()}


def join_pretended(num_processes: int) -> PretendedGroup | None:
    """Makes this process rank 0 of so many; None would leave it to the adapter to join a group."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": str(num_processes)}
    os.environ |= {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return pretend_group(num_processes)


def _steps(trainer: Trainer, *, has_several: bool) -> Iterator[None]:
    """Takes a step each time that it is advanced: the heaviest micro-batch, and one more if steps have several."""
    plan = _HeaviestShare.of(trainer.config, trainer.task)
    assert isinstance(plan, _HeaviestShare)
    share = heaviest_share(trainer.plan, trainer.num_steps)
    # In a short batch, it may be alone.
    plan.share = share * 2 if has_several and len(share) == 1 else share
    trainer.plan = plan
    loader = Loader(trainer.config, trainer.task, plan, trainer.state, Hooks())
    global_batch = plan.epoch(0)[0]
    trainer.state.model.train()
    while True:
        batches = loader.load([global_batch])
        trainer.state.step += 1
        trainer.train_step(0, global_batch, batches)
        yield


def _last_step(
    trainer: Trainer, group: PretendedGroup | None, take: Callable[[], None], trace: Path
) -> tuple[int, dict[str, int] | None]:
    """Takes a step; returns the bytes of all tensors at its peak, and those that entered the communication library."""
    device = trainer.backend.device
    if group is not None:
        group.entered.clear()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        take()
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = _peak_on_cpu(trainer, take, trace)
    return peak, dict(group.entered) if group is not None else None


def _peak_on_cpu(trainer: Trainer, take: Callable[[], None], trace: Path) -> int:
    """Returns the bytes of all tensors at the peak of a step, from what torch.profiler sees of the allocator.

    See `profile_memory` in https://docs.pytorch.org/docs/stable/profiler.html. What was there before is counted apart:
    all that Python holds, and gradients that lie in buckets of a library.
    """
    trainer.observe(places := _GradientPlaces(trainer))
    held = sizes_of_storages(
        one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.device.type == "cpu"
    )
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        take()
    profiler.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_bytes())["traceEvents"] if event.get("name") == "[memory]"]
    allocated = {event["args"]["Addr"] for event in events if event["args"]["Bytes"] > 0}
    held |= {address: size for address, size in places.sizes.items() if address not in allocated}
    change = most = 0
    for event in sorted(events, key=lambda event: float(event["ts"])):
        change += event["args"]["Bytes"]
        most = max(most, change)
    return sum(held.values()) + most


def main(directory: str) -> None:
    """Measures what the directory asks for."""
    place = Path(directory)
    sizes = measure(RunConfig.model_validate_json((place / CONFIG_NAME).read_bytes()), place)
    (place / SIZES_NAME).write_text(sizes.model_dump_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
