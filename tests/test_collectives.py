"""The benchmark of collectives: its arithmetic, its fit, what it refuses, and small real runs of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from backends.ddp import DDPBackend
from backends.interface import Backend, BackendOptions, Capabilities
from backends.registry import find_backend
from compare.collectives.command import format_seconds, format_size, parse_sizes
from compare.collectives.measurement import (
    OPERATIONS,
    CollectivesFile,
    bus_factor,
    collective_point,
    elements_per_rank,
    fit_line,
    read_collectives,
    size_in_bytes,
)
from compare.report.results import CollectivePoint
from contract.patience import stretched
from launch.errors import UsageError
from tests.launching import LOCKSTEP, lockstep, require_backend, require_start_method

SIZES = (2**10, 2**14, 2**18)
TINY = ("--num-processes", "2", "--sizes", "1KB,16KB,256KB", "--seconds-per-point", "0.01", "--timeout", "30")


# What nccl-tests would print: n ranks, S bytes, t seconds, algbw and busbw in GB/s.
@pytest.mark.parametrize(
    ("operation", "num_processes", "num_bytes", "seconds", "algbw", "busbw"),
    [
        ("all_reduce", 2, 10**9, 0.5, 2.0, 2.0),
        ("all_reduce", 4, 10**9, 0.5, 2.0, 3.0),
        ("all_reduce", 8, 128 * 2**20, 0.001, 134.217728, 234.881024),
        ("all_gather", 2, 10**9, 0.5, 2.0, 1.0),
        ("all_gather", 4, 10**9, 0.25, 4.0, 3.0),
        ("gather", 4, 10**9, 0.25, 4.0, 3.0),
        ("broadcast", 8, 10**9, 0.5, 2.0, 2.0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(
    operation: str, num_processes: int, num_bytes: int, seconds: float, algbw: float, busbw: float
) -> None:
    point = collective_point(operation, num_processes, num_bytes, [seconds / 2, seconds, seconds * 5])
    assert point.median_seconds == seconds
    assert point.algbw / 1e9 == pytest.approx(algbw)
    assert point.busbw / 1e9 == pytest.approx(busbw)


@pytest.mark.parametrize(
    ("operation", "num_elements", "num_bytes"),
    [("all_reduce", 256, 1024), ("gather", 85, 1020), ("all_gather", 85, 1020)],
)
def test_sizes_count_the_whole_result(operation: str, num_elements: int, num_bytes: int) -> None:
    assert elements_per_rank(operation, 1024, 3) == num_elements
    assert size_in_bytes(operation, num_elements, 3) == num_bytes


def _points(
    latency: float, bandwidth: float, noise: float, seed: int = 0, num_sizes: int = 10
) -> list[CollectivePoint]:
    random = np.random.default_rng(seed)
    return [
        collective_point("broadcast", 2, size, [(latency + size / bandwidth) * float(np.exp(random.normal(0, noise)))])
        for size in (2**10 * 4**exponent for exponent in range(num_sizes))
    ]


@pytest.mark.parametrize(("latency", "bandwidth"), [(1e-4, 1e9), (5e-6, 2e11), (2e-3, 3e8)])
def test_the_fit_finds_what_was_planted(latency: float, bandwidth: float) -> None:
    exact = fit_line(_points(latency, bandwidth, noise=0))
    assert exact is not None
    assert exact.latency_seconds.estimate == pytest.approx(latency, rel=1e-4)
    assert exact.bytes_per_second.estimate == pytest.approx(bandwidth, rel=1e-4)
    covered = []
    for seed in range(200):
        fit = fit_line(_points(latency, bandwidth, noise=0.1, seed=seed))
        assert fit is not None
        for interval, truth in ((fit.latency_seconds, latency), (fit.bytes_per_second, bandwidth)):
            assert interval.estimate == pytest.approx(truth, rel=0.5)
            assert interval.low is not None
            assert interval.low <= interval.estimate <= (interval.high or np.inf)
            covered.append(interval.low <= truth <= (interval.high or np.inf))
    assert np.mean(covered) == pytest.approx(0.95, abs=0.04)


def test_no_latency_is_a_latency_of_nothing() -> None:
    fit = fit_line(_points(0.0, 1e9, noise=0.05))
    assert fit is not None
    assert fit.latency_seconds.low == 0
    assert fit.latency_seconds.estimate < 1e-6
    assert fit.bytes_per_second.estimate == pytest.approx(1e9, rel=0.1)


def test_a_bandwidth_that_the_sizes_do_not_tell_has_no_upper_end() -> None:
    seconds = {2**10: 1.0e-3, 2**11: 1.2e-3, 2**12: 0.9e-3, 2**13: 1.01e-3}
    fit = fit_line([collective_point("broadcast", 2, size, [time]) for size, time in seconds.items()])
    assert fit is not None
    assert fit.bytes_per_second.high is None


def test_there_is_no_fit_without_three_sizes_and_growth() -> None:
    assert fit_line(_points(1e-4, 1e9, noise=0, num_sizes=2)) is None
    assert fit_line(_points(1e-4, 1e9, noise=0, num_sizes=3)) is not None
    assert fit_line([collective_point("broadcast", 2, 1024, [seconds]) for seconds in (1e-3, 2e-3, 3e-3)]) is None
    shrinking = [collective_point("broadcast", 2, size, [1 / size]) for size in SIZES]
    assert fit_line(shrinking) is None


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1KB", [1024]),
        ("64", [64]),
        ("8B, 4KiB", [8, 4096]),
        ("1kb..64kb", [2**10, 2**12, 2**14, 2**16]),
        ("1KB..2KB", [1024, 2048]),
        ("1MB..1MB", [2**20]),
        ("64KB,1KB,1KB..4KB", [1024, 4096, 65536]),
        ("4GB", [2**32]),
    ],
)
def test_sizes_that_are_understood(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "named", "remedy"),
    [
        ("", "--sizes : is no size", "64KB"),
        ("1XB", "--sizes 1XB: is no size", "64KB"),
        ("many", "many", "64KB"),
        ("1KB,", "is no size", "64KB"),
        ("1.5MB", "1.5MB", "64KB"),
        ("-1KB", "-1KB", "64KB"),
        ("\u0661KB", "\u0661KB", "64KB"),
        ("1KB..", "is no size", "1KB..256MB"),
        ("1KB..2KB..4KB", "2KB..4KB", "64KB"),
        ("4MB..1MB", "4MB..1MB: the range ends below", "write 1MB..4MB"),
        ("0", "--sizes 0", "multiple of 4 bytes"),
        ("0KB..4KB", "--sizes 0KB", "multiple of 4 bytes"),
        ("1001", "1001", "multiple of 4 bytes"),
        ("5GB", "5GB", "up to 4 GB"),
        ("9" * 5000, "9999", "up to 4 GB"),
    ],
)
def test_sizes_that_are_refused(text: str, named: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_sizes(text)
    assert named in str(caught.value)
    assert remedy in str(caught.value)


def test_numbers_for_people() -> None:
    assert [format_size(size) for size in (4, 1020, 1024, 3 * 2**19, 2**28, 2**32)] == [
        *("4 B", "1020 B", "1 KB", "1536 KB", "256 MB", "4 GB")
    ]
    assert [format_seconds(seconds) for seconds in (4.56e-7, 8.13e-5, 1.2345e-3, 0.25, 2.0)] == [
        *("0.456 us", "81.3 us", "1.23 ms", "250 ms", "2 s")
    ]


def _run(output: Path, *arguments: str) -> tuple[CollectivesFile, str]:
    done = lockstep("allreduce", *TINY, *arguments, "--output", output)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return read_collectives(output), done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[CollectivesFile, str]:
    require_backend("horovod")
    return _run(tmp_path_factory.mktemp("collectives") / "out.json", "--backends", "ddp,horovod")


def test_each_library_is_measured_on_its_own_path(measured: tuple[CollectivesFile, str]) -> None:
    content, _ = measured
    found = [(series.backend, series.operation) for series in content.series]
    of_horovod = [operation for operation in OPERATIONS if operation != "gather"]
    assert found == [*(("ddp", one) for one in OPERATIONS), *(("horovod", one) for one in of_horovod)]
    for series in content.series:
        assert (series.transport, series.device, series.num_processes) == ("gloo", "cpu", 2)
        assert [point.bytes for point in series.points] == list(SIZES)
        for point in series.points:
            assert 5 <= len(point.seconds) <= 100
            assert min(point.seconds) > 0
            assert point.busbw == pytest.approx(point.algbw * bus_factor(series.operation, 2))
    assert content.command.startswith("launch/run.sh allreduce --num-processes 2")
    assert "torch" in content.environment.packages


def test_the_terminal_shows_every_point(measured: tuple[CollectivesFile, str]) -> None:
    content, text = measured
    assert "horovod has no gather: left out" in text
    for operation in OPERATIONS:
        table = text.partition(f"\n{operation}, 2 ranks")[2].partition("ranks (")[0]
        rows = [line for line in table.splitlines() if re.match(r" *\d+ KB ", line)]
        num_backends = sum(series.operation == operation for series in content.series)
        assert [len(re.findall(r" [mu]?s ", f"{row} ")) for row in rows] == [num_backends] * len(SIZES)
    assert text.count("(gloo on cpu): ") == len(content.series)
    assert len(max(text.splitlines(), key=len)) < 250


@pytest.mark.slow
def test_more_ranks_and_other_backends(tmp_path: Path) -> None:
    require_backend("accelerate")
    more = ("--num-processes", "2,3", "--backends", "accelerate,tests.by_hand:ByHandBackend", "--sizes", "1KB,12")
    content, _ = _run(tmp_path / "out.json", *more, "--operations", "gather,all_reduce,gather")
    assert [(one.num_processes, one.backend, one.operation) for one in content.series] == [
        (num_processes, backend, operation)
        for num_processes in (2, 3)
        for backend in ("accelerate", "tests.by_hand:ByHandBackend")
        for operation in ("gather", "all_reduce")
    ]
    sizes = [[point.bytes for point in series.points] for series in content.series]
    assert sizes == [[8, 1024], [12, 1024], [8, 1024], [12, 1024], [12, 1020], [12, 1024], [12, 1020], [12, 1024]]
    assert all(series.fit is None for series in content.series)


@pytest.mark.slow
def test_horovod_over_mpi(tmp_path: Path) -> None:
    require_backend("horovod")
    require_start_method("mpirun")
    content, _ = _run(tmp_path / "out.json", "--backends", "horovod", "--start-method", "mpirun")
    assert {series.transport for series in content.series} == {"mpi"}


class BareBackend(DDPBackend):
    """Communicates on its own, through no library that the benchmark knows."""

    name = "bare"

    def __init__(self, options: BackendOptions) -> None:
        Backend.__init__(self, options)
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cpu")
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        timeout = timedelta(seconds=options.timeout_seconds)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("bare", store), self.rank, self.world_size, timeout)

    def setup(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        return model, optimizer

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, op.upper())
        reduced = tensor.clone()
        self._group.allreduce([reduced], options).wait()
        return reduced

    def barrier(self) -> None:
        self._group.barrier().wait()

    def effective_settings(self) -> dict[str, str]:
        return {}

    def shutdown(self) -> None:
        self.barrier()


@pytest.mark.slow
def test_an_adapter_of_ones_own_library_is_measured_through_the_adapter(tmp_path: Path) -> None:
    content, text = _run(tmp_path / "out.json", "--backends", "tests.test_collectives:BareBackend")
    (series,) = content.series
    assert (series.operation, series.transport) == ("all_reduce", "unknown")
    for operation in OPERATIONS[1:]:
        assert f"BareBackend has no {operation}: left out" in text
    done = lockstep(
        *("allreduce", *TINY, "--backends", "tests.test_collectives:BareBackend", "--operations", "gather,broadcast"),
        *("--output", tmp_path / "none.json"),
    )
    assert done.returncode == 2
    assert done.stderr.startswith("lockstep: --operations gather,broadcast: no backend asked for")
    assert not (tmp_path / "none.json").exists()


class FaultyBackend(DDPBackend):
    """Rank 1 goes wrong in the tenth barrier, in the way that the environment says."""

    name = "faulty"
    _num_barriers = 0

    def barrier(self) -> None:
        self._num_barriers += 1
        if self.rank == 1 and self._num_barriers == 10:
            self._go_wrong(os.environ["COLLECTIVES_FAULT"])
        super().barrier()

    def _go_wrong(self, fault: str) -> None:
        if fault == "raises":
            raise ArithmeticError("the planted error")
        if fault == "is-killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hangs":
            time.sleep(1000)


FAULTS = {
    "raises": "rank 1: ArithmeticError: the planted error",
    "is-killed": "rank 1: ended without a message",
    "hangs": "rank 1: stuck: rank 0 waited for it in vain",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_goes_wrong_ends_everything_by_name(tmp_path: Path, fault: str) -> None:
    output = tmp_path / "out.json"
    began = time.monotonic()
    done = lockstep(
        *("allreduce", *TINY, "--backends", "tests.test_collectives:FaultyBackend", "--timeout", "5"),
        *("--output", output),
        env={"COLLECTIVES_FAULT": fault},
    )
    assert time.monotonic() - began < stretched(60)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"lockstep: tests.test_collectives:FaultyBackend with 2 ranks failed: {FAULTS[fault]}"
    )
    assert len(done.stderr.splitlines()) == 2
    assert _log(done.stderr).exists()
    assert not output.exists()
    shutil.rmtree(_log(done.stderr).parents[2])


class WrongBackend(DDPBackend):
    """Its broadcasts from the first collective on are none."""

    name = "wrong"

    def setup(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        prepared = super().setup(model, optimizer)
        dist.broadcast = lambda values, src: None
        return prepared


@pytest.mark.slow
def test_a_collective_that_leaves_the_wrong_values_is_an_error(tmp_path: Path) -> None:
    done = lockstep(
        *("allreduce", *TINY, "--backends", "tests.test_collectives:WrongBackend", "--operations", "broadcast"),
        *("--output", tmp_path / "out.json"),
    )
    assert done.returncode == 1
    assert "rank 1: RuntimeError: broadcast of 256 values from each rank is wrong" in done.stderr
    assert "value 0 is 1.0 instead of 0.0" in done.stderr
    assert list(tmp_path.iterdir()) == []
    shutil.rmtree(_log(done.stderr).parents[2])


@pytest.mark.slow
def test_a_rank_that_stops_inside_a_library_that_waits_for_ever_is_named(tmp_path: Path) -> None:
    require_backend("horovod")
    command = [str(LOCKSTEP), "allreduce", "--backends", "horovod", "--sizes", "64MB", "--seconds-per-point", "600"]
    command += ["--timeout", "5", "--output", str(tmp_path / "out.json")]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    _measuring_rank(job.pid, "1").suspend()
    _, stderr = job.communicate(timeout=180)
    assert job.returncode == 1
    assert "horovod with 2 ranks failed: rank 1: " in stderr
    shutil.rmtree(_log(stderr).parents[2])


def _measuring_rank(launcher: int, rank: str) -> psutil.Process:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                is_rank = "compare.collectives.rank" in words and process.environ().get("HOROVOD_RANK") == rank
                if is_rank and (Path(words[words.index("compare.collectives.rank") + 1]) / "progress.jsonl").exists():
                    return process
        time.sleep(0.1)
    raise AssertionError("no rank has come as far as measuring")


def _log(stderr: str) -> Path:
    return Path(stderr.rpartition("more in ")[2].strip())


class PlacelessBackend(DDPBackend):
    """Runs nowhere."""

    name = "placeless"
    capabilities = Capabilities({"tpu": ("fp32",)}, start_methods=("torchrun",))


REFUSED = {
    "--backends pytorch": ("there is no backend 'pytorch'", "ddp"),
    "--backends ddp,": ("there is no backend ''", "ddp"),
    "--backends apex": ("apex cannot run here", "apex"),
    "--backends single": ("--num-processes 2: single runs at most 1", "choose another backend"),
    "--backends no.such:Thing": ("no.such:Thing", "PYTHONPATH"),
    "--backends tests.test_collectives:PlacelessBackend": ("does not run on cpu", "choose another backend"),
    "--num-processes 1": ("--num-processes 1", "choose 2 or more"),
    "--num-processes 2,1": ("--num-processes 1", "choose 2 or more"),
    "--num-processes 0": ("--num-processes 0", "from 1 to 64"),
    "--num-processes -2": ("--num-processes -2", "from 1 to 64"),
    "--num-processes many": ("--num-processes many", "from 1 to 64"),
    "--num-processes 2.5": ("--num-processes 2.5", "whole number"),
    "--num-processes 65": ("--num-processes 65", "from 1 to 64"),
    "--sizes 1XB": ("--sizes 1XB", "64KB"),
    "--sizes 4MB..1MB": ("4MB..1MB", "1MB..4MB"),
    "--sizes 4": ("--sizes 4: 4 B", "8 bytes or more"),
    "--operations all_to_all": ("--operations all_to_all", "all_gather"),
    "--operations all_reduce,": ("--operations :", "all_gather"),
    "--device tpu": ("--device tpu", "choose auto, cpu or cuda"),
    "--device cuda": ("--device cuda: no GPU", "use --device cpu"),
    "--start-method ssh": ("--start-method ssh", "torchrun or spawn"),
    "--backends ddp --start-method horovodrun": ("--start-method horovodrun: ddp", "torchrun or spawn"),
    "--threads-per-rank 0": ("--threads-per-rank 0", "from 1 to"),
    "--timeout 0": ("--timeout 0", "from 1 to"),
    "--timeout nan": ("--timeout nan", "from 1 to"),
    "--timeout soon": ("--timeout soon", "from 1 to"),
    "--seconds-per-point -1": ("--seconds-per-point -1", "from 0 to"),
    "--seconds-per-point inf": ("--seconds-per-point inf", "from 0 to"),
    "--output there.json": ("--output there.json: exists already", "choose another file"),
    "--output nowhere/out.json": ("there is no directory nowhere", "create it first"),
    f"--output {'x' * 300}": ("File name too long", "choose another file"),
    "--size 1KB": ("unrecognized arguments: --size", "--help"),
    "everything": ("unrecognized arguments: everything", "--help"),
    "--sizes": ("--sizes", "--help"),
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_bad_input_ends_with_one_line(tmp_path: Path, arguments: str) -> None:
    if arguments == "--backends apex" and find_backend("apex").unavailable_reason() is None:
        pytest.skip("apex is here")
    (tmp_path / "there.json").write_text("mine")
    done = lockstep("allreduce", *arguments.split(" "), cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    for part in REFUSED[arguments]:
        assert part in done.stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"there.json": "mine"}


@pytest.mark.parametrize("damage", ["torn", "empty", "other-kind", "no-kind", "absent"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str, measured: tuple[CollectivesFile, str]) -> None:
    whole = json.loads(measured[0].model_dump_json())
    texts = {
        "torn": json.dumps(whole)[:-20],
        "empty": "",
        "other-kind": json.dumps({**whole, "kind": "race"}),
        "no-kind": json.dumps({name: value for name, value in whole.items() if name != "kind"}),
    }
    path = tmp_path / "file.json"
    if damage in texts:
        path.write_text(texts[damage])
    with pytest.raises((OSError, ValueError)):
        read_collectives(path)
