"""The runs that a profile is made of: one process, processes that do not communicate, ranks of the backend.

Ranks that communicate are on this host, or on hosts that this machine makes (engines/netns.py), one on each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from backends.registry import INDEPENDENT, REFERENCE
from compare.collectives.measurement import pooled, read_collectives
from compare.collectives.selection import changing_collectives
from compare.results import CollectiveSeries
from compare.strict import named
from forecast.measuring import (
    gradients_of,
    halving_compressions,
    interval_of_run,
    last_ready,
    parts_of,
    quartile_spread,
    ratio,
    sent_share,
    spread_of_starts,
)
from forecast.profile import AllReduceTime, Collective, Computing, Profile
from forecast.sending import sending_of
from forecast.times import RankTimes, times_path
from launch import own_command
from launch.options import own_options
from records.config import RunConfig, RunOptions
from records.environment import describe_environment, num_cpus
from records.names import RECORD_NAME
from records.record import RunRecord, read_record
from records.throughput import NUM_WARMUP_STEPS

_NUM_RANKS = 2
# Options of the training on which its times depend, besides those that say how it is divided among ranks.
_OF_THE_WORK = {
    *("task", "device", "threads_per_rank", "allocator", "bind_ranks", "timeout", "hang_timeout"),
    *("precision", "batching", "max_grad_norm", "init_loss_scale", "find_unused_parameters", "torch_compile"),
    *("optimizer", "momentum", "learning_rate", "weight_decay", "on_nan", "dataloader_num_workers", "seed"),
}
_OF_THE_BACKEND = {"grad_compression"}
_SIZES = "4KiB..16MiB"
_SECONDS_PER_POINT = 0.1


class ProfileFailed(Exception):
    """A run of a profile did not complete; the message says which one, and why."""


class Request(NamedTuple):
    """What is to be profiled.

    Attributes:
        config: The training, as it could start.
        asked: The options that the user gave it; other numbers of ranks have other defaults.
        hosts: The engine whose hosts on this machine ranks that communicate are on; None for this host.
        num_samples: The samples of an epoch.
        processes: How many processes compute at the same time, in runs of their own; one is always measured.
        num_steps: How many steps of each start are timed.
        num_starts: How often each run is started.
        with_collectives: Whether the library's all-reduce is measured.
        command: The command, to be repeated.
    """

    config: RunConfig
    asked: RunOptions
    hosts: str | None
    num_samples: int
    processes: list[int]
    num_steps: int
    num_starts: int
    with_collectives: bool
    command: str

    @property
    def samples_per_rank(self) -> int:
        """The samples of one rank in a step."""
        return self.config.global_batch_size // self.config.num_processes


class _Measured(NamedTuple):
    """One kind of run: for each of its starts the times of its ranks, and its record."""

    backend: str
    num_processes: int
    starts: list[list[RankTimes]]
    records: list[RunRecord]

    @property
    def told(self) -> str:
        """What it is, in words."""
        if self.backend == REFERENCE:
            return "one process"
        what = "processes that do not communicate" if self.backend == INDEPENDENT else f"ranks of {self.backend}"
        return f"{self.num_processes} {what}"

    @property
    def ranks(self) -> list[RankTimes]:
        """The times of each rank in all starts."""
        return [RankTimes.joined(of_starts) for of_starts in zip(*self.starts, strict=True)]

    @property
    def steps(self) -> list[list[float]]:
        """By start, what a step took on every rank."""
        return [[second for rank in ranks for second in rank.step_seconds] for ranks in self.starts]

    @property
    def slowest_steps(self) -> list[list[float]]:
        """By start, what each step took on its slowest rank."""
        return [
            [max(step) for step in zip(*(rank.step_seconds for rank in ranks), strict=True)] for ranks in self.starts
        ]


def make_profile(request: Request, directory: Path, say: Callable[[str], None]) -> Profile:
    """Makes all runs, one after the other, and then all of them again, so that starts of a run are far apart.

    Args:
        request: What is to be profiled.
        directory: An empty directory, which receives what the runs leave.
        say: Is told what runs now.

    Raises:
        ProfileFailed: One of the runs did not complete.
        Interrupted: A signal asked to stop; what was running has been ended.
    """
    config, numbers = request.config, sorted({*request.processes, _NUM_RANKS} - {1})
    together, independent = (
        {number: _Measured(backend, number, [], []) for number in numbers} for backend in (config.backend, INDEPENDENT)
    )
    alone = _Measured(REFERENCE, 1, [], [])
    reduces: list[list[CollectiveSeries]] = []
    for start in range(1, request.num_starts + 1):
        which = f", start {start} of {request.num_starts}" if request.num_starts > 1 else ""
        for kind, run in enumerate((alone, *independent.values(), *together.values())):
            say(f"{run.told}{which}")
            ranks, record = _run(request, run.backend, run.num_processes, directory / f"{start}-{kind}")
            run.starts.append(ranks)
            run.records.append(record)
        if request.with_collectives:
            say(f"all-reduces{which}")
            reduces.append(_measure_collectives(request, numbers, directory / f"{start}-collectives.json"))
    collectives = [one for found in fits_of(*reduces).values() for one in found] if reduces else []
    return _profile(request, alone, independent, together, collectives)


def _profile(
    request: Request,
    alone: _Measured,
    independent: Mapping[int, _Measured],
    together: Mapping[int, _Measured],
    collectives: list[Collective],
) -> Profile:
    """Puts together what was measured in one process, in several, by ranks of the backend, and of all-reduces."""
    config, ranks = request.config, together[_NUM_RANKS]
    settings = ranks.records[0].ranks[0].effective_settings
    times = alone.ranks[0]
    computing = _described(request, [(run, run.steps) for run in (alone, *independent.values())])
    work = parts_of(times, computing[0].step_seconds.estimate)
    lacks_some = request.with_collectives and len(collectives) < len(independent)
    return Profile(
        created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=request.command,
        environment=describe_environment(with_torch=True),
        backend=config.backend,
        own_options=own_options(config.backend, config.backend_settings),
        transport=str(settings.get("transport", "unknown")),
        compressions=[] if config.grad_compression != "none" else halving_compressions(config.backend),
        sending=sending_of(settings, config.backend_settings),
        samples_per_rank=request.samples_per_rank,
        num_samples=request.num_samples,
        num_starts=request.num_starts,
        num_steps=len(times.step_seconds),
        micro_steps=alone.records[0].gradient_accumulation_steps,
        data_seconds=work.data,
        forward_seconds=work.forward,
        backward_seconds=work.backward,
        last_backward_seconds=work.last_backward,
        update_seconds=work.update,
        sent_share=sent_share(config.grad_compression),
        gradients=gradients_of(times, work.last_backward),
        computing=computing,
        overlap_slow_down=ratio(last_ready(ranks.ranks), last_ready(independent[_NUM_RANKS].ranks)),
        collectives=collectives,
        together=_described(request, [(run, run.slowest_steps) for run in together.values()]),
        remarks=["an all-reduce took no longer for more bytes on this machine, and was left out"] if lacks_some else [],
    )


def _described(request: Request, runs: Sequence[tuple[_Measured, list[list[float]]]]) -> list[Computing]:
    """Describes runs that all communicate, or that all do not, each with the steps of its starts.

    How far starts of a run differ is taken from all that have a core for each thread, or from all that have not: where
    threads share cores, starts differ by much more.
    """

    def shares_cores(run: _Measured) -> bool:
        return run.num_processes * (request.config.threads_per_rank or 1) > num_cpus()

    described = []
    for run, steps in runs:
        alike = [of_other for other, of_other in runs if shares_cores(other) == shares_cores(run)]
        spread = quartile_spread([rank.step_seconds for rank in run.ranks]) if run.num_processes > 1 else None
        step_seconds = interval_of_run(steps, spread_of_starts(alike))
        described.append(Computing(num_processes=run.num_processes, step_seconds=step_seconds, spread_seconds=spread))
    return described


def _run(request: Request, backend: str, num_processes: int, place: Path) -> tuple[list[RankTimes], RunRecord]:
    """Trains with so many ranks, each with the work of one, and returns what they measured, and the record."""
    config, is_own = request.config, backend == request.config.backend
    asked = config.model_dump(mode="json", include=_OF_THE_WORK | (_OF_THE_BACKEND if is_own else set()))
    options: dict[str, Any] = {
        **asked,
        **config.task_settings,
        **(config.backend_settings if is_own else {}),
        "start_method": request.asked.start_method if is_own else None,
        "scheduling": request.asked.scheduling,
        "global_batch_size": num_processes * request.samples_per_rank,
        "micro_batch_size": config.micro_batch_size,
        "max_steps": NUM_WARMUP_STEPS + request.num_steps,
        "save_every": "never",
        "evaluate": False,
    }
    hosts = [f"--engine={request.hosts}", f"--num-nodes={num_processes}"] if is_own and request.hosts else []
    file = place.with_suffix(".options.json")
    file.write_text(json.dumps({name: value for name, value in options.items() if value is not None}))
    done = own_command.run_command(
        [backend, f"--config={file}", *hosts, f"--num-processes={num_processes}", f"--output-dir={place}"],
        module=("engines.other_ranks", "forecast.rank"),
    )
    why = own_command.why_it_failed(done, place)
    if why is not None:
        raise ProfileFailed(f"the run of {backend} with {num_processes} process(es) did not complete: {why}")
    nodes = [place / f"node{rank}" if hosts else place for rank in range(num_processes)]
    paths = [times_path(node, rank) for rank, node in enumerate(nodes)]
    ranks = [RankTimes.model_validate_json(path.read_bytes()) for path in paths]
    return ranks, read_record(nodes[0] / RECORD_NAME)


def _measure_collectives(request: Request, numbers: list[int], target: Path) -> list[CollectiveSeries]:
    """Returns what all-reduces of one start take where ranks that communicate are."""
    config = request.config
    asked = request.asked.start_method
    where = [f"--engine={request.hosts}"] if request.hosts else [f"--start-method={asked}"] if asked else []
    changing = changing_collectives(config.backend, own_options(config.backend, config.backend_settings))
    done = own_command.run_command(
        [
            *("allreduce", f"--backends={config.backend}", *changing),
            *(f"--num-processes={','.join(map(str, numbers))}", *where),
            *("--operations=all_reduce", f"--sizes={_SIZES}", f"--seconds-per-point={_SECONDS_PER_POINT}"),
            *(f"--device={config.device}", f"--threads-per-rank={config.threads_per_rank}", f"--output={target}"),
        ]
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1].removeprefix("lockstep: ")
        raise ProfileFailed(f"the measurement of all-reduces did not complete: {last}")
    name = named(config.backend, changing)
    return [one for one in read_collectives(target).series if one.name == name]


def fits_of(*starts: Sequence[CollectiveSeries]) -> dict[str, list[Collective]]:
    """Returns, by the name of each series, the lines through all-reduces, from the fewest ranks to the most.

    Series that no line fits are left out.

    Args:
        starts: The same series of each start; of a single one, intervals say nothing of other starts.
    """
    found: dict[str, list[Collective]] = {}
    together = zip(pooled(starts), zip(*starts, strict=True), strict=True)
    for one, of_starts in sorted(together, key=lambda pair: pair[0].num_processes):
        if one.operation == "all_reduce" and one.fit is not None:
            by_size = [[point.seconds for point in same] for same in zip(*(s.points for s in of_starts), strict=True)]
            spread = spread_of_starts(by_size)
            times = [
                AllReduceTime(num_bytes=point.bytes, seconds=interval_of_run(seconds, spread))
                for point, seconds in zip(one.points, by_size, strict=True)
            ]
            fit = Collective(
                num_processes=one.num_processes,
                transport=one.transport,
                latency_seconds=one.fit.latency_seconds,
                bytes_per_second=one.fit.bytes_per_second,
                times=sorted(times, key=lambda time: time.num_bytes),
            )
            found.setdefault(one.name, []).append(fit)
    return found
